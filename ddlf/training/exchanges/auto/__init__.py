"""Chooses the exchange that is probably the fastest for a run."""
