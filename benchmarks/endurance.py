"""Check that over many rounds a worker's memory does not grow, and that Keras compiles nothing again.

    python -m benchmarks.endurance [--rounds 50] [--samples 12000]

The output has each worker's resident memory after round 5 and after the last round. It also has the number of times
that TensorFlow traced the training step, after the first and after the last round.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from benchmarks.unequal import App
from ddlf import Cluster


class Watched(App):
    """Keeps, on the worker, its memory after every round and the number of traces."""

    def train(self, weights: list[Any], worker_epochs: int, batch_size: int) -> Any:
        """Train, then look."""
        outcome = super().train(weights, worker_epochs, batch_size)
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        traced = [
            cell.cell_contents.experimental_get_tracing_count()
            for cell in self.model.train_function.__closure__
            if hasattr(cell.cell_contents, "experimental_get_tracing_count")
        ]
        self.worker.data.setdefault("seen", []).append((pages * 4096, *traced))
        return outcome


async def main(options: argparse.Namespace) -> None:
    """Train and print."""
    async with Cluster.local(2) as cluster:
        app = Watched(cluster)
        app.samples = options.samples
        await app.train_sync(master_epochs=options.rounds)
        for number, sizes in enumerate(await cluster.run_code("self.data['seen']"), 1):
            early, late = sizes[4][0], sizes[-1][0]
            print(
                f"worker {number}: {early / 1e6:.1f} MB after round 5, {late / 1e6:.1f} MB after round {len(sizes)}"
                f" ({100 * (late / early - 1):+.2f} %); traces {sizes[0][1]} after round 1, {sizes[-1][1]} at the end"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--samples", type=int, default=12_000)
    asyncio.run(main(parser.parse_args()))
