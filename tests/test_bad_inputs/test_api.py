"""Tests of wrong calls of the Python interface: each error names its cause, and the cluster remains usable."""

import asyncio
import math
import sys

import numpy as np
import pytest

import ddlf
from ddlf.errors import (
    AppError,
    ConfigError,
    DDLFError,
    NotPicklable,
)
from ddlf.rpc import code
from tests.patience import PATIENCE_S
from tests.processes import python
from tests.training.models import Blobs, Quick, app, small_model

pytestmark = pytest.mark.asyncio(loop_scope="session")


def echo(value):
    return value


def is_usable(cluster):
    """Return whether the cluster answers a call."""
    return asyncio.wait_for(cluster.run_method(echo, value=1), PATIENCE_S)


FORK = """
import asyncio, os, sys
from ddlf import Cluster
async def main():
    async with Cluster.local(1) as cluster:
        child = os.fork()
        if not child:
            try:
                asyncio.run(asyncio.wait_for(cluster.run_method(len, obj=[]), 120))
            except Exception as error:
                print(error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(await cluster.run_code("1 + 1"))
def start():
    asyncio.run(main())
start()
"""


async def test_forked_child_must_connect_itself_and_parent_continues():
    refusal, answer = (await asyncio.to_thread(python, FORK)).splitlines()
    assert "its connection belongs to another process; create a separate Cluster in each process" in refusal
    assert answer == "[2]"


@pytest.mark.parametrize(
    "name",
    ["__class__", "_private", "a.b", "", "x" * 10_000, 5, None, b"train", lambda: 1],
    ids=["dunder", "private", "dotted", "empty", "long", "int", "None", "bytes", "lambda"],
)
async def test_invalid_method_name_is_refused_before_sending(cluster, name):
    before = cluster.workers[0].bytes_sent
    with pytest.raises(ConfigError) as refused:
        await cluster.run(name)
    assert "is not a valid name of a method; a name has letters, digits and underscores" in str(refused.value)
    assert len(str(refused.value)) < 300
    assert cluster.workers[0].bytes_sent == before


async def test_huge_array_in_closure_is_refused_with_the_remedy(cluster, monkeypatch):
    monkeypatch.setattr(code, "MAX_CODE_BYTES", 1_000_000)
    weights = np.zeros(10**6)
    with pytest.raises(NotPicklable, match=r"function '.*<lambda>' carries 8\.0 MB .*; pass .* or use set_variable"):
        await cluster.run_method(lambda: weights.sum())
    assert await cluster.run_method(lambda value: value.sum(), value=weights) == [0, 0]


@pytest.mark.parametrize("seconds", [0, -1, "5", math.nan, math.inf, None, True])
async def test_invalid_connect_timeout_is_refused(seconds):
    with pytest.raises(ConfigError, match="connect_timeout_s must be a number of seconds above 0, got"):
        ddlf.Cluster(["127.0.0.1"], connect_timeout_s=seconds)


@pytest.mark.parametrize("value", [0, -1, 2.5, "32", True])
@pytest.mark.parametrize("name", ["batch_size", "master_epochs", "worker_epochs"])
async def test_invalid_number_is_refused_before_a_worker_is_needed(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of 1 or more, got {value!r}"):
        await Blobs().train_sync(**{name: value})


async def test_batch_larger_than_the_data_is_one_batch(two_workers):
    one_worker = two_workers.options(workers=[1])
    (record,) = await app(one_worker, samples=20, batch_size=1000).train_sync(master_epochs=1)
    assert record.samples == 20


def not_built():
    import keras

    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Reshape((5,))])
    model.compile("sgd", "mse")
    return model


def not_compiled():
    import keras

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])


def with_loss(loss):
    model = not_compiled()
    model.compile("sgd", loss)
    return model


def of_other_outputs():
    import keras

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, activation="softmax")])
    model.compile("sgd", "categorical_crossentropy")
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        pytest.param(not_built, "is not built, and cannot be called on 2 rows of x_train"),
        pytest.param(
            not_compiled, "is not compiled; end create_model with self.model.compile(optimizer, loss)", id="compile"
        ),
        pytest.param(lambda: 5, "create_model set self.model to a int, which is not a Keras model", id="no model"),
        pytest.param(lambda: with_loss("crossentropie"), "crossentropie", id="loss"),
        pytest.param(of_other_outputs, "target.shape=(", id="shape"),
    ],
)
async def test_model_that_cannot_train_is_named_before_the_first_round(two_workers, make, sentence):
    class Wrong(Blobs):
        async def create_model(self):
            self.model = make()

    wrong_app = Wrong(two_workers)
    with pytest.raises(Exception) as refused:  # noqa: PT011  an error of Keras on the master, or a RemoteError
        await wrong_app.train_sync(master_epochs=1)
    assert sentence in str(refused.value)
    assert wrong_app.history == []
    assert await is_usable(two_workers) == [1, 1]


@pytest.mark.parametrize("method", ["load_dataset", "create_model"])
@pytest.mark.parametrize("where", ["master", "worker"])
async def test_exit_in_a_method_is_an_error_with_a_sentence(two_workers, method, where):
    class Exits(Blobs):
        samples = 130 + len(f"{where} {method}") + (where == "worker")  # no worker has loaded these

        def exit_from(self, name):
            if name == method and (where == "worker") == hasattr(self, "worker"):
                sys.exit(3)

        async def load_dataset(self):
            self.exit_from("load_dataset")
            await super().load_dataset()

        async def create_model(self):
            self.exit_from("create_model")
            await super().create_model()

    with pytest.raises(DDLFError, match=rf"{method} called sys.exit\(3\)"):
        await Exits(two_workers).train_sync(master_epochs=1)
    assert await is_usable(two_workers) == [1, 1]


async def test_named_arrays_for_sequential_model_are_refused(two_workers):
    class Named(Blobs):
        async def load_dataset(self):
            await super().load_dataset()
            self.x_train = {"points": self.x_train}

    with pytest.raises(AppError, match=r"x_train is a dict of 'points', and .* is a Sequential model, which takes one"):
        await Named(two_workers).train_sync(master_epochs=1)


async def test_module_missing_on_a_worker_is_named(
    two_workers,
):
    class Missing(Blobs):
        async def create_model(self):
            if hasattr(self, "worker"):
                import no_such_package_of_mine  # noqa: F401
            self.model = small_model()

    with pytest.raises(DDLFError) as refused:
        await Missing(two_workers).train_sync(master_epochs=1)
    assert "No module named 'no_such_package_of_mine'" in str(refused.value)


async def test_callback_that_raises_ends_training_with_its_line(two_workers):
    class Raising(Blobs):
        async def create_model(self):
            import keras

            class Callback(keras.callbacks.Callback):
                def on_train_batch_end(self, batch, logs=None):
                    raise ArithmeticError("my callback")

            await super().create_model()
            self.worker_callbacks = [Callback()]

    one_worker = two_workers.options(workers=[1])
    with pytest.raises(DDLFError, match="ArithmeticError: my callback") as refused:
        await Raising(one_worker).train_sync(master_epochs=1)
    assert 'raise ArithmeticError("my callback")' in str(refused.value)
    assert len(await Quick(one_worker).train_sync(master_epochs=1)) == 1
