"""Manages the workers of a run: opens them, gives them slots, and handles joins and losses."""
