"""Displays of a run in a terminal or notebook. They depend on events only."""
