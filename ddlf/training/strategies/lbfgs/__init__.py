"""Sandblaster L-BFGS: full-batch training whose vectors are in shards on the workers."""
