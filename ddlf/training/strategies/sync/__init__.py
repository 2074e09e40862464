"""Synchronous training."""
