"""One rank of a synchronous exchange by PyTorch, with gloo over TCP.

    python gloo.py WAY RANK WORLD ADDRESS VALUES REPEATS

This program needs only torch, so it can run in its own environment. With the way ``gloo`` it measures an all-reduce of
VALUES values. With ``ddp`` it measures a training step with SGD in ``DistributedDataParallel``: the model has VALUES
values, and its loss takes almost no time to compute. After each repeat the first rank prints its seconds, from the
common start to its own end. All ranks continue when they read a line from standard input.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Callable

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def reduction(values: int) -> Callable[[], object]:
    """An all-reduce."""
    tensor = torch.full((values,), 1e-3)
    return lambda: distributed.all_reduce(tensor)


class Sum(nn.Module):
    """The sum of all weights. One tensor has 90 % of them."""

    def __init__(self, values: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            [torch.zeros(size) for size in (values - values // 10, *[values // 10 // 4] * 4) if size]
        )

    def forward(self) -> torch.Tensor:
        """The loss."""
        return torch.stack([part.sum() for part in self.parts]).sum()


def step(values: int) -> Callable[[], object]:
    """A training step."""
    model = DistributedDataParallel(Sum(values))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def exchange() -> None:
        optimizer.zero_grad()
        model().backward()
        optimizer.step()

    return exchange


WAYS = {"gloo": reduction, "ddp": step}


def main(way: str, rank: int, world: int, address: str, values: int, repeats: int) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:29500",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(minutes=30),
    )
    exchange = WAYS[way](values)
    for _ in range(repeats):
        distributed.barrier()
        begin = time.perf_counter()
        exchange()
        seconds = time.perf_counter() - begin
        distributed.barrier()
        if rank == 0:
            print(seconds, flush=True)
            sys.stdin.readline()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], *map(int, sys.argv[5:]))
