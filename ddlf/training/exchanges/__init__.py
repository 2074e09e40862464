"""How updates become the next weights: one folder or file for each exchange."""
