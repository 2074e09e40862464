"""The settings of a run: declarations, checks, and how they are read."""
