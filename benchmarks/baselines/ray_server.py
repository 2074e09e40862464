"""Ray's parameter server, like the asynchronous example in Ray's documentation.

    python ray_server.py ADDRESS HOST WORKERS VALUES PUSHES

This program needs only ray and NumPy, so it can run in its own environment. The server is an actor on the node
``HOST``. Each other node has one worker, which is an actor with ready gradients. The driver sends a worker's gradients
to the server, and the server's result back to the same worker. The program prints the seconds between two pushes,
without the first 2 of each worker.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import numpy as np
import ray

LEFT_OUT = 2
START_S = 240.0
"""Longest time for all nodes to start."""


@ray.remote(num_cpus=1)
class Server:
    """The server of the model. Workers push to it and fetch from it.

    Args:
        values: Number of values of the model, in one array.
    """

    def __init__(self, values: int) -> None:
        self.weights = np.zeros(values, np.float32)
        self.times: list[float] = []

    def apply_gradients(self, *gradients: np.ndarray) -> np.ndarray:
        """Apply gradients, and return the weights."""
        for gradient in gradients:
            self.weights -= np.float32(0.001) * gradient
        self.times.append(time.perf_counter())
        return self.weights

    def get_weights(self) -> np.ndarray:
        """Return the current weights."""
        return self.weights

    def times_of_pushes(self) -> list[float]:
        """Return the time of each push."""
        return self.times


@ray.remote(num_cpus=1)
class Worker:
    """A worker that pushes constant gradients.

    Args:
        values: Number of values of the model.
    """

    def __init__(self, values: int) -> None:
        self.gradients = np.full(values, 1e-3, np.float32)

    def compute_gradients(self, weights: np.ndarray) -> np.ndarray:
        """Return constant gradients, so that no time goes into computing them."""
        return self.gradients


def main(address: str, host: str, workers: int, values: int, pushes: int) -> None:
    """Run the driver."""
    until, nodes = time.monotonic() + START_S, list[str]()
    while len(nodes) <= workers and time.monotonic() < until:
        try:
            ray.init(address=address, log_to_driver=False, ignore_reinit_error=True)
            nodes = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
        except ConnectionError:  # the first node is not there yet
            pass
        time.sleep(1)
    worker_nodes = [address for address in nodes if address != host]
    assert len(worker_nodes) == workers, f"{len(worker_nodes)} nodes of {workers} are there"

    def on(node: str) -> dict[str, dict[str, float]]:
        return {"resources": {f"node:{node}": 0.01}}

    server = Server.options(**on(host)).remote(values)
    workers_on_nodes = [Worker.options(**on(node)).remote(values) for node in worker_nodes]
    now = server.get_weights.remote()
    waiting = {worker.compute_gradients.remote(now): worker for worker in workers_on_nodes}
    for _ in range(pushes * workers):
        (ready, *_), _ = ray.wait(list(waiting))
        worker = waiting.pop(ready)
        now = server.apply_gradients.remote(ready)
        waiting[worker.compute_gradients.remote(now)] = worker
    times = ray.get(server.times_of_pushes.remote())[LEFT_OUT * workers :]
    print(*(after - before for before, after in pairwise(times)), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
