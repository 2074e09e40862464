"""Run one contender in its own process: ``python -m benchmarks.contender NAME WORKLOAD``.

The last line of the output is a JSON object: ``seconds``, ``startup_s``, ``accuracy``, ``bytes_out``, ``bytes_back``,
``curve`` (pairs of seconds and accuracy) and ``notes``. The module ``benchmarks.workload`` explains the times.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.workload import Outcome, Weights, Workload


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to train.

    Args:
        module: With a function ``run(workload, **settings) -> Outcome``, and maybe ``missing(**settings)``, which returns why it cannot run.
        about: The description in the table.
        settings: Arguments of ``run``. The settings of ``benchmarks.ours`` are attributes of the app.
        leaves_orphans: Whether it ends without waiting for all its processes. Then its processor time is not known.
    """

    module: str
    about: str
    settings: dict[str, Any] = field(default_factory=dict)
    leaves_orphans: bool = False

    def missing(self) -> str | None:
        """Return why the contender cannot run here, or None."""
        check = getattr(importlib.import_module(self.module), "missing", None)
        return check(**self.settings) if check else None


LIMIT = "limit"
OURS, BASELINES = "benchmarks.ours", "benchmarks.baselines"
CONTENDERS = {
    LIMIT: Contender(f"{BASELINES}.limit", "bare fit in single-threaded processes, as fast as fit can be"),
    "limit-arrays": Contender(f"{BASELINES}.limit", "the same on arrays: fit can stall", {"feed": "arrays"}),
    "limit-1": Contender(f"{BASELINES}.limit", "bare fit in one single-threaded process", {"workers": 1}),
    "plain": Contender(f"{BASELINES}.plain", "model.fit on arrays, one process, all cores: can stall"),
    "plain-dataset": Contender(f"{BASELINES}.plain", "the same, as fast as fit can be", {"feed": "dataset"}),
    "sync": Contender(OURS, "DDLF, synchronous", {"mode": "sync"}),
    "async": Contender(OURS, "DDLF, asynchronous", {"mode": "async"}),
    "sync-bfloat16": Contender(OURS, "DDLF, computing in bfloat16", {"mode": "sync", "precision": "mixed_bfloat16"}),
    "sync-int8": Contender(
        OURS,
        "DDLF, int8 updates, float16 weights",
        {"mode": "sync", "codec": "int8", "weights_codec": "float16"},
    ),
    "published-sync": Contender(
        f"{BASELINES}.published", "Phan and Do 2023, Algorithm 2, on 90 % of the samples: can stall", {"mode": "sync"}
    ),
    "published-async": Contender(
        f"{BASELINES}.published", "Phan and Do 2023, Algorithm 3, on 90 % of the samples: can stall", {"mode": "async"}
    ),
    "spark": Contender(
        f"{BASELINES}.spark",
        "an RDD of samples, Keras in mapPartitions: can stall",
        {"tuned": False, "threads": None},
        True,
    ),
    "spark-tuned": Contender(
        f"{BASELINES}.spark", "blocks, a kept model, as fast as fit can be", {"tuned": True, "threads": 1}, True
    ),
    "sync-1": Contender(OURS, "DDLF, one worker of one thread", {"mode": "sync", "workers": 1, "threads": 1}),
}


def accuracy(model: Any, weights: Weights, x: Any, y: Any) -> float:
    """Accuracy on the test data, 0 to 1."""
    model.set_weights(weights)
    return float(model.evaluate(x, y, batch_size=512, verbose=0, return_dict=True)["accuracy"])


def summary(outcome: Outcome, workload: Workload, begin: float) -> dict[str, Any]:
    """Return the facts to print about an outcome. Evaluates its weights."""
    curve: list[tuple[float, float]] = []
    final = None
    if outcome.weights is not None:
        app = workload.load()
        final = accuracy(app.model, outcome.weights, app.x_test, app.y_test)
        curve = [
            (at - outcome.ready, accuracy(app.model, weights, app.x_test, app.y_test))
            for at, weights in outcome.snapshots
        ]
    return {
        "seconds": outcome.end - outcome.ready,
        "startup_s": outcome.ready - begin,
        "accuracy": final,
        "bytes_out": outcome.bytes_out,
        "bytes_back": outcome.bytes_back,
        "curve": curve,
        "notes": outcome.notes,
    }


def main(name: str, text: str) -> None:
    """Run one contender once."""
    begin = time.monotonic()
    contender, workload = CONTENDERS[name], Workload.parse(text)
    outcome: Outcome = importlib.import_module(contender.module).run(workload, **contender.settings)
    print(json.dumps(summary(outcome, workload, begin)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
