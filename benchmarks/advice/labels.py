"""Measure how many of 2 % wrong labels the adviser finds, and how many of its findings are right.

    python -m benchmarks.advice.labels [--seeds 1,2]

The benchmark replaces 2 % of the labels in the training part of scikit-learn's digits by other ones. For
``ddlf advise --cluster``, two local workers train the model of the program five times. The adviser compares the
predictions for the omitted samples with their labels.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.advice.defects import healthy
from benchmarks.advice.trial import app_of
from benchmarks.measure import table
from ddlf.cluster.cluster import Cluster
from ddlf.extras.advice.advise import advise

SHARE = 0.02
PROGRAMS = {  # for each program: a line, the name of the labels, and the code that goes before this line
    "digits_mlp": ("        self.x_train, self.y_train = x[train]", "y", "y[flipped] = (y[flipped] + by) % 10"),
    "digits_cnn": (
        "        self.x_train, self.y_train = images",
        "labels",
        "labels[flipped] = np.eye(10)[(labels[flipped].argmax(axis=1) + by) % 10]",
    ),
}


def flipped(seed: int) -> tuple[list[int], list[int]]:
    """Numbers of samples, and by how many classes each is moved."""
    random = np.random.default_rng(seed)
    return sorted(random.choice(1400, round(1400 * SHARE), replace=False).tolist()), random.integers(
        1, 10, round(1400 * SHARE)
    ).tolist()


def text(program: str, seed: int) -> str:
    """A program with flipped labels; without, if the seed is 0."""
    if not seed:
        return healthy(program)
    line, _, change = PROGRAMS[program]
    numbers, by = flipped(seed)
    lines = f"        flipped, by = np.array({numbers}), np.array({by})\n        {change}\n"
    whole = healthy(program)
    assert whole.count(line) == 1
    return whole.replace(line, lines + line)


async def doubtful_labels(path: Path) -> tuple[list[int], int]:
    """Samples whose labels are doubted, and how many samples there are."""
    answer = await advise(app_of(path), "cluster", workers=2, cluster=Cluster.local(2))
    for sentence in (*answer.left, *(f"{advice.rule.id} failed: {advice.why}" for advice in answer.failed)):
        print(sentence)
    doubts = [advice.finding.samples for advice in answer.advice if advice.rule.id == "D18"]
    return list(doubts[0]) if doubts else [], 1400


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[float, float]]:
    """Print the table; returns recall and precision of each program, over all seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2,3,4,5", help="with commas; 0 flips nothing")
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    options = parser.parse_args(argv)
    rows, means = [["program", "seed", "flipped", "found", "of these flipped", "recall", "precision", "s"]], {}
    with tempfile.TemporaryDirectory() as folder:
        for program in options.programs.split(","):
            pairs = []
            for seed in map(int, options.seeds.split(",")):
                path = Path(folder) / f"{program}.py"
                path.write_text(text(program, seed), encoding="utf-8")
                begin = time.monotonic()
                doubted, _ = asyncio.run(doubtful_labels(path))
                seconds = time.monotonic() - begin
                wrong = set(flipped(seed)[0]) if seed else set()
                hit = len(wrong & set(doubted))
                recall, precision = hit / max(1, len(wrong)), hit / max(1, len(doubted))
                if seed:
                    pairs.append((recall, precision))
                shares = (f"{recall:.0%}", f"{precision:.0%}", f"{seconds:.0f}")
                rows.append([program, str(seed), str(len(wrong)), str(len(doubted)), str(hit), *shares])
            if pairs:
                means[program] = tuple(statistics.mean(column) for column in zip(*pairs, strict=True))
    print(table(rows))
    for program, (recall, precision) in means.items():
        print(f"{program}: recall {recall:.0%}, precision {precision:.0%}")
    return means


if __name__ == "__main__":
    main()
