"""Tests of the facts that training steps show, on a small model of Keras."""

from dataclasses import replace

import numpy as np
import pytest

from ddlf.extras.advice.batch import exchange_labels, memorize_batch
from ddlf.extras.advice.facts import AppFacts
from tests.extras.advice.cases import HEAD, Y, data

OWN = AppFacts(custom=frozenset({"loss"}))


def compiled(loss, units=1, activation=None, *, named=False):
    import keras

    keras.utils.set_random_seed(0)
    entry = keras.Input((3,))
    output = keras.layers.Dense(units, activation, name="output")(entry)
    model = keras.Model(entry, {"output": output} if named else output)
    model.compile("adam", {"output": loss} if named else loss)
    return model


def right(y, p):
    return (y - p) ** 2


def stretched(y, p):
    import keras

    return keras.ops.mean((keras.ops.reshape(y, (-1,)) - p) ** 2)


@pytest.mark.parametrize("loss", [right, stretched])
@pytest.mark.parametrize("labels", ["in turns", "two", "numbers"])
def test_a_loss_that_compares_each_sample_with_all_labels_is_found_for_any_order(loss, labels):
    x = np.random.default_rng(1).normal(size=(2 if labels == "two" else 126, 3)).astype("float32")
    y = np.arange(len(x), dtype="float32")[:, None]
    observed = exchange_labels(compiled(loss), (x, y if labels == "numbers" else y % 2), OWN)
    assert observed.get("unlinked", False) == (loss is stretched and bool(observed))
    assert observed or labels == "two"  # exchanging two labels may not change the loss


def test_one_array_of_labels_may_be_in_a_dict():
    x, y = np.random.default_rng(1).normal(size=(32, 3)).astype("float32"), np.eye(4, dtype="float32").repeat(8, axis=0)
    facts = data(replace(Y, name="y_train['output']"), heads=(replace(HEAD, loss="own", target="y_train['output']"),))
    observed = memorize_batch(compiled(right, 4, "softmax", named=True), (x, {"output": y}), facts)
    assert observed["least"] < observed["first"]
    assert observed["agrees"] > 0
