"""Evaluates test and validation data, on the master or on workers, and merges metrics."""
