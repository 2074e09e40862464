"""Displays and reports of a run: the terminal, the dashboard, the run folder and its report."""
