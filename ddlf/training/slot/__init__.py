"""One slot's round on a worker: the task, the replica that carries it, the model that it trains, and what the slot
keeps between rounds."""
