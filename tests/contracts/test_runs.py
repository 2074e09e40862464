"""Tests of the contracts of all training loops and rules. A new loop or rule is one row of ``ROWS`` and runs all tests.

Loops, rules, codecs, crew and checkpoints are real. Model and workers are fake (``FakeRun``): no process, no Keras.
"""

import importlib.abc
import importlib.machinery
import random
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from ddlf.algorithms.arrival import ARRIVAL, Arrived
from ddlf.algorithms.codec import CODEC
from ddlf.algorithms.encoding import decode_update
from ddlf.algorithms.local_rules import LOCAL
from ddlf.algorithms.merge import MERGE
from ddlf.algorithms.outer import OUTER, Nesterov, Streaming, divide_into_fragments
from ddlf.algorithms.partition import shuffled
from ddlf.algorithms.partitioners import PARTITION
from ddlf.algorithms.staleness import STALENESS
from ddlf.algorithms.weights import is_float
from ddlf.errors import WorkerLost
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.training.registry import SETTINGS, STRATEGIES
from ddlf.training.slot.batchnorm import moving
from ddlf.training.slot.numpy_model import accuracy_of
from ddlf.training.slot.parts import send_update

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAMILIES = (
    (MERGE, "merge"),
    (OUTER, "outer"),
    (LOCAL, "local_rule"),
    (ARRIVAL, "arrival"),
    (STALENESS, "staleness"),
    (CODEC, "codec"),
    (PARTITION, "partition"),
)
BOTH = ("sync", "async")
USUAL = {"local_rule": "plain", "outer": "subtract", "update_policy": "stop", "codec": "float32", "partition": "equal"}
ROWS = {
    "usual": (("async",), {"arrival": "published", "staleness": "constant", **USUAL}),
    "fedasync": (("async",), {"arrival": "fedasync", "staleness": "polynomial"}),
    "fedbuff": (("async",), {"arrival": "fedbuff:2", "outer": "nesterov"}),
    "dcasgd": (("async",), {"arrival": "dcasgd:0.5", "outer": "nesterov", "staleness": "hinge:2,1"}),
    "delayed": (("async",), {"arrival": "delayed", "staleness": "inverse"}),
    "elastic": (("async",), {"arrival": "elastic", "weights_codec": "delta:float32"}),
    "average": (("async",), {"arrival": "average"}),
    "weighted": (("async",), {"arrival": "weighted"}),
    "mimic": (("async",), {"arrival": "mimic"}),
    "copy": (("async",), {"arrival": "copy"}),
    "fedbuff, int8": (("async",), {"arrival": "fedbuff:4", "codec": "int8"}),
    "in step": (("async",), {"max_staleness": 1}),
    "mean": (("sync",), {"merge": "mean", **USUAL}),
    "median": (("sync",), {"merge": "median"}),
    "trimmed": (("sync",), {"merge": "trimmed:0.34"}),
    "krum": (("sync",), {"merge": "krum:bad=0"}),  # with a bad slot it needs more slots than these runs have
    "geometric": (("sync",), {"merge": "geometric"}),
    "clipped": (("sync",), {"merge": "clipped"}),
    "multi-krum": (("sync",), {"merge": "krum:bad=0,keep=2"}),
    "speed": (("sync",), {"balance": "speed"}),
    # No slot begins its third round before all slots are measured in two rounds. In these tests an epoch is a round.
    "pace": (("async",), {"balance": "speed", "worker_steps": 13, "arrivals": [2, 1, 1, 3, 2, 3, 3, 1, 2]}),
    "dirichlet": (BOTH, {"partition": "dirichlet:0.5", "y_train": np.arange(203) % 7}),
    "classes": (BOTH, {"partition": "classes:2", "y_train": np.arange(203) % 7}),
    "power": (BOTH, {"partition": "power:1"}),
    "files": (BOTH, {"files": (31, 17, 40, 29, 28, 29, 29)}),
    "nesterov": (BOTH, {"outer": "nesterov"}),
    "fedadam": (BOTH, {"outer": "fedadam"}),
    "fedadagrad": (BOTH, {"outer": "fedadagrad"}),
    "fedyogi": (BOTH, {"outer": "fedyogi:0.1"}),
    "fedavgm": (BOTH, {"outer": "fedavgm:0.5,momentum=0.8"}),
    "streaming": (("sync",), {"outer": "streaming:fragments=2,alpha=0.25"}),
    "streaming few bytes": (("sync",), {"outer": "streaming:3", "codec": "int8", "weights_codec": "delta:int8"}),
    "reject": (BOTH, {"update_policy": "reject"}),
    "clip": (BOTH, {"update_policy": "clip"}),
    "fedprox": (BOTH, {"local_rule": "fedprox:0.5"}),
    "scaffold": (("sync",), {"local_rule": "scaffold"}),
    "fresh": (BOTH, {"optimizer_state": "fresh", "weights_codec": "delta:float32"}),
    "averaged": (("sync",), {"optimizer_state": "averaged", "codec": "int8"}),
    "stays": (BOTH, {"optimizer_state": "stays"}),
    "local": (
        ("sync",),
        {"batchnorm": "local", "norms": frozenset(["norm/variance", "dense/bias"]), "weights_codec": "delta:int8"},
    ),
    "recalibrated": (("sync",), {"batchnorm": "recalibrated", "norms": frozenset(["norm/variance", "dense/bias"])}),
    "float16": (BOTH, {"codec": "float16", "weights_codec": "float16"}),
    "bfloat16": (BOTH, {"codec": "bfloat16", "weights_codec": "bfloat16"}),
    "int8": (BOTH, {"codec": "int8", "weights_codec": "delta:int8"}),
    "int8-block": (BOTH, {"codec": "int8-block:128"}),
    "int4-block": (BOTH, {"codec": "int4-block:32", "weights_codec": "delta:int4-block"}),
    "powersgd": (BOTH, {"codec": "powersgd:rank=3", "weights_codec": "delta:powersgd"}),
    "topk": (BOTH, {"codec": "topk:0.05", "weights_codec": "delta:topk:0.5"}),
    "sharded": (("sync",), {"exchange": "sharded", "outer": "nesterov"}),
    "sharded, few bytes": (("sync",), {"exchange": "sharded", "merge": "median", "codec": "int8", "outer": "fedadam"}),
    "sharded, wholes": (("sync",), {"exchange": "sharded", "merge": "geometric", "update_policy": "reject"}),
    "sharded, places": (("sync",), {"exchange": "sharded", "codec": "topk:0.05"}),
    "sharded, recalibrated": (
        ("sync",),
        {"exchange": "sharded", "batchnorm": "recalibrated", "norms": frozenset(["norm/variance", "dense/bias"])},
    ),
    "sharded, bfloat16": (("sync",), {"exchange": "sharded", "weights_codec": "bfloat16", "outer": "fedadam"}),
    "sharded, float16": (("sync",), {"exchange": "sharded", "weights_codec": "float16", "outer": "nesterov"}),
    "sharded, averaged": (("sync",), {"exchange": "sharded", "optimizer_state": "averaged", "codec": "int8"}),
    "sharded, scaffold": (("sync",), {"exchange": "sharded", "local_rule": "scaffold"}),
    "sharded, streaming": (("sync",), {"exchange": "sharded", "outer": "streaming:fragments=2,alpha=0.25"}),
}
"""For each rule, the loops that accept it and the settings of a run with it."""
RUNS = {f"{mode}, {name}": {"mode": mode, **settings} for name, (modes, settings) in ROWS.items() for mode in modes}

K, ROUNDS = 3, 3
ORDER = random.Random(0).sample([slot for slot in range(1, K + 1) for _ in range(ROUNDS)], K * ROUNDS)
"""The order in which updates arrive in asynchronous training."""
CHANCE = np.random.default_rng(1)
START = {
    "dense/kernel": CHANCE.normal(size=(40, 30)).astype("f4"),  # the only tensor that codecs change
    "dense/bias": CHANCE.normal(size=7).astype("f4"),
    "scale": np.asarray(0.5, "f4"),
    "nothing": np.zeros((0, 3), "f4"),
    "half": CHANCE.normal(size=5).astype("f2"),
    "norm/variance": CHANCE.random(7, "f4"),
    "norm/steps": np.asarray(41, "i8"),
    "mask": np.array([True, False, True]),
}
FROZEN = frozenset(["norm/variance", "norm/steps", "mask"])


class NoKeras(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Raises an error when a module imports Keras or a backend."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in ("keras", "tensorflow", "jax", "torch") else None

    def exec_module(self, module):
        raise AssertionError(f"{module.__name__} is imported")


@pytest.fixture(autouse=True)
def no_process_and_no_keras(monkeypatch):
    for name in ("keras", "tensorflow", "jax", "torch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoKeras(), *sys.meta_path])
    monkeypatch.setattr(subprocess, "Popen", mock.Mock(side_effect=AssertionError("a process is started")))
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def run_of(settings, workers=None, done=0, **more):
    """Return a run with the settings of a row. The first ``done`` updates of the order have arrived already."""
    settings = {"master_epochs": ROUNDS, "slots": K, "start": START, "frozen": FROZEN, **settings, **more}
    settings["arrivals"] = settings.get("arrivals", ORDER)[done:] if settings["mode"] == "async" else None
    return FakeRun(FakeCluster(workers or K), **settings)


def bits(run):
    """Return all results of a run, except workers and times."""
    records = [(r.round, r.slot, r.version, r.staleness, r.epochs, r.samples) for r in run.history]
    arrays = [*run.model.get_weights(), *(array for state in run.optimizers for array in state or ())]
    return [(a.dtype, a.shape, a.tobytes()) for a in [*arrays, run.ledger.counts]], records


async def trained(*arguments, **more):
    run = run_of(*arguments, **more)
    await run.train_model()
    assert run.ledger.is_exact(run.master_epochs)
    return run


@pytest.fixture(scope="module")
def undisturbed():
    """Return a function that trains a run with some settings once and caches it."""
    runs = {}

    async def of(settings):
        key = str(sorted(settings.items()))
        if key not in runs:
            runs[key] = await trained(settings)
        return runs[key]

    return of


async def test_every_loop_and_every_rule_has_a_row():
    listed = list(RUNS.values())
    for family, name in FAMILIES:
        written = {str(family.read(rule)).partition(":")[0] for rule in family.names}
        assert written == {str(row[name]).partition(":")[0] for row in listed if name in row}
    # The bits of Downpour depend on the order of pushes instead of updates, and L-BFGS has no updates.
    # tests/training/test_downpour.py and test_lbfgs.py test their contracts.
    assert set(STRATEGIES) - {"downpour", "lbfgs"} == {row["mode"] for row in listed}
    policies = {row["update_policy"] for row in listed if "update_policy" in row}
    assert set(SETTINGS["update_policy"].accepts.names) == policies


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS)
class TestEach:
    async def test_run_has_the_same_bits_for_any_assignment_of_slots(self, settings, undisturbed):
        """Another worker carries each slot. In asynchronous training, the order of updates is fixed."""
        moved = run_of(settings, workers=K if settings["mode"] == "async" else 1)
        moved.cluster.workers.reverse()
        await moved.train_model()
        assert bits(moved) == bits(await undisturbed(settings))
        assert bits(await trained(settings, workers=5)) == bits(moved)

    async def test_one_slot_equals_training_in_one_process(self, settings):
        settings = {**settings, "weights_codec": "float32"}
        run = await trained(settings, slots=1, arrivals=[1] * ROUNDS)
        for actual, expected in zip(run.model.get_weights(), trained_by_hand(run), strict=True):
            assert np.array_equal(actual, expected)

    async def test_with_a_rate_of_0_nothing_changes(self, settings):
        run = await trained(settings, learning_rate=0)
        for actual, expected in zip(run.model.get_weights(), START.values(), strict=True):
            assert np.array_equal(actual, expected)

    async def test_lost_workers_change_no_bit(self, settings, undisturbed, tmp_path):
        # State that does not return with an update is lost with its worker, unless a checkpoint has it.
        owed = (
            CODEC.read(settings.get("codec", "float32")).biased
            or "streaming" in settings.get("outer", "")
            or settings.get("optimizer_state") == "stays"
            or settings.get("exchange") == "sharded"
        )
        run = run_of(settings, workers=K + 1, checkpoint=tmp_path if owed else None)
        lost = []
        for worker in run.cluster.workers:
            worker.train = train_that_loses(worker, lost)
        await run.train_model()
        assert len(lost) == 2
        assert bits(run) == bits(await undisturbed(settings))

    async def test_run_resumed_at_any_commit_has_the_same_bits(self, settings, tmp_path):
        asynchronous = settings["mode"] == "async"
        settings = {**settings, "slots": 1 if asynchronous else K, "arrivals": [1] * ROUNDS}
        async for uninterrupted, resumed in resumed_at_any_commit(settings, tmp_path, ROUNDS):
            assert bits(resumed) == bits(uninterrupted)

    async def test_integers_stay_and_untrained_weights_are_merged_plainly(self, settings, undisturbed):
        run = await undisturbed(settings)
        after = dict(zip(START, run.model.get_weights(), strict=True))
        for name, before in START.items():
            assert (after[name].dtype, after[name].shape) == (before.dtype, before.shape)
            assert is_float(before) or np.array_equal(after[name], before)
        plain = await undisturbed({**settings, "codec": "float32", "weights_codec": "float32", "outer": "subtract"})
        variance = list(START).index("norm/variance")
        assert np.array_equal(after["norm/variance"], plain.model.get_weights()[variance])


@pytest.mark.parametrize("name", ["usual", "int8", "fedadam"])
async def test_asynchronous_run_of_several_slots_resumes_at_any_commit(name, tmp_path):
    """The bits differ, because all slots then begin with the weights of the checkpoint."""
    settings = {**RUNS[f"async, {name}"], "slots": 2, "arrivals": [2, 1, 1, 2, 1, 2]}
    async for uninterrupted, resumed in resumed_at_any_commit(settings, tmp_path, 6):
        assert len(resumed.history) == len(uninterrupted.history)


async def resumed_at_any_commit(settings, tmp_path, commits):
    """Yield a run and, for each commit except the last, a run resumed from this commit. All ledgers are exact."""
    folder = tmp_path / "whole"
    uninterrupted = await trained(settings, checkpoint=folder, checkpoint_keep=100)
    assert len(list(folder.glob("round-*"))) == len(uninterrupted.history) == commits
    for number in range(1, commits):
        source, new_folder = folder / f"round-{number:06d}", tmp_path / f"from {number}"
        yield (
            uninterrupted,
            await trained(settings, done=number, resume=source, checkpoint=new_folder, checkpoint_every=100),
        )


def trained_by_hand(run):
    """Return the weights after training one slot by hand: local rounds, codec, and rules of both kinds."""
    weights, slot_state = list(START.values()), {}
    outer = OUTER.read(getattr(run, "outer", None) or "subtract")
    if isinstance(outer, Streaming):
        return fragments_by_hand(run, outer)
    arrival = ARRIVAL.read(getattr(run, "arrival", None) or "published")
    state = {"outer": outer.init(weights), **arrival.init(weights)}
    trains = [name not in FROZEN for name in START]
    for number in range(ROUNDS):
        task = SimpleNamespace(slot=0, round=number, epochs=1, seed=0, indices=shuffled(run.samples, 0, number))
        begin = arrival.begin(state, weights, 0)
        worker, control = run.cluster.workers[0], slot_state.get("control")
        task.local, task.control = str(LOCAL.read(run.local_rule)), control
        update, momentum = worker.fit(task, begin, slot_state.get("momentum"))
        update, control = worker.model.corrected(task, begin, update, control)
        encoded, residual, _ = send_update(run.codec, update, [not flag for flag in trains], slot_state.get("residual"))
        slot_state = {"residual": residual, "control": control} | (
            {"momentum": momentum} if run.optimizer_state != "fresh" else {}
        )
        arrived = Arrived(
            update=decode_update(encoded, weights),
            start=begin,
            before=state,
            slot=0,
            slots=1,
            factor=1,
            trainable=trains,
            outer=outer,
            accuracy=accuracy_of(begin),
            last=number == ROUNDS - 1,
        )
        changed, weights = arrival.arrive(state, weights, arrived)
        state = {**state, **changed}
        if run.batchnorm == "recalibrated":
            for index, statistic in zip(moving(run.model), worker.measure(task, weights), strict=True):
                weights[index] = np.asarray(weights[index] - (weights[index] - statistic))
    return weights


def fragments_by_hand(run, rule):
    """Like ``trained_by_hand``, but the slot keeps its values of fragments that a round does not exchange."""
    weights, local, velocity = list(START.values()), list(START.values()), Nesterov().init(list(START.values()))
    trains = [name not in FROZEN for name in START]
    fragments, momentum, residual = divide_into_fragments(weights, trains, rule.fragments), None, [None] * len(weights)
    travels = []
    for number in range(ROUNDS):
        task = SimpleNamespace(slot=0, round=number, epochs=1, seed=0, indices=shuffled(run.samples, 0, number))
        for i in travels:  # the fragments of the earlier round
            mixes = trains[i] and rule.alpha
            local[i] = np.asarray(rule.alpha * local[i] + (1 - rule.alpha) * weights[i]) if mixes else weights[i]
        parts = fragments if number == ROUNDS - 1 else [fragments[number % rule.fragments]]
        travels = [i for i, trained in enumerate(trains) if not trained or any(i in part for part in parts)]
        update, momentum = run.cluster.workers[0].fit(task, local, momentum)
        local_updates = [update[i] + (weights[i] - local[i]) if is_float(local[i]) else update[i] for i in travels]
        local = [np.asarray(w - g) if is_float(w) else w for w, g in zip(local, update, strict=True)]
        owed = [residual[i] for i in travels]
        encoded, residual_after, _ = send_update(run.codec, local_updates, [not trains[i] for i in travels], owed)
        sent = decode_update(encoded, [weights[i] for i in travels])
        for index, i in enumerate(travels):
            residual[i] = residual_after[index]
            (velocity[i],), (weights[i],) = Nesterov().update([velocity[i]], [weights[i]], [sent[index]], [trains[i]])
    return weights


def train_that_loses(worker, lost):
    """Return a ``train`` that loses two replies, each after it has computed the second round of a slot."""

    def train(task):
        reply = FakeWorker.train(worker, task)
        if task.round == 1 and len(lost) < 2 and task.slot not in lost:
            lost.append(task.slot)
            worker.lost = True
            raise WorkerLost("it was lost", worker=worker.name)
        return reply

    return train
