"""The sharded exchange: each worker merges and steps a range of the weights."""
