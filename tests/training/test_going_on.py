"""Tests of continued runs: from an earlier training of the app, from a folder of checkpoints, or from one checkpoint."""

import asyncio
import dataclasses
import hashlib
import itertools
import json
import os
import threading
from unittest import mock

import numpy as np
import pytest

from ddlf.algorithms.outer import Nesterov
from ddlf.errors import CheckpointError, CheckpointMismatch, ConfigError
from ddlf.testing import FakeRun
from ddlf.training.checkpoints import checkpoint as checkpoints
from ddlf.training.checkpoints import tensors
from ddlf.training.checkpoints.checkpoint import Checkpoint, CheckpointFolder
from ddlf.training.checkpoints.durable import seal, unseal
from ddlf.training.checkpoints.journal import JOURNAL
from ddlf.training.checkpoints.keeper import Keeper
from ddlf.training.exchanges.states import SlotStates
from ddlf.training.progress import Progress, SampleLedger
from ddlf.training.slot.build import describe
from tests.patience import PATIENCE_S
from tests.training.models import equal

ALL = {"codec": "topk:0.05", "weights_codec": "delta:int8", "outer": Nesterov(learning_rate=0.7, momentum=0.9)}
"""Settings with all kinds of state that one round passes to the next."""


@pytest.fixture(autouse=True)
def no_disk():
    with mock.patch("os.fsync"):
        yield


def lines_of(app):
    lines = []
    app.say = lines.append
    return lines


def weights(app):
    return app.model.get_weights()


def content(folder):
    """Return every name and byte below a folder."""
    return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


# Training the same app again


@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])
async def test_an_app_trained_again_continues_like_one_run(options):
    in_one_run = FakeRun(**options)
    await in_one_run.train_sync(7)
    in_parts = FakeRun(**options)
    returned = [await in_parts.train_sync(3), await in_parts.train_sync(2), await in_parts.train_sync(2)]
    assert equal(weights(in_parts), weights(in_one_run))
    for state, expected_state in zip(in_parts.optimizers, in_one_run.optimizers, strict=True):
        assert equal(state, expected_state)
    assert [[record.round for record in records] for records in returned] == [[1, 2, 3], [4, 5], [6, 7]]
    assert [record.version for record in in_parts.history] == list(range(1, 8))
    assert [record.rounds for record in in_parts.history] == [3, 3, 3, 5, 5, 7, 7]
    assert in_parts.ledger.is_exact(7)


async def test_asynchronous_training_continues_with_every_slots_next_round():
    app = FakeRun(mode="async")
    first = await app.train_model()
    second = await app.train_async(2)
    assert len(first) == 8
    assert sorted((record.slot, record.round) for record in second) == [(slot, n) for slot in (1, 2) for n in (5, 6)]
    assert [record.version for record in app.history] == list(range(1, 13))
    assert all(0 <= record.staleness < 4 for record in second)
    assert app.ledger.is_exact(6)


async def test_mode_and_length_of_rounds_may_change_between_trainings():
    app = FakeRun()
    await app.train_sync(3)
    await app.train_async(2)
    await app.train_sync(5, worker_epochs=2)
    assert [record.version for record in app.history] == list(range(1, 3 + 4 + 3 + 1))
    assert [record.round for record in app.history][-3:] == [6, 7, 8]
    assert [record.epochs for record in app.history][-3:] == [2, 2, 1]
    assert app.ledger.is_exact(10)


async def test_fresh_restarts_from_the_models_weights():
    app = FakeRun()
    await app.train_sync(2)
    start = weights(app)
    records = await app.train_sync(2, fresh=True)
    new_run = FakeRun()
    new_run.model.set_weights(start)
    await new_run.train_sync(2)
    assert equal(weights(app), weights(new_run))
    assert [record.round for record in records] == [record.round for record in app.history] == [1, 2]
    assert app.ledger.is_exact(2)


async def test_second_training_starts_from_the_models_current_weights():
    app = FakeRun()
    await app.train_sync(1)
    app.model.set_weights([array + 1 for array in weights(app)])
    received_weights = []
    for worker in app.cluster.workers:
        worker.fit = lambda task, weights_in, *m, worker=worker: (
            received_weights.append(weights_in),
            type(worker).fit(worker, task, weights_in, *m),
        )[1]
    start = weights(app)
    await app.train_sync(1)
    assert equal(received_weights[0], start)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("slots", 3, "slots: 2 before, 3 now"),
        ("learning_rate", 0.01, "optimizer learning_rate: 0.1 before, 0.01 now"),
        ("samples", 100, "samples: 203 before, 100 now"),
        ("precision", "mixed_bfloat16", "precision: 'auto' before, 'mixed_bfloat16' now"),
    ],
)
async def test_changes_that_two_trainings_cannot_have_are_refused_by_name(name, value, sentence):
    app = FakeRun()
    await app.train_sync(1)
    start = weights(app)
    setattr(app, name, value)
    with pytest.raises(CheckpointMismatch, match=f"with fresh=True.:\n  {sentence}"):
        await app.train_sync(1)
    assert equal(weights(app), start)
    assert len(await app.train_sync(1, fresh=True)) == 1


async def test_an_optimizer_that_only_the_master_has_is_refused():
    app = FakeRun()
    await app.train_sync(1)
    app.model.optimizer.get_config = lambda: {"name": "sgd", "learning_rate": 0.5}
    with pytest.raises(ConfigError, match=r"workers train with the one of create_model; change it in create_model"):
        await app.train_sync(1)


async def test_another_outer_optimizer_begins_with_its_own_state():
    app = FakeRun()
    await app.train_sync(2)
    app.outer = Nesterov()
    await app.train_sync(1)
    assert len(app.run_context.progress.state["outer"]) == 2


async def test_training_continues_with_the_interrupted_round():
    app = FakeRun()
    usual = app.on_round

    def interrupt(record):
        if record.round == 2:
            raise KeyError("stop")

    app.on_round = interrupt
    with pytest.raises(KeyError):
        await app.train_sync(4)
    assert len(app.history) == 2
    app.on_round = usual
    assert [record.round for record in await app.train_sync(2)] == [3, 4]
    assert app.ledger.is_exact(4)


async def test_after_convergence_training_continues_if_more_epochs_are_requested():
    app = FakeRun(mode="async")
    app.is_convergent = lambda record: record.version == 3
    await app.train_async(4)
    assert 3 <= len(app.history) < 8
    app.is_convergent = lambda record: False
    await app.train_async(2)
    rounds = max(record.round for record in app.history)
    assert app.ledger.is_exact(rounds), "the slot that was behind has caught up"


async def test_a_second_training_writes_to_the_same_folder(tmp_path):
    app = FakeRun(checkpoint=tmp_path, **ALL)
    await app.train_sync(2)
    await app.train_sync(1)
    app.checkpoint = None
    await app.train_sync(1)
    app.checkpoint = tmp_path
    await app.train_sync(1)
    newest = CheckpointFolder(tmp_path).newest()
    assert (newest.round, [record.round for record in newest.records]) == (5, [1, 2, 3, 4, 5])
    resumed = FakeRun(resume=tmp_path, master_epochs=7, **ALL)
    await resumed.train_model()
    uninterrupted = FakeRun(**ALL)
    await uninterrupted.train_sync(7)
    assert equal(weights(resumed), weights(uninterrupted))


async def test_a_fresh_training_does_not_overwrite_the_earlier_one(tmp_path):
    app = FakeRun(checkpoint=tmp_path)
    await app.train_sync(2)
    before = content(tmp_path)
    with pytest.raises(ConfigError, match="has checkpoints already, the newest of round 2"):
        await app.train_sync(2, fresh=True)
    new_run = FakeRun(checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="has checkpoints already, the newest of round 2"):
        await new_run.train_sync(2)
    app.resume = tmp_path
    with pytest.raises(ConfigError, match="fresh=True starts again"):
        await app.train_sync(2, fresh=True)
    assert content(tmp_path) == before


async def test_folder_that_another_app_wrote_to_is_refused(tmp_path):
    app = FakeRun(checkpoint=tmp_path)
    await app.train_sync(2)
    await FakeRun(resume=tmp_path, master_epochs=3).train_model()
    with pytest.raises(ConfigError, match="has checkpoints already, the newest of round 3"):
        await app.train_sync(1)


# One checkpoint, and another folder


async def test_a_run_continues_from_a_chosen_checkpoint_in_another_folder(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    uninterrupted = FakeRun(checkpoint=old, checkpoint_keep=9, **ALL)
    await uninterrupted.train_sync(6)
    before = content(old)
    for source, begins in ((old / "round-000002", 3), (old, 7)):
        app = FakeRun(checkpoint=new / str(begins), resume=source, master_epochs=8, **ALL)
        await app.train_model()
        assert [record.round for record in app.history] == list(range(1, 9))
        assert content(old) == before
        assert CheckpointFolder(new / str(begins)).newest().round == 8
    await uninterrupted.train_sync(2)
    assert equal(weights(app), weights(uninterrupted))


async def test_newest_checkpoint_is_resumed_in_its_folder(tmp_path):
    await FakeRun(checkpoint=tmp_path).train_sync(3)
    app = FakeRun(resume=tmp_path / "round-000003", master_epochs=5)
    assert [record.round for record in await app.train_model()] == [4, 5]
    assert CheckpointFolder(tmp_path).newest().round == 5


async def test_older_checkpoint_is_resumed_only_in_another_folder(tmp_path):
    await FakeRun(checkpoint=tmp_path).train_sync(3)
    before = content(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"the newest of round 3, but .*round-000002 is another checkpoint; set checkpoint to another folder",
    ):
        await FakeRun(resume=tmp_path / "round-000002", master_epochs=5).train_model()
    with pytest.raises(ConfigError, match=r"checkpoint='.*round-000002' is itself a checkpoint.*; name"):
        await FakeRun(checkpoint=tmp_path / "round-000002").train_model()
    with pytest.raises(ConfigError, match="is a checkpoint, not a folder of checkpoints"):
        CheckpointFolder(tmp_path / "round-000003").open("a test")
    assert content(tmp_path) == before


async def test_a_checkpoint_that_was_copied_alone_needs_a_folder_to_write_to(tmp_path):
    await FakeRun(checkpoint=tmp_path / "run").train_sync(3)
    os.rename(tmp_path / "run" / "round-000003", tmp_path / "best")
    with pytest.raises(ConfigError, match="is in no checkpoint folder, so the folder"):
        await FakeRun(resume=tmp_path / "best", master_epochs=5).train_model()
    app = FakeRun(resume=tmp_path / "best", checkpoint=tmp_path / "new", master_epochs=5)
    lines = lines_of(app)
    records = await app.train_model()
    assert [record.round for record in records] == [record.round for record in app.history] == [4, 5]
    assert any("records.jsonl is missing; best is used without its records" in line for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "new", "run"]


async def test_two_paths_of_one_folder_count_as_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    await FakeRun(checkpoint="run").train_sync(1)
    as_of_0_1(tmp_path / "run")
    for number, (target, source) in enumerate([("run", tmp_path / "run"), (tmp_path / "run", "./run/../run")], 2):
        app = FakeRun(checkpoint=target, resume=source, master_epochs=number)
        assert [record.round for record in await app.train_model()] == [number]
    app = FakeRun(checkpoint="run", resume="run/round-000003", master_epochs=4)
    assert len(await app.train_model()) == 1


async def test_a_misspelt_folder_is_neither_created_nor_claimed(tmp_path):
    await FakeRun(checkpoint=tmp_path / "run").train_sync(1)
    before = content(tmp_path)
    for name, sentence in (("rum", "there is no folder"), ("run/round-000009", "there is no folder")):
        with pytest.raises(CheckpointError, match=sentence):
            await FakeRun(resume=tmp_path / name).train_model()
    assert content(tmp_path) == before


async def test_a_run_that_is_cancelled_while_it_opens_its_folder_releases_it(tmp_path, monkeypatch):
    opened, go_on = threading.Event(), threading.Event()
    usual = CheckpointFolder.open

    def slowly(self, *arguments, **options):
        opened.set()
        go_on.wait()
        usual(self, *arguments, **options)

    monkeypatch.setattr(CheckpointFolder, "open", slowly)
    running = asyncio.ensure_future(FakeRun(checkpoint=tmp_path).train_model())
    assert await asyncio.to_thread(opened.wait, PATIENCE_S)
    running.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    monkeypatch.undo()
    await FakeRun(checkpoint=tmp_path).train_sync(1)


# Which run a checkpoint belongs to


async def test_a_longer_run_after_a_shorter_last_round_loses_no_epoch(tmp_path):
    for mode in ("sync", "async"):
        folder = tmp_path / mode
        await FakeRun(mode=mode, checkpoint=folder, master_epochs=5, worker_epochs=2).train_model()
        app = FakeRun(mode=mode, resume=folder, master_epochs=10, worker_epochs=2)
        await app.train_model()
        of_one = [record.epochs for record in app.history if record.slot in (None, 1)]
        assert of_one == [2, 2, 1, 2, 2, 1]
        assert app.ledger.is_exact(10)


@pytest.mark.parametrize("version", range(1, 6))
async def test_slots_interrupted_at_different_rounds_end_together(tmp_path, version):
    class Interrupted(Exception):
        pass

    app = FakeRun(mode="async", checkpoint=tmp_path, master_epochs=5, worker_epochs=2)

    def on_round(record):
        if record.version == version:
            raise Interrupted

    app.on_round = on_round
    usual = app.cluster.workers[1].rpc

    async def late(request, timeout_s=None):
        for _ in range(40):
            await asyncio.sleep(0)
        return await usual(request, timeout_s)

    app.cluster.workers[1].rpc = late
    with pytest.raises(Interrupted):
        await app.train_model()
    longer = FakeRun(mode="async", resume=tmp_path, master_epochs=9, worker_epochs=2)
    await longer.train_model()
    assert longer.ledger.is_exact(9)


async def test_a_converged_run_trains_only_if_more_epochs_are_requested(tmp_path):
    app = FakeRun(checkpoint=tmp_path, checkpoint_every=2)
    app.is_convergent = lambda record: record.round == 3
    await app.train_sync(6)
    start = weights(app)
    for _ in range(2):
        resumed = FakeRun(checkpoint=tmp_path, resume="auto", master_epochs=6)
        lines = lines_of(resumed)
        assert await resumed.train_model() == []
        assert "nothing   to train: it converged after round 3; to continue, set more than 6 epochs" in lines
        assert equal(weights(resumed), start)
        assert [record.round for record in resumed.history] == [1, 2, 3]
    more = FakeRun(checkpoint=tmp_path, resume="auto", master_epochs=8)
    assert [record.round for record in await more.train_model()] == [4, 5, 6, 7, 8]
    extended = FakeRun(checkpoint=tmp_path, resume="auto", master_epochs=8)
    lines = lines_of(extended)
    assert await extended.train_model() == []
    assert "nothing   to train: all 8 epochs are done; to continue, set more epochs" in lines


async def test_a_run_that_was_ended_by_its_user_has_not_converged(tmp_path):
    app = FakeRun(checkpoint=tmp_path)
    app.on_round = lambda record: record.round == 2 and app.stop_training()
    await app.train_sync(4)
    assert len(app.history) == 2
    assert len(await FakeRun(checkpoint=tmp_path, resume="auto").train_model()) == 2


async def test_other_learning_rate_is_refused_if_the_checkpoint_has_one(tmp_path):
    await FakeRun(checkpoint=tmp_path).train_sync(1)
    with pytest.raises(CheckpointMismatch, match=r"optimizer learning_rate: 0.1 in the checkpoint, 1e-06 now"):
        await FakeRun(resume=tmp_path, learning_rate=1e-6).train_model()
    as_of_0_1(tmp_path)
    assert len(await FakeRun(resume=tmp_path, learning_rate=1e-6).train_model()) == 3


class PlainOuter:
    """An outer optimizer without a repr."""

    def __init__(self, rate):
        self.rate = rate
        self.schedule = {"from": np.arange(3)}

    def init(self, weights):
        return []

    def update(self, state, weights, merged, trainable):
        return state, [w - np.float32(self.rate) * g for w, g in zip(weights, merged, strict=True)]


class Called(PlainOuter):
    def __repr__(self):
        return f"<Called at {hex(id(self))}>"


async def test_custom_outer_optimizer_is_resumed_and_another_refused(tmp_path):
    for kind in (PlainOuter, Called):
        folder = tmp_path / kind.__name__
        await FakeRun(checkpoint=folder, outer=kind(0.5)).train_sync(2)
        await FakeRun(resume=folder, outer=kind(0.5)).train_model()
        with pytest.raises(CheckpointMismatch, match=r"outer: .\w+\(rate=0.5, .* in the checkpoint, .\w+\(rate=0.7"):
            await FakeRun(resume=folder, outer=kind(0.7)).train_model()


def test_a_description_has_no_address_and_differs_between_values():
    class Slots:
        __slots__ = ("inner", "x")

    inner = Slots()
    inner.x, inner.inner = 1, np.float32(2)
    value = {"f": np.mean, "o": inner, "s": {"b", "a"}, "l": [1.5, None, lambda: 0]}
    assert describe(value) == describe(value)
    assert "0x" not in describe(value)
    assert describe(np.zeros(3)) != describe(np.ones(3))
    assert describe(Nesterov()) == repr(Nesterov())


def as_of_0_1(folder):
    """Rewrite the newest checkpoint in the form of DDLF 0.1.0."""
    reader = CheckpointFolder(folder)
    newest = reader.newest()
    file = folder / f"round-{newest.round:06d}" / "manifest.json"
    manifest = unseal(file.read_bytes(), file)
    facts = manifest["facts"]
    for name in ("training", "round", "epochs", "asked", "converged"):
        del facts[name]
    facts["settings"] = {name: value for name, value in facts["settings"].items() if not name.startswith("optimizer ")}
    facts["records"] = [
        {**dataclasses.asdict(record), "workers": list(record.workers), "verdicts": [], "lost": 3}
        for record in newest.records
    ]
    for record in facts["records"]:
        del record["recomputed"]
    facts["begun"] = ["optimizer" in groups for groups in facts.pop("states")]
    del manifest["records"]
    for new_name, old_name in GROUPS_OF_0_1.items():
        entry = next((entry for entry in manifest["files"] if entry["name"] == f"{new_name}.safetensors"), None)
        if entry is None:  # in 0.1.0, every group had a file
            path = file.with_name(f"{old_name}.safetensors")
            tensors.write({}, path)
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            manifest["files"].append({"name": path.name, "bytes": path.stat().st_size, "sha256": digest, "arrays": []})
        else:
            entry["name"] = f"{old_name}.safetensors"
            file.with_name(f"{new_name}.safetensors").rename(file.with_name(entry["name"]))
    file.write_bytes(seal({**manifest, "format": 1}))
    (folder / JOURNAL).unlink(missing_ok=True)


GROUPS_OF_0_1 = {"state_outer": "outer", "slots_optimizer": "optimizer", "slots_held": "held", "slots_residual": "lost"}


@pytest.mark.parametrize("codecs", [{"codec": "int8"}, ALL], ids=["int8", "all"])
async def test_states_of_slots_are_read_from_a_checkpoint_of_0_1(tmp_path, codecs):
    uninterrupted = FakeRun(master_epochs=5, **codecs)
    await uninterrupted.train_model()
    await FakeRun(checkpoint=tmp_path, **codecs).train_sync(3)
    as_of_0_1(tmp_path)
    app = FakeRun(resume=tmp_path, master_epochs=5, **codecs)
    await app.train_model()
    assert equal(weights(app), weights(uninterrupted))
    assert all(
        equal(state, expected_state)
        for state, expected_state in zip(app.optimizers, uninterrupted.optimizers, strict=True)
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_a_run_continues_from_a_checkpoint_of_0_1(tmp_path, mode):
    uninterrupted = FakeRun(mode=mode, master_epochs=9, worker_epochs=2)
    await uninterrupted.train_model()
    await FakeRun(mode=mode, checkpoint=tmp_path, master_epochs=4, worker_epochs=2).train_model()
    as_of_0_1(tmp_path)
    app = FakeRun(mode=mode, resume=tmp_path, master_epochs=9, worker_epochs=2)
    await app.train_model()
    assert len(app.history) == len(uninterrupted.history)
    assert app.ledger.is_exact(9)
    assert mode == "async" or equal(weights(app), weights(uninterrupted))
    records = CheckpointFolder(tmp_path).newest().records
    assert len(records) == len(uninterrupted.history)
    assert [record.recomputed for record in records[:2]] == [3, 3]


@pytest.mark.parametrize(
    ("options", "stored", "other_options"),
    [
        ({}, {"outer": "None"}, {"outer": Nesterov()}),
        ({"outer": "subtract"}, {"outer": "Subtract(learning_rate=1.0)"}, {"outer": "subtract:0.5"}),
        (
            {**ALL, "codec": "int8", "merge": "trimmed:0.2"},
            {**ALL, "codec": "int8", "merge": "trimmed:0.2", "outer": "Nesterov(learning_rate=0.7, momentum=0.9)"},
            {**ALL, "codec": "int8", "merge": "trimmed:0.3"},
        ),
    ],
    ids=["none", "subtract", "all"],
)
async def test_rules_in_the_form_of_0_1_are_recognized(tmp_path, options, stored, other_options):
    await FakeRun(checkpoint=tmp_path, **options).train_sync(2)
    file = tmp_path / "round-000002" / "manifest.json"
    manifest = unseal(file.read_bytes(), file)
    assert manifest["facts"]["settings"] | stored != manifest["facts"]["settings"], "these are written as they are now"
    manifest["facts"]["settings"].update(stored)
    file.write_bytes(seal(manifest))
    with pytest.raises(CheckpointMismatch, match=f"{'merge' if 'merge' in other_options else 'outer'}: "):
        await FakeRun(resume=tmp_path, **other_options).train_sync(3)
    app = FakeRun(resume=tmp_path, **options)
    await app.train_sync(3)
    assert len(app.history) == 3


async def test_settings_0_1_stored_without_effect_are_not_compared(tmp_path):
    await FakeRun(mode="async", checkpoint=tmp_path, slots=1).train_async(2)
    file = tmp_path / "round-000002" / "manifest.json"
    manifest = unseal(file.read_bytes(), file)
    manifest["facts"]["settings"].update(merge="median", balance="speed")
    file.write_bytes(seal(manifest))
    app = FakeRun(mode="async", resume=tmp_path, slots=1)
    await app.train_async(3)
    assert len(app.history) == 3


async def test_other_weights_of_classes_are_another_run(tmp_path):
    await FakeRun(checkpoint=tmp_path, class_weight={0: 1.0, 1: 5.0}).train_sync(1)
    with pytest.raises(CheckpointMismatch, match=r"class_weight: '\{0: 1.0, 1: 5.0\}' in the checkpoint, None now"):
        await FakeRun(resume=tmp_path).train_sync(2)
    await FakeRun(resume=tmp_path, class_weight={0: 1.0, 1: 5.0}).train_sync(2)


async def test_a_shorter_last_round_of_0_1_is_known_by_its_ledger(tmp_path):
    await FakeRun(checkpoint=tmp_path, master_epochs=5, worker_epochs=2).train_model()
    as_of_0_1(tmp_path)
    app = FakeRun(resume=tmp_path, master_epochs=10, worker_epochs=2)
    await app.train_model()
    assert app.ledger.is_exact(10)


# Snapshots and their cost


async def test_each_asynchronous_checkpoint_is_consistent_and_resumes(tmp_path):
    """Each update adds 1 to every weight, so weights show the number of updates."""

    def counting(**settings):
        app = FakeRun(mode="async", slots=2, **settings)
        for worker in app.cluster.workers:
            worker.fit = lambda task, weights, momentum: ([np.full_like(w, -2) for w in weights], [])
        return app

    await counting(master_epochs=30, checkpoint=tmp_path, checkpoint_keep=99).train_model()
    folder = CheckpointFolder(tmp_path)
    for number in range(1, 61):
        checkpoint = folder.load(f"round-{number:06d}")
        counts, rounds = checkpoint.arrays["ledger"]["counts"], checkpoint.facts["slot_rounds"]
        assert (sum(rounds), len(checkpoint.records)) == (number, number)
        assert all((array == number).all() for array in checkpoint.arrays["weights"].values())
        assert min(rounds) <= counts.min() <= counts.max() <= max(rounds)
        assert len(counts) // 2 * number <= counts.sum() <= (len(counts) + 1) // 2 * number
        if number % 10 == 0:
            epochs = max(rounds) + 1
            resumed = counting(
                master_epochs=epochs, checkpoint=tmp_path / f"from {number}", resume=tmp_path / f"round-{number:06d}"
            )
            await resumed.train_model()
            assert resumed.ledger.is_exact(epochs)
            assert resumed.model.get_weights()[0].flat[0] == len(resumed.history) == 2 * epochs


async def test_checkpoint_is_consistent_also_on_a_slow_disk(tmp_path):
    continued = threading.Event()
    usual_seal, usual_accept = checkpoints.seal, SlotStates.accept

    def slowly(content):
        continued.wait(PATIENCE_S)
        return usual_seal(content)

    def on_accept(self, *arguments):
        usual_accept(self, *arguments)
        if app.run_context.progress.version:
            continued.set()  # training continues while the earlier state is written

    app = FakeRun(mode="async", checkpoint=tmp_path, checkpoint_keep=99)
    with mock.patch.object(checkpoints, "seal", slowly), mock.patch.object(SlotStates, "accept", on_accept):
        await app.train_model()
    folder = CheckpointFolder(tmp_path)
    for number in range(1, 9):
        assert sum(folder.load(f"round-{number:06d}").facts["slot_rounds"]) == number


async def test_cost_of_a_checkpoint_does_not_grow_with_rounds(tmp_path):
    app = FakeRun(checkpoint=tmp_path)
    lines, sizes = [], []
    usual = CheckpointFolder.save

    def save(self, checkpoint):
        lines.append(len(checkpoint.records))
        written = usual(self, checkpoint)
        sizes.append((written / "manifest.json").stat().st_size)
        return written

    with mock.patch.object(CheckpointFolder, "save", save):
        await app.train_sync(60)
    assert sizes[-1] < sizes[9] + 50
    assert set(lines) == {1}
    journal = (tmp_path / JOURNAL).read_text().splitlines()
    assert [json.loads(line)["round"] for line in journal] == list(range(1, 61))


async def test_metrics_of_any_kind_can_be_kept(tmp_path):
    app = FakeRun(checkpoint=tmp_path)
    for worker in app.cluster.workers:
        usual = worker.train
        worker.train = lambda task, usual=usual: dataclasses.replace(usual(task), metrics={"loss": np.float32(0.5)})
    await app.train_sync(2)
    assert [record.metrics for record in CheckpointFolder(tmp_path).newest().records] == [{"loss": 0.5}] * 2


async def test_damaged_records_cost_the_history_only(tmp_path):
    app = FakeRun(checkpoint=tmp_path, checkpoint_keep=9)
    await app.train_sync(3)
    file = tmp_path / JOURNAL
    content = file.read_bytes()
    for damage in (content[:-1], content.replace(b"1", b"2", 1), b""):
        file.write_bytes(damage)
        reports = []
        newest = CheckpointFolder(tmp_path).newest(report=reports.append)
        assert (newest.round, list(newest.records)) == (3, [])
        assert f"{file} is damaged: expected" in reports[0]
    resumed = FakeRun(resume=tmp_path, master_epochs=5)
    await resumed.train_model()
    assert (tmp_path / f"{JOURNAL}.damaged").read_bytes() == b""
    assert [record.round for record in CheckpointFolder(tmp_path).newest().records] == [4, 5]


async def test_records_of_rounds_that_are_done_again_are_replaced(tmp_path):
    app = FakeRun(checkpoint=tmp_path, checkpoint_keep=9)
    await app.train_sync(4)
    (tmp_path / "round-000004" / "weights.safetensors").write_bytes(b"")
    file = tmp_path / JOURNAL
    file.write_bytes(file.read_bytes() + b'{"of": "a killed writer')
    resumed = FakeRun(resume=tmp_path, master_epochs=5)
    await resumed.train_model()
    assert [record.round for record in CheckpointFolder(tmp_path).newest().records] == [1, 2, 3, 4, 5]
    assert equal(weights(resumed), weights(await trained_to(5)))


async def trained_to(epochs):
    app = FakeRun()
    await app.train_sync(epochs)
    return app


async def test_unwritten_records_are_written_with_the_next_checkpoint(tmp_path):
    usual, failures = CheckpointFolder.save, iter([0, 1, 1, 0, 0])

    def save(self, checkpoint):
        if next(failures):
            raise CheckpointError("no space")
        return usual(self, checkpoint)

    app = FakeRun(checkpoint=tmp_path)
    with mock.patch.object(CheckpointFolder, "save", save):
        await app.train_sync(5)
    assert [record.round for record in CheckpointFolder(tmp_path).newest().records] == [1, 2, 3, 4, 5]
    texts = [event.text for event in app.events if event.kind == "checkpoint"]
    assert texts == ["no space; training continues, and the previous checkpoint, of round 1, is intact"] * 2


async def test_with_fresh_optimizers_none_is_sent_back_or_kept(tmp_path):
    sizes = {}
    for state in ("kept", "fresh"):
        app = FakeRun(checkpoint=tmp_path / state, optimizer_state=state)
        replies = []
        for worker in app.cluster.workers:
            worker.train = lambda task, usual=worker.train, replies=replies: (replies.append(usual(task)), replies[-1])[
                1
            ]
        await app.train_sync(2)
        sizes[state] = sum(array.nbytes for reply in replies for group in reply.state.values() for array in group)
        stored = CheckpointFolder(tmp_path / state).newest().arrays
        sizes[state, "stored"] = sum(array.nbytes for array in stored.get("slots_optimizer", {}).values())
        sizes[state, "memory"] = sum(array.nbytes for size_of_one in app.optimizers for array in size_of_one or [])
    size_of_one = sum(array.nbytes for array in weights(app))
    assert [sizes["kept"], sizes["kept", "stored"], sizes["kept", "memory"]] == [
        4 * size_of_one,
        2 * size_of_one,
        2 * size_of_one,
    ]
    assert [sizes["fresh"], sizes["fresh", "stored"], sizes["fresh", "memory"]] == [0, 0, 0]


def test_the_rounds_of_a_longer_plan_begin_after_the_rounds_done():
    for before, worker_epochs, more in itertools.product((1, 4, 5), (1, 2, 3), (0, 1, 5)):
        progress = Progress(weights=[], ledger=None)
        progress.plan(before, worker_epochs, more=False)
        assert sum(progress.epochs) == before
        progress.round = len(progress.epochs)
        completed = list(progress.epochs)
        progress.plan(before + more, worker_epochs, more=False)
        assert progress.epochs[: len(completed)] == completed
        assert sum(progress.epochs) == before + more
        progress.plan(more + 1, worker_epochs, more=True)
        assert sum(progress.epochs) == before + more + 1


async def test_a_record_whose_test_comes_later_is_kept_with_it(tmp_path):
    app = FakeRun(checkpoint=tmp_path)

    def on_round(record):
        if record.round > 1:
            records = app.run_context.progress.records
            records[record.round - 2] = dataclasses.replace(
                records[record.round - 2], test={"loss": float(record.round)}
            )

    app.on_round = on_round
    await app.train_sync(4)
    stored_records = CheckpointFolder(tmp_path).newest().records
    assert [record.test for record in stored_records] == [{"loss": 2.0}, {"loss": 3.0}, {"loss": 4.0}, {}]
    assert [record.round for record in stored_records] == [1, 2, 3, 4]


async def test_a_keeper_that_fails_releases_the_folder(tmp_path):
    folder = CheckpointFolder(tmp_path)
    folder.open("a test")
    keeper = Keeper(folder, 1, ["a"], print)
    progress = Progress(weights=[np.zeros(2)], ledger=SampleLedger(1), version=1)
    with (
        mock.patch.object(CheckpointFolder, "save", side_effect=CheckpointError("no space")),
        mock.patch("ddlf.training.checkpoints.keeper.MAX_FAILURES", 1),
        pytest.raises(CheckpointError),
    ):
        await keeper.last(progress)
    CheckpointFolder(tmp_path).open("another")


def test_facts_of_a_checkpoint_are_read_back_unchanged():
    progress = Progress(
        weights=[np.zeros(2)], ledger=SampleLedger(1), states=[{}], speeds=[None],
        epochs=[2, 2, 1, 2, 2], round=3, version=7, planned_epochs=9, converged=True, settings={"worker_epochs": 2},
    )  # fmt: skip
    stored = progress.to_checkpoint(["a"])
    back = Progress.from_checkpoint(Checkpoint(round=stored.round, arrays=stored.arrays, facts=stored.facts))
    for name in ("training", "version", "round", "planned_epochs", "converged", "settings", "slot_rounds"):
        assert getattr(back, name) == getattr(progress, name), name
    assert back.epochs == [2, 2, 1]


class Killed(Exception):
    pass


async def test_a_sharded_run_whose_residuals_are_all_empty_is_resumed(tmp_path):
    """Its last checkpoint belongs to a running round. Workers wrote each slot's state in slices."""
    small = {"kernel": np.zeros((4, 3), np.float32), "bias": np.zeros(3, np.float32)}  # too small for a codec
    settings = {"exchange": "sharded", "local_rule": "scaffold", "codec": "powersgd:2", "slots": 3, "start": small}
    uninterrupted = FakeRun(**settings)
    await uninterrupted.train_sync(4)
    killed = FakeRun(checkpoint=tmp_path, **settings)

    def on_round(record):
        if record.round == 3:
            raise Killed

    killed.on_round = on_round
    with pytest.raises(Killed):
        await killed.train_sync(4)
    resumed = FakeRun(checkpoint=tmp_path, resume="auto", **settings)
    await resumed.train_sync(4)
    assert equal(weights(resumed), weights(uninterrupted))
