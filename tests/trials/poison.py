"""Measure the test accuracy if one of four slots sends bad updates in rounds 2 to 5, for each policy and merge rule.

    python -m tests.trials.poison [--model cnn] [--rounds 8] [--seeds 3]

The trial trains on scikit-learn's digits like ``train_sync``, but without a network: softmax regression in NumPy, or
the CNN of ``apps/digits_cnn.py``. It leaves out a rejected update. In a real run, another worker computes the slot again,
which gives the undisturbed model. A cell has the mean test accuracy over the seeds, and the number of bad updates that were
rejected or scaled. "Stopped" means that the default policy ended the training with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from apps.digits_cnn import DigitsCNN
from benchmarks.measure import table
from ddlf.algorithms.merge import MERGE, merged
from ddlf.algorithms.partition import equal_sizes, partition, shuffled
from ddlf.algorithms.update_check import judge, scaled
from ddlf.algorithms.weights import Weights
from ddlf.errors import BadUpdate
from tests.trials.options import read_options

SLOTS, BAD_SLOT, BAD_ROUNDS = 4, 2, range(1, 5)
COLUMNS = (("stop", "mean"), ("reject", "mean"), ("clip", "mean"), ("stop", "median"), ("stop", "trimmed:0.25"))


def nan(tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a copy of a tensor with one NaN."""
    changed = tensor.copy()
    changed.flat[0] = np.nan
    return changed


POISONS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]] | None] = {
    "undisturbed": None,
    "NaN": nan,
    "zeros": np.zeros_like,
    "x 1000": lambda tensor: tensor * np.float32(1000),
    "sign flipped": np.negative,
    "x -1000": lambda tensor: tensor * np.float32(-1000),
}


class Softmax:
    """Softmax regression by plain SGD, in NumPy. Weights: kernel (pixels, classes), bias (classes,)."""

    def __init__(self, app: DigitsCNN, seed: int) -> None:
        self._x, self._y = app.x_train.reshape(len(app.x_train), -1), app.y_train
        self._x_test, self._y_test = app.x_test.reshape(len(app.x_test), -1), app.y_test
        self.weights: Weights = [np.zeros((64, 10), np.float32), np.zeros(10, np.float32)]

    def train(self, weights: Weights, part: np.ndarray[Any, Any]) -> Weights:
        """The weights after one epoch in batches of 16."""
        kernel, bias = (tensor.copy() for tensor in weights)
        for batch in (part[start : start + 16] for start in range(0, len(part), 16)):
            error = (self._probabilities([kernel, bias], self._x[batch]) - self._y[batch]) / len(batch)
            kernel -= np.float32(0.1) * self._x[batch].T @ error
            bias -= np.float32(0.1) * error.sum(axis=0)
        return [kernel, bias]

    def accuracy(self, weights: Weights) -> float:
        """Return the accuracy on the test data."""
        return float(np.mean(self._probabilities(weights, self._x_test).argmax(1) == self._y_test.argmax(1)))

    def _probabilities(self, weights: Weights, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        logits = x @ weights[0] + weights[1]
        powers = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))


class CNN:
    """The CNN of the app, in Keras."""

    def __init__(self, app: DigitsCNN, seed: int) -> None:
        import keras

        keras.utils.set_random_seed(seed)
        asyncio.run(app.create_model())
        self._app = app
        self.weights: Weights = app.model.get_weights()

    def train(self, weights: Weights, part: np.ndarray[Any, Any]) -> Weights:
        """The weights after one epoch in batches of 16."""
        model = self._app.model
        model.set_weights(weights)
        model.fit(self._app.x_train[part], self._app.y_train[part], batch_size=16, verbose=0, shuffle=False)
        return list(model.get_weights())

    def accuracy(self, weights: Weights) -> float:
        """Return the accuracy on the test data."""
        self._app.model.set_weights(weights)
        return float(self._app.model.evaluate(self._app.x_test, self._app.y_test, verbose=0)[1])


def run(learner: Softmax | CNN, samples: int, poison: str, policy: str, merge: str, rounds: int, seed: int) -> Any:
    """Train, and return the test accuracy and the slots of rejected or scaled updates.

    Raises:
        BadUpdate: The policy is ``"stop"``, and an update was not accepted.
    """
    weights, noticed = learner.weights, []
    change = POISONS[poison]
    for number in range(rounds):
        updates = {}
        for slot, part in enumerate(partition(shuffled(samples, seed, number), equal_sizes(samples, SLOTS))):
            update = [a - b for a, b in zip(weights, learner.train(weights, part), strict=True)]
            if change and slot == BAD_SLOT and number in BAD_ROUNDS:
                update = [change(tensor) for tensor in update]
            updates[slot] = update, len(part)
        verdicts = judge(updates, weights, policy)
        noticed += [slot for slot, verdict in verdicts.items() if verdict.action != "accept"]
        if noticed and policy == "stop":
            raise verdicts[noticed[0]].error(worker=f"worker {noticed[0] + 1}")
        accepted = [slot for slot, verdict in verdicts.items() if verdict.action != "reject"]
        step = merged(
            MERGE.read(merge),
            [scaled(updates[slot][0], verdicts[slot].factor) for slot in accepted],
            [updates[slot][1] for slot in accepted],
            checked=True,
        )
        weights = [w - g for w, g in zip(weights, step, strict=True)]
    return learner.accuracy(weights), noticed


def main(argv: Sequence[str] | None = None) -> dict[tuple[str, str, str], float | None]:
    """Run all cases and print the table. Return the mean accuracies; None where training stopped."""
    options = read_options(__doc__, argv, model=("softmax", "cnn"), rounds=8, seeds=3)
    app: Any = DigitsCNN()
    asyncio.run(app.load_dataset())
    rows, means = [["slot 2 sends", *(f"{policy}, {merge}" for policy, merge in COLUMNS)]], {}
    learners = {seed: {"softmax": Softmax, "cnn": CNN}[options.model](app, seed) for seed in range(options.seeds)}
    for poison in POISONS:
        row = [poison]
        for policy, merge in COLUMNS:
            accuracies, noticed = [], []
            try:
                for seed, learner in learners.items():
                    accuracy, slots = run(learner, len(app.x_train), poison, policy, merge, options.rounds, seed)
                    accuracies.append(accuracy)
                    noticed += slots
            except BadUpdate:
                row.append("stopped")
                means[poison, policy, merge] = None
                continue
            means[poison, policy, merge] = float(np.mean(accuracies))
            sent = len(BAD_ROUNDS) * options.seeds * bool(POISONS[poison])
            wrong = sum(slot != BAD_SLOT or not sent for slot in noticed)
            note = f" ({len(noticed) - wrong} of {sent} found)" if policy != "stop" and sent else ""
            row.append(f"{np.mean(accuracies):.3f}{note}" + (f", {wrong} honest ones too" if wrong else ""))
        rows.append(row)
    print(table(rows))
    return means


if __name__ == "__main__":
    main()
