"""The longest time that a test waits for an event."""

PATIENCE_S = 120
"""Limit in seconds for each wait of a test. Even on a slow and busy machine, only a hanging test takes so long."""
