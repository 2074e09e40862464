"""Reads cluster.yaml: the addresses of workers, and the defaults of a run. Runs on the master."""
