"""Tests of the settings ``deterministic`` and ``tf32``: their effect on a run, its warnings, and resumed checkpoints."""

import sys
from types import SimpleNamespace

import pytest

from ddlf.errors import CheckpointMismatch, ConfigError
from ddlf.events import ModelBuilt, Warned
from ddlf.testing import in_process_cluster
from ddlf.testing.fake_run import FakeRun
from ddlf.training.crew.opening import Opening
from ddlf.training.slot import arithmetic
from ddlf.training.slot.arithmetic import (
    Arithmetic,
    arithmetic_warnings,
    mixed,
    mixed_backends,
    prepare_master,
    set_arithmetic,
)
from ddlf.worker import determinism
from tests.training.models import Quick, app, equal


def determinism_of(worker=None):
    from tensorflow.python.framework import config

    return config.is_op_determinism_enabled()


def process_of(self):
    import os

    flags = os.environ.get("XLA_FLAGS", ""), os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    config = sys.modules.get("tensorflow.python.framework.config")
    return [*flags, config is not None and config.is_op_determinism_enabled(), os.getpid()]


async def test_run_turns_op_determinism_on_and_the_next_one_off(monkeypatch):
    # If another test has used JAX in this process, JAX keeps its flags. A real worker would start a new process.
    monkeypatch.setattr(determinism, "jax_was_used", lambda: False)
    async with in_process_cluster(1) as cluster:
        first = app(cluster, deterministic=True, dropout=0.2)
        received = []
        first.subscribe(received.append)
        await first.train_sync()
        assert determinism_of()
        assert first.run_context.progress.settings["deterministic"] is True
        assert not [
            event for event in received if isinstance(event, Warned) and event.about in ("deterministic", "cards")
        ]
        second = app(cluster, deterministic=True, dropout=0.2)
        await second.train_sync()
        assert equal(first.model.get_weights(), second.model.get_weights())
        await app(cluster, Quick, master_epochs=1).train_sync()
        assert not determinism_of()


@pytest.mark.asyncio(loop_scope="session")
async def test_executor_computes_as_the_run_demands(two_workers):
    one_worker = two_workers.options(workers=[1])  # its executor starts twice with Keras

    async def process():
        (facts,) = await one_worker.run_method(process_of)
        return facts

    assert (await process())[:2] == ["", ""]
    await app(one_worker, Quick, deterministic=True, master_epochs=1).train_sync()
    during = await process()
    assert during[:3] == ["--xla_gpu_deterministic_ops=true", ":4096:8", True]
    await app(one_worker, Quick, deterministic=True, master_epochs=1).train_sync()
    assert await process() == during  # the executor was not restarted
    await app(one_worker, Quick, master_epochs=1).train_sync()
    assert (await process())[:3] == ["", "", False]


async def test_run_is_not_resumed_with_another_arithmetic(tmp_path):
    await FakeRun(checkpoint=tmp_path, deterministic=True).train_sync(2)
    with pytest.raises(CheckpointMismatch, match="deterministic: True in the checkpoint, False now"):
        await FakeRun(resume=tmp_path).train_sync(3)
    with pytest.raises(CheckpointMismatch, match="tf32: 'auto' in the checkpoint, 'off' now"):
        await FakeRun(resume=tmp_path, deterministic=True, tf32="off").train_sync(3)
    resumed = FakeRun(resume=tmp_path, deterministic=True)
    await resumed.train_sync(3)
    assert resumed.history[-1].round == 3


@pytest.mark.parametrize(
    ("settings", "workers", "about"),
    [
        ({}, ["", ""], []),
        ({"deterministic": True}, ["", ""], []),
        ({"tf32": "off"}, ["", ""], ["tf32"]),
        ({"tf32": "off"}, ["H100", "H100"], []),
        ({}, ["H100", "H200"], ["cards"]),
        ({}, ["H100", ""], ["cards"]),
    ],
)
def test_run_warns_of_a_setting_without_full_effect(settings, workers, about):
    computed = {f"worker {number}": Arithmetic(card=card) for number, card in enumerate(workers, 1)}
    assert [subject for subject, _ in arithmetic_warnings(app(None, **settings), computed, Arithmetic())] == about


def test_run_warns_of_determinism_without_effect():
    reason = "JAX computes equal bits on CPUs in any case"
    workers = {"worker 1": Arithmetic(in_any_case=reason)}
    trained = app(None, deterministic=True)
    assert list(arithmetic_warnings(trained, workers, Arithmetic(in_any_case=reason))) == [
        ("deterministic", f"deterministic=True changes nothing in this run: {reason}")
    ]
    assert not list(arithmetic_warnings(trained, workers, Arithmetic("H100")))


def test_card_that_the_framework_does_not_see_is_said(monkeypatch):
    monkeypatch.setenv("DDLF_CARDS", '["0 (Test Card)"]')
    workers = {"worker 1": set_arithmetic(app(None)), "worker 2": Arithmetic()}
    ((about, message),) = arithmetic_warnings(app(None), workers, Arithmetic())
    assert about == "cards"
    assert message.startswith(
        "worker 1 has the card 0 (Test Card), but its framework does not see it and computes on the CPU"
    )


@pytest.mark.parametrize(
    ("precision", "state", "warnings"),
    [("mixed_float16", "fresh", 1), ("mixed_float16", "kept", 0), ("auto", "fresh", 0)],
)
def test_scale_of_the_loss_that_restarts_is_named(precision, state, warnings):
    trained = app(None, precision=precision, optimizer_state=state)
    notes = list(arithmetic_warnings(trained, {"worker 1": Arithmetic()}, Arithmetic()))
    assert [about for about, text in notes if "first scale of the loss" in text] == ["precision"] * warnings


def test_mixed_cards_are_named_with_their_workers():
    kinds = {"worker 1": Arithmetic("H100"), "worker 2": Arithmetic(), "worker 3": Arithmetic("H100")}
    assert mixed(kinds) == (
        "a slot has other bits on another kind of card, and this run computes on H100 (worker 1, worker 3) and a CPU (worker "
        "2): equal bits in each run need workers of one kind"
    )


async def test_run_warns_once_of_a_late_worker_with_another_card():
    opening, received = Opening(app(None), "a run"), []
    opening.app.subscribe(received.append)
    opening._kinds = {"H100"}
    late = SimpleNamespace(name="worker 3 (pc03)")
    for card in ("H100", "A100", "A100"):
        opening._warn_of_kind(late, Arithmetic(card))
    (warned,) = received
    assert "computes on A100 (worker 3 (pc03)) and H100 (the others)" in warned.why


def test_jax_that_has_used_the_card_of_the_master_is_refused(monkeypatch):
    monkeypatch.setattr(arithmetic, "lacks_flags", lambda: True)
    with pytest.raises(ConfigError, match="comes too late for JAX in this process: it has used the card before"):
        prepare_master(app(None, deterministic=True))
    prepare_master(app(None))


async def test_run_reports_products_in_tf32(monkeypatch):
    from ddlf.monitor.terminal.lines import line
    from ddlf.worker.frameworks import TensorFlow

    monkeypatch.setattr(TensorFlow, "tf32", lambda self: "products and convolutions")
    async with in_process_cluster(1) as cluster:
        trained, received = app(cluster, Quick, master_epochs=1), []
        trained.subscribe(received.append)
        await trained.train_sync()
    (built,) = [event for event in received if isinstance(event, ModelBuilt)]
    assert "precision products and convolutions of float32 use TF32 on cards" in line(built)


def test_workers_with_different_backends_are_named_or_refused_if_bits_must_be_equal():
    run = SimpleNamespace(deterministic=False)
    assert mixed_backends(run, {1: "jax", 2: "jax"}) == ""
    assert mixed_backends(run, {3: "tensorflow", 1: "jax", 2: "tensorflow"}).endswith(
        "this run computes on worker 1 with jax and worker 2, worker 3 with tensorflow"
    )
    run.deterministic = True
    assert mixed_backends(run, {1: "jax", 2: "jax"}) == ""
    with pytest.raises(
        ConfigError, match="deterministic=True needs one backend of Keras, but this run computes on worker 1"
    ):
        mixed_backends(run, {1: "jax", 3: "tensorflow"})
