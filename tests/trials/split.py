"""Kill workers and the master of a model in parts, and compare the bits with an undisturbed run.

    python -m tests.trials.split [--kills 10] [--masters 3] [--workers 3] [--rounds 60] [--seed 0]

A Keras model with Adam and dropout is split into two parts, and one worker is spare. ``kill -9`` ends executors. Between
these kills it ends the master, which restarts and continues from slices of the last checkpoint. The exit code is 1 if the
SHA-256 of the weights differs, or if a sample was not trained on exactly once in each epoch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import ddlf
from tests.trials.killed import kills
from tests.trials.lbfgs import Points
from tests.trials.options import read_options

APP = "tests.trials.split:Parts"


class Parts(ddlf.IApp):
    """A small network in two parts, on the points of the trial of L-BFGS."""

    verbose, threads = False, 1
    split, micro_batches = "stages:2", 4
    worker_epochs, batch_size = 1, 100
    samples, width = Points.samples, Points.width
    load_dataset = Points.load_dataset

    async def create_model(self) -> None:
        """Make a network with two hidden layers."""
        import keras
        from keras import layers

        hidden = [layers.Dense(20, "tanh"), layers.Dropout(0.2), layers.Dense(20, "tanh")]
        self.model = keras.Sequential([keras.Input((self.width,)), *hidden, layers.Dense(5, "softmax")])
        self.model.compile("adam", "sparse_categorical_crossentropy")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial and print its result. Return the exit code."""
    options = read_options(__doc__, argv, kills=10, masters=3, workers=3, rounds=60, pause=0.3, seed=0)
    how = options.workers, options.seed, options.rounds, options.pause
    result = kills(APP, options.kills, options.masters, *how)
    print(json.dumps(result))
    return 0 if result["same"] and result["ledger"] else 1


if __name__ == "__main__":
    sys.exit(main())
