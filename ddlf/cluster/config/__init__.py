"""Which workers there are, and the defaults of a run: addresses, and cluster.yaml. Runs on the master."""
