"""Kill workers with private data and their master at random moments, and compare the bits with an undisturbed run.

    python -m tests.trials.private [--kills 20] [--masters 4] [--workers 3] [--seed 0] [--iterations 60]

A Keras app trains on ``ddlf-worker`` processes, each with its own samples. ``kill -9`` ends executors. Between these kills
it ends the master, which restarts and continues from the last checkpoint. Each worker logs the samples that it trains on,
and the master logs the worker of each slot. No slot may ever run on another worker. The SHA-256 of the weights must equal
the one of an undisturbed run, since each round waits for a lost worker. Otherwise the exit code is 1.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import ddlf
from benchmarks.measure import table
from tests.trials.killed import kills
from tests.trials.options import read_options

APP = "tests.trials.private:Private"


def samples(number: int) -> Any:
    """Return the generated samples of a worker."""
    chance = np.random.default_rng(number)
    x = chance.normal(size=(100 * number + 50, 20)).astype("float32")
    return x, (x[:, :5] + chance.gumbel(size=(len(x), 5))).argmax(1)


def digest(x: Any) -> str:
    """Return a hash of some samples, which does not depend on their order."""
    return hashlib.sha256(np.sort(x, axis=0).tobytes()).hexdigest()[:16]


class Private(ddlf.IApp):
    """An app with a small network. Each worker has its own generated samples.

    Attributes:
        log: The folder of the logs.
    """

    private, verbose, threads, advice = True, False, 1, "off"
    batch_size = 16
    log = ""

    async def load_dataset(self) -> None:
        """Generate the samples of this worker."""
        self.x_train, self.y_train = samples(self.worker.id)

    async def create_model(self) -> None:
        """Make a network with one hidden layer, and an optimizer with state."""
        import keras

        layers = [keras.Input((20,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(5)]
        self.model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(keras.optimizers.Adam(0.01), loss)

    def train(self, weights: Any, worker_epochs: int, batch_size: int) -> Any:
        """Log the samples that this worker trains on."""
        with open(Path(self.log) / f"worker-{self.worker.id}", "a") as file:
            file.write(f"{digest(self.x_train[self.indices])}\n")
        return super().train(weights, worker_epochs, batch_size)

    def on_event(self, event: Any) -> None:
        """Log the worker of each slot."""
        if event.kind == "start":
            with open(Path(self.log) / "slots", "a") as file:
                file.write(f"{event.slot} {event.worker}\n")


def tried(**options: Any) -> dict[str, Any]:
    """Kill workers and the master of a run. Return the result, and the number of rounds of slots on a wrong worker."""
    with tempfile.TemporaryDirectory() as folder:
        result = kills(APP, **options, log=folder)
        slots = (Path(folder) / "slots").read_text().splitlines()
        logs = {
            number: (Path(folder) / f"worker-{number}").read_text().split()
            for number in range(1, options["workers"] + 1)
        }
    elsewhere = sum(slot != worker for slot, worker in map(str.split, slots))
    mismatches = sum(sample != digest(samples(number)[0]) for number, log in logs.items() for sample in log)
    return {**result, "slot rounds": len(slots), "elsewhere": elsewhere, "other samples": mismatches}


def main() -> None:
    """Run the trial."""
    options = read_options(__doc__ or "", kills=20, masters=4, workers=3, seed=0, iterations=60)
    result = tried(**vars(options), pause_s=0.5)
    print(table([list(result), [str(value) for value in result.values()]]))
    sys.exit(not (result["same"] and result["ledger"] and not result["elsewhere"] and not result["other samples"]))


if __name__ == "__main__":
    main()
