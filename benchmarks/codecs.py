"""Measure how many bytes codecs of updates and weights save, and how much accuracy they cost.

    python -m benchmarks.codecs [--rounds 10] [--seeds 3] [--samples 60000]

Every variant trains the published CNN on MNIST with the same seeds. The accuracy is on the test data: mean and spread
over the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

from benchmarks.unequal import App
from ddlf import Cluster

VARIANTS = (
    ("float32", "float32"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("int8", "float16"),
    ("int8-block", "delta:int8"),
    ("topk:0.05", "float16"),
)


async def main(options: argparse.Namespace) -> None:
    """Measure and print a line for each variant."""
    print(
        f"{'updates':<12}{'weights':<14}{'bytes/round':>12}{'of float32':>12}{'error':>8}   accuracy over {options.seeds} seeds"
    )
    whole = 0.0
    async with Cluster.local(2) as cluster:
        for updates, weights in (
            VARIANTS if options.only is None else [tuple(options.only.split(",")), VARIANTS[0]][::-1]
        ):
            accuracies, sizes, errors = [], [], []
            for seed in range(options.seeds):
                app = App(cluster)
                app.samples, app.seed, app.master_epochs = options.samples, seed, options.rounds
                app.codec, app.weights_codec, app.precision = updates, weights, options.precision
                records = await app.train_model()
                sizes += [record.bytes_out + record.bytes_back for record in records[1:]]
                errors += [record.error for record in records]
                accuracies.append((await app.evaluate_model())["accuracy"])
            size = statistics.mean(sizes)
            whole = whole or size
            print(
                f"{updates:<12}{weights:<14}{size:>12,.0f}{size / whole:>12.3f}{statistics.mean(errors):>8.2%}"
                f"   {statistics.mean(accuracies):.4f} ({min(accuracies):.4f}-{max(accuracies):.4f})",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--only", metavar="UPDATES,WEIGHTS", help="one variant beside float32")
    asyncio.run(main(parser.parse_args()))
