"""One slot's round on a worker: the task, the replica that carries it, the model, and the slot state between rounds."""
