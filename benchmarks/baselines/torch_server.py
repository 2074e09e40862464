"""One process of a parameter server over PyTorch's RPC.

    python torch_server.py RANK WORLD ADDRESS VALUES PUSHES

It follows PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions". It needs only torch, so
it can run in its own environment.

Rank 0 has the model and updates it by SGD. Each other rank has ready gradients, and repeats ``PUSHES`` times: it sends
its gradients and receives the model. The server takes a step after each push (``batch_update_size`` of the tutorial is
1), so no rank waits for the others. The program prints the seconds between two pushes, without the first 2 of each
rank.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from itertools import pairwise

import torch
from torch import nn, optim
from torch.distributed import rpc

LEFT_OUT = 2
TIMEOUT_S = 1800


class Server:
    """The server of the model. Ranks push to it and fetch from it.

    Args:
        values: Number of values of the model, in one tensor.
    """

    def __init__(self, values: int) -> None:
        self.model = nn.ParameterList([nn.Parameter(torch.zeros(values))])
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.001)
        self.lock = threading.Lock()
        self.times: list[float] = []

    def get_model(self) -> nn.Module:
        """Return the current model."""
        return self.model

    def update_and_fetch(self, gradients: list[torch.Tensor]) -> nn.Module:
        """Apply gradients."""
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            self.times.append(time.perf_counter())
        return self.model

    def times_of_pushes(self) -> list[float]:
        """Return the time of each push."""
        return self.times


def push(server: rpc.RRef[Server], values: int, pushes: int) -> None:
    """Run one rank, which pushes constant gradients."""
    gradients = [torch.full((values,), 1e-3)]
    server.rpc_sync().get_model()
    for _ in range(pushes):
        server.rpc_sync().update_and_fetch(gradients)


def main(rank: int, world: int, address: str, values: int, pushes: int) -> None:
    """Run one process."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, "29501"
    torch.set_num_threads(1)
    # Ranks on one computer would find its shared memory, and not use the links.
    how = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=world, rpc_timeout=TIMEOUT_S, _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc("server" if rank == 0 else f"rank{rank}", rank=rank, world_size=world, rpc_backend_options=how)
    if rank == 0:
        server = rpc.remote("server", Server, (values,))
        waiting = [rpc.rpc_async(f"rank{peer}", push, (server, values, pushes), timeout=0) for peer in range(1, world)]
        torch.futures.wait_all(waiting)
        times = server.rpc_sync().times_of_pushes()[LEFT_OUT * (world - 1) : -(world - 1)]
        print(*(after - before for before, after in pairwise(times)), flush=True)
    rpc.shutdown(timeout=0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
