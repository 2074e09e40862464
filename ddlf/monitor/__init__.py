"""What people see of a run: the terminal, the dashboard, the run folder and its report."""
