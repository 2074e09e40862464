"""Launchers, which start workers. Runs on the master."""
