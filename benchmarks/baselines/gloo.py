"""All-reduce of PyTorch with gloo over TCP: one rank of it. Needs torch alone, so that it runs in an environment of its own.

    python gloo.py RANK WORLD ADDRESS VALUES REPEATS

After each repeat the first rank prints its seconds, from a common start to its own end, and all go on when its standard input has a line.
"""

import datetime
import sys
import time

import torch
from torch import distributed


def main(rank: int, world: int, address: str, values: int, repeats: int) -> None:
    """Take part."""
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:29500",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(minutes=30),
    )
    tensor = torch.full((values,), 1e-3)
    for _ in range(repeats):
        distributed.barrier()
        begin = time.perf_counter()
        distributed.all_reduce(tensor)
        seconds = time.perf_counter() - begin
        distributed.barrier()
        if rank == 0:
            print(seconds, flush=True)
            sys.stdin.readline()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:]))
