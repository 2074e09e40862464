"""Tests with one worker that uses a card alone."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from ddlf.worker.card_check import check_card
from ddlf.worker.cards import find_cards
from ddlf.worker.machine import keras_backend
from tests.gpu.apps import accuracy, device_here, error_of_product, trained

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="session")]


async def test_doctor_computes_matrix_product_on_card(card):
    checked = await check_card(keras_backend(), card.uuid)
    assert checked.problem == ""
    assert checked.teraflops > 0


async def test_executor_computes_on_its_card_only(card, lone_worker):
    (device,) = await lone_worker.run_method(device_here)
    assert device == {"mask": card.uuid, "kind": "gpu", "count": 1}


async def test_worker_on_card_learns(card, lone_worker):
    app = await trained(lone_worker)
    assert await accuracy(app) > 0.9
    used = {process for entry in find_cards().cards if entry.uuid == card.uuid for process in entry.processes}
    assert used, "no process computes on the card"


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
async def test_mixed_precision_learns_with_weights_in_float32(lone_worker, precision):
    app = await trained(lone_worker, precision=precision)
    assert {weight.dtype.name for weight in app.model.get_weights()} == {"float32"}
    assert await accuracy(app) > 0.9


async def test_loss_scale_of_float16_passes_from_round_to_round(lone_worker):
    """The optimizer counts all steps, and the steps since the last overflow. The next round continues both counts."""
    app = await trained(lone_worker, precision="mixed_float16")
    (state,) = app.optimizers
    steps = app.master_epochs * -(-len(app.x_train) // app.batch_size)
    assert [float(array) for array in state if array.size == 1].count(steps) >= 2


async def test_tf32_is_default_as_docs_say(lone_worker):
    """JAX and TensorFlow round the inputs of products to TF32 by default, PyTorch does not."""
    (error,) = await lone_worker.run_method(error_of_product)
    assert (error < 1e-5) == (keras_backend() == "torch")


def values_of_all_kinds() -> list[np.ndarray[Any, Any]]:
    chance = np.random.default_rng(0)
    return [
        chance.standard_normal((300, 200)).astype(np.float32),
        np.float32(2.5).reshape(()),
        np.arange(7, dtype=np.int32),
    ]


async def test_values_move_to_and_from_the_card_unchanged():
    """Test the conversion in this process, whose Keras computes on the card."""
    import keras

    from ddlf.training.slot.transfer import Transfer, transfer

    values = values_of_all_kinds()
    kinds = [(value, value.dtype.name) for value in values]
    variables = [keras.Variable(np.zeros_like(value), dtype=kind, trainable=False) for value, kind in kinds]
    assert type(transfer()) is not Transfer or keras_backend() == "tensorflow"
    transfer().write(variables, values)
    first_read = transfer().read(variables)
    for variable in variables:
        variable.assign(variable + 1)
    gc.collect()
    later_reads = [transfer().read(variables) for _ in range(3)]
    for value, read, (after, *_) in zip(values, first_read, zip(*later_reads, strict=True), strict=True):
        assert read.dtype == value.dtype
        assert np.array_equal(read, value)
        assert np.array_equal(after, value + 1)
