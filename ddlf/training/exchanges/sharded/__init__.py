"""The sharded exchange: each worker merges and steps a slice of the weights."""
