"""Tests of Sandblaster L-BFGS: it reaches SciPy's minimum, and lost workers change no bit. Shards are real. No process, no Keras."""

import asyncio
import math
import re

import numpy as np
import pytest

from ddlf import events
from ddlf.cluster.link import Notice
from ddlf.errors import AppError, BadUpdate, ConfigError, WorkerLost
from ddlf.events import Converged, RunEnded, Warned
from ddlf.monitor.terminal.lines import line
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.training.registry import SETTINGS
from ddlf.training.slot.numpy_model import NumpyModel
from ddlf.training.start import check
from tests.later import Later
from tests.patience import PATIENCE_S
from tests.training.runs import events_of

optimize = Later("scipy.optimize")

CHANCE = np.random.default_rng(5)
START = {
    "dense/kernel": CHANCE.normal(size=(8, 5)),
    "dense/bias": CHANCE.normal(size=7),
    "scale": np.asarray(0.5),
    "nothing": np.zeros((0, 3)),
    "norm/variance": CHANCE.random(7, "f4"),
    "norm/steps": np.asarray(41, "i8"),
}
FROZEN = frozenset(["norm/variance", "norm/steps"])
VALUES = 48
CURVES, TARGETS = np.logspace(0, 2, VALUES), CHANCE.normal(size=(203, VALUES))


def loss_of(row, indices):
    """Return the mean over samples of ``sum(c (w - t)^2 / 2 + log cosh(3 w))``, and its gradient."""
    difference = row - TARGETS[indices]
    loss = np.sum(CURVES * difference**2, 1) / 2 + np.sum(np.logaddexp(3 * row, -3 * row))
    return float(np.mean(loss)), np.mean(CURVES * difference, 0) + 3 * np.tanh(3 * row)


def row_of(weights):
    return np.concatenate([np.ravel(w) for w, path in zip(weights, START, strict=True) if path not in FROZEN])


def gradient_of(model, batch, weights):
    """Replace the method of ``NumpyModel`` by a loss that has a minimum."""
    loss, gradient = loss_of(row_of(weights), batch[0])
    update, at = [], 0
    for w, path in zip(weights, START, strict=True):
        if path in FROZEN:
            update.append(np.zeros_like(w))
        else:
            update.append(gradient[at : at + w.size].reshape(w.shape).astype(w.dtype))
            at += w.size
    return update, {"loss": loss}


@pytest.fixture(autouse=True)
def has_a_minimum(monkeypatch):
    monkeypatch.setattr(NumpyModel, "gradient_of", gradient_of)


def run_of(workers=3, **settings):
    settings = {"slots": 3, "start": START, "frozen": FROZEN, "master_epochs": 12, "tolerance": 0, **settings}
    run = FakeRun(FakeCluster(workers), mode="lbfgs", **settings)
    run.event_log = []
    run.subscribe(run.event_log.append)
    return run


async def trained(workers=3, **settings):
    run = run_of(workers, **settings)
    await run.train_model()
    assert run.ledger.is_exact(len(run.history))
    return run


def bits(run):
    """Return the weights and the records, except workers and times."""
    numbers = ("loss", "gradient", "step", "passes", "left_out")
    records = [(record.round, record.samples, *(record.metrics[name] for name in numbers)) for record in run.history]
    return weights_of(run), records


def weights_of(run):
    return [(w.dtype, w.tobytes()) for w in run.model.get_weights()]


def of_shards(run):
    """Return the warnings about shards and their vectors."""
    return [event.why for event in events_of(run, Warned) if event.about == "shards"]


KNOWN = {}


async def undisturbed_bits(epochs):
    """Return the bits of a run of this length without lost workers, which is trained once."""
    if epochs not in KNOWN:
        KNOWN[epochs] = bits(await trained(master_epochs=epochs))
    return KNOWN[epochs]


@pytest.fixture
async def undisturbed():
    """The bits of a run of the usual length without lost workers."""
    return await undisturbed_bits(12)


# --- the result -------------------------------------------------------------------------------------------------------


async def test_loss_is_that_of_scipys_minimum_in_no_more_passes():
    passes = []

    def counted_loss(row):
        loss, gradient = loss_of(row, np.arange(203))
        passes.append(loss)
        return loss, gradient

    options = {"maxcor": 10, "ftol": 0, "gtol": 1e-9, "maxiter": 1000}
    least = optimize.minimize(counted_loss, row_of(START.values()), jac=True, method="L-BFGS-B", options=options).fun
    run = await trained(master_epochs=100, tolerance=1e-7)
    losses = [record.loss for record in run.history]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == pytest.approx(least, abs=1e-8)
    passes_of_run = np.cumsum([record.metrics["passes"] for record in run.history])
    reached = next(count for count, loss in zip(passes_of_run, losses, strict=True) if loss <= least + 1e-8)
    assert reached <= 1.15 * next(count for count, loss in enumerate(passes, 1) if loss <= least + 1e-8)
    (ended,) = events_of(run, Converged)
    assert ended.why.startswith("the largest value of the gradient is")
    assert ended.why.endswith("and tolerance=1e-07")
    assert run.history.ended == ended.why == run.event_log[-1].why
    assert isinstance(run.event_log[-1], RunEnded)
    loss, gradient = loss_of(row_of(run.model.get_weights()), np.arange(203))
    assert run.history[-1].loss == pytest.approx(loss, rel=1e-14)
    assert run.history[-1].metrics["gradient"] == pytest.approx(np.abs(gradient).max(), rel=1e-3)
    frozen = list(START).index("norm/variance")
    assert np.array_equal(run.model.get_weights()[frozen], START["norm/variance"])


@pytest.mark.parametrize("workers", [1, 2, 5])
async def test_bits_do_not_depend_on_the_workers(workers, undisturbed):
    assert bits(await trained(workers)) == undisturbed


async def test_bits_do_not_depend_on_the_number_of_shards(monkeypatch, undisturbed):
    for module in ("ddlf.algorithms.lbfgs",):
        monkeypatch.setattr(f"{module}.BLOCK", 7)
    runs = [bits(await trained(shards=shards)) for shards in (1, 3, 6)]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("shards", "messages"),
    [
        (99, ["shards=99, but this model has 48 trained values, which make no more than 3"]),
        (3, []),
        (None, []),
    ],
)
async def test_fewer_shards_than_asked_for_are_named(monkeypatch, shards, messages):
    monkeypatch.setattr("ddlf.algorithms.lbfgs.BLOCK", 16)
    assert of_shards(await trained(shards=shards, master_epochs=1)) == messages


@pytest.mark.parametrize("checkpoint", [False, True])
async def test_training_continues_with_its_pairs_unless_the_weights_have_changed(checkpoint, tmp_path, undisturbed):
    run = run_of(master_epochs=5, **({"checkpoint": tmp_path} if checkpoint else {}))
    await run.train_model()
    assert run.history.ended == "all 5 epochs are done"
    run.master_epochs, run.checkpoint = 7, None
    await run.train_model()
    assert bits(run)[0] == undisturbed[0]
    assert len(run.history) == 12
    assert run.history.ended == "all 12 epochs are done"
    assert not of_shards(run)
    changed = [w + 1 if w.dtype == np.float64 else w for w in run.model.get_weights()]
    run.model.set_weights(changed)
    run.master_epochs = 2
    await run.train_model()
    fresh = run_of(master_epochs=2, start=dict(zip(START, changed, strict=True)))
    await fresh.train_model()
    assert bits(run)[0] == bits(fresh)[0]
    (message,) = of_shards(run)
    assert message.startswith("the weights have changed since the last L-BFGS training, so L-BFGS begins with an")
    assert not of_shards(fresh)


async def test_vectors_too_large_for_the_master_are_dropped_with_a_warning(monkeypatch):
    monkeypatch.setattr("ddlf.training.strategies.lbfgs.master.KEPT_BYTES", 21 * VALUES * 8 - 1)
    run = run_of(master_epochs=5)
    await run.train_model()
    fresh = run_of(master_epochs=2, start=dict(zip(START, run.model.get_weights(), strict=True)))
    assert not of_shards(run)
    run.master_epochs = 2
    await run.train_model()
    (message,) = of_shards(run)
    assert message.startswith("the changes of the last L-BFGS training were too large for the master to keep them")
    await fresh.train_model()
    assert bits(run)[0] == bits(fresh)[0]


@pytest.mark.parametrize("checkpoint", [False, True])
async def test_lbfgs_continues_synchronous_training(checkpoint, tmp_path):
    """L-BFGS follows another optimizer in one program, or in a restarted program with two folders."""

    async def program(epochs):
        run = FakeRun(FakeCluster(2), slots=2, start=START, frozen=FROZEN, master_epochs=3)
        run.event_log = []
        run.subscribe(run.event_log.append)
        if checkpoint:
            run.checkpoint, run.resume = tmp_path / "first", "auto"
        await run.train_model()
        before = run.model.get_weights()
        run.mode, run.master_epochs, run.tolerance = "lbfgs", epochs, 0
        if checkpoint:
            run.checkpoint, run.master_epochs = tmp_path / "then", 3 + epochs
        await run.train_model()
        assert len(run.history) == 3 + epochs
        assert not of_shards(run)
        return run, before

    run, before = await program(4)
    fresh = run_of(2, slots=2, start=dict(zip(START, before, strict=True)), master_epochs=4)
    await fresh.train_model()
    assert weights_of(run) == weights_of(fresh)
    if checkpoint:
        resumed, _ = await program(6)
        fresh.master_epochs = 2
        await fresh.train_model()
        assert weights_of(resumed) == weights_of(fresh)


# --- losses -----------------------------------------------------------------------------------------------------------


def lose_on_verb(run, verb, times, between=False):
    """Lose the worker that receives a verb, each time the count of its calls is in ``times``. Return the lost workers."""
    count, lost = [0], []

    def ends(worker, name):
        if name != verb or worker.lost:
            return False
        count[0] += 1
        if count[0] in times:
            lost.append(worker.id)
            worker.lost = True
        return worker.lost

    for worker in run.cluster.workers:

        async def rpc(request, timeout_s=None, worker=worker):
            name = request.args[2]
            if ends(worker, name):
                raise WorkerLost("it was lost", worker=worker.name)
            return await FakeWorker.rpc(worker, request, timeout_s)

        async def ask(number, role, name, *arguments, worker=worker):
            if ends(worker.others[number], name):
                raise WorkerLost("it was lost", worker=f"worker {number}")
            return await FakeWorker._ask(worker, number, role, name, *arguments)

        worker.rpc, worker._ask = rpc, ask
    return lost


OFTEN = ["portions", "push", "enter", "aim", "sums", "stage", "settle", "trial", "add", "staged"]
ONCE = ["prepare", "send", "copy"]


@pytest.mark.parametrize("verb", OFTEN + ONCE)
@pytest.mark.parametrize("time", [1, 2, pytest.param(11, marks=pytest.mark.slow)])
async def test_a_lost_worker_changes_no_bit(verb, time):
    epochs = 12 if time == 11 else 4
    run = run_of(master_epochs=epochs)
    lost = lose_on_verb(run, verb, [time])
    await run.train_model()
    assert lost or (time > 1 and verb in ONCE), "the others are asked for at the beginning or after a loss"
    assert run.ledger.is_exact(epochs)
    assert bits(run) == await undisturbed_bits(epochs)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 8))])
async def test_many_losses_change_no_bit(seed, undisturbed):
    chance = np.random.default_rng(seed)
    run = run_of(4)
    lost = lose_on_verb(run, chance.choice(OFTEN), {int(n) for n in chance.integers(2, 12, 3)})
    await run.train_model()
    assert lost
    assert bits(run) == undisturbed


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("checkpoint", [False, True])
async def test_iterations_are_repeated_if_all_copies_are_lost(workers, checkpoint, undisturbed, tmp_path):
    run = run_of(workers, **({"checkpoint": tmp_path, "checkpoint_every": 3} if checkpoint else {}))
    count = [0]

    async def lose(record):
        count[0] += 1
        if count[0] == 8:
            for worker in run.cluster.workers:
                worker.lost = True

    run.on_round = lose
    await run.train_model()
    assert count == [12], "each iteration is reported once"
    assert bits(run) == undisturbed
    (message,) = [event.why for event in events_of(run, Warned) if "computed again" in event.why]
    assert message.startswith("shard 1 of 1 was on worker ")
    first = 7 if checkpoint else 1
    assert message.endswith(f"and there is no copy: iterations {first} to 8 are computed again, with the same result")


@pytest.mark.parametrize("leaving", [1, 3])
async def test_workers_that_leave_hand_back_their_vectors(leaving, undisturbed):
    run = run_of()

    async def leave(record):
        if record.version == 8:
            for worker in run.cluster.workers[:leaving]:
                worker.notice = Notice("SIGTERM", asyncio.get_running_loop().time() + PATIENCE_S)
                worker.on_leaving()

    run.on_round = leave
    await run.train_model()
    assert not [event for event in events_of(run, Warned) if "computed again" in event.why]
    assert not events_of(run, events.WorkerLost)
    assert bits(run) == undisturbed


async def test_lost_shard_continues_with_its_copy(undisturbed):
    run = run_of()
    lost = lose_on_verb(run, "sums", [4])
    await run.train_model()
    messages = [event.why for event in events_of(run, Warned)]
    assert f"shard 1 of 1 was on worker {lost[0]}, which is lost: worker 2 continues with its copy" in messages
    assert bits(run) == undisturbed


async def test_other_workers_compute_the_portions_of_a_slow_worker(undisturbed):
    """The slow worker never answers for its last portion, and the pass ends without this answer."""
    run = run_of()
    slow, stuck = run.cluster.workers[1], []

    async def rpc(request, timeout_s=None):
        if request.args[2] == "portions" and len(stuck) < 100 and request.args[3] % 5 == 3:
            stuck.append(request.args[-1])
            await asyncio.Event().wait()
        return await FakeWorker.rpc(slow, request, timeout_s)

    slow.rpc = rpc
    await run.train_model()
    assert stuck
    assert run.ledger.is_exact(12)
    assert bits(run) == undisturbed


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"shards": 1}, {"slots": 3, "samples": 203}])
async def test_run_resumed_at_any_iteration_has_the_same_bits(more, tmp_path, undisturbed):
    folder = tmp_path / "whole"
    uninterrupted = await trained(checkpoint=folder, checkpoint_keep=100, **more)
    assert bits(uninterrupted) == undisturbed
    for number in (1, 7):
        resumed = await trained(2, resume=folder / f"round-{number:06d}", checkpoint=tmp_path / f"{number}", **more)
        assert bits(resumed) == undisturbed


@pytest.mark.parametrize("verb", ["portions", "push", "sums", "stage", "settle", "aim", "write"])
@pytest.mark.parametrize("time", [7, *(pytest.param(time, marks=pytest.mark.slow) for time in (8, 9))])
async def test_a_run_interrupted_at_any_moment_continues_with_the_same_bits(verb, time, tmp_path, undisturbed):
    run, count = run_of(checkpoint=tmp_path, shards=1), 0
    training = asyncio.ensure_future(run.train_model())
    for worker in run.cluster.workers:

        async def rpc(request, timeout_s=None, worker=worker):
            nonlocal count
            if request.args[2] == verb:
                count += 1
                if count == time:
                    training.cancel()
                    await asyncio.sleep(0)
            return await FakeWorker.rpc(worker, request, timeout_s)

        worker.rpc = rpc
    with pytest.raises(asyncio.CancelledError):
        await training
    completed = len(run.history)
    assert completed < 12
    assert run.ledger.is_exact(completed)
    assert [record.metrics["loss"] for record in run.history] == [
        record_bits[2] for record_bits in undisturbed[1][:completed]
    ]
    resumed = await trained(checkpoint=tmp_path, resume="auto", shards=1)
    assert bits(resumed) == undisturbed


async def test_checkpoint_is_written_by_the_owners_and_read_by_them(tmp_path, monkeypatch):
    monkeypatch.setattr("ddlf.algorithms.lbfgs.BLOCK", 16)
    uninterrupted = await trained(checkpoint=tmp_path, checkpoint_keep=100)
    slices = sorted(path.name for path in (tmp_path / "round-000007").glob("slice_*"))
    assert slices == [f"slice_{number:04d}.safetensors" for number in (1, 2, 3)]
    for shards in (None, 2):
        resumed = run_of(resume=tmp_path / "round-000007", checkpoint=tmp_path / f"{shards}", shards=shards)
        await resumed.train_model()
        assert bits(resumed) == bits(uninterrupted)
        verbs = [request[0] for worker in resumed.cluster.workers for request in worker.asked]
        assert ("read_slice" in verbs) == (shards is None)


@pytest.mark.slow  # the master imports Keras
async def test_evaluations_are_made_on_the_workers():
    run = run_of(evaluate_every=1, master_epochs=4, x_test=np.zeros(3), y_test=np.zeros(3))
    await run.train_model()
    means = [record.test["loss"] for record in run.history]
    assert len(set(means)) == 4


# --- refusals ---------------------------------------------------------------------------------------------------------


def with_loss(monkeypatch, change):
    """Change what a portion returns: ``change(count, update, metrics)``."""
    count = [0]

    def changed(model, batch, weights):
        count[0] += 1
        update, metrics = gradient_of(model, batch, weights)
        return change(count[0], update, metrics) or (update, metrics)

    monkeypatch.setattr(NumpyModel, "gradient_of", changed)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            lambda count, update, metrics: metrics.update(loss=float(count)),
            ConfigError,
            "mode='lbfgs' needs a loss without chance, but the same samples gave 1 and then 2; remove dropout",
        ),
        (
            lambda count, update, metrics: update.__setitem__(4, np.ones(7, "f4")),
            ConfigError,
            "mode='lbfgs' needs a loss that only depends on the trained weights, but the model changes norm/variance",
        ),
        (
            lambda count, update, metrics: metrics.update(loss=metrics["loss"] + (count in (1, 2))),
            ConfigError,
            "mode='lbfgs' takes the mean over samples, but the loss combines the samples of a batch: it is .* for a batch, and",
        ),
        (
            lambda count, update, metrics: metrics.update(loss=math.nan),
            BadUpdate,
            "the loss of the first weights is nan; check the data for NaN",
        ),
        (
            lambda count, update, metrics: metrics.update(loss=metrics["loss"] if count == 3 else math.nan),
            BadUpdate,
            "the loss of the first weights is nan; check the data for NaN",
        ),
        (
            lambda count, update, metrics: update.__setitem__(1, np.full(7, np.nan)),
            BadUpdate,
            "the gradient at the first weights has NaN or infinite values",
        ),
    ],
)
async def test_a_loss_that_is_not_a_function_of_the_weights_is_refused_before_the_first_step(
    monkeypatch, change, kind, message
):
    with_loss(monkeypatch, change)
    run = run_of()
    with pytest.raises(kind, match=f"^{message}"):
        await run.train_model()
    assert not run.history
    assert np.array_equal(row_of(run.model.get_weights()), row_of(START.values()))


async def test_a_loss_without_a_lower_bound_is_refused(monkeypatch):
    def falls(model, batch, weights):
        return [np.zeros_like(w) if p in FROZEN else -np.ones_like(w) for w, p in zip(weights, START, strict=True)], {
            "loss": -float(row_of(weights).sum())
        }

    monkeypatch.setattr(NumpyModel, "gradient_of", falls)
    with pytest.raises(
        BadUpdate, match=r"^the loss has no lower bound: along the direction of iteration 1 it falls from"
    ):
        await run_of().train_model()


async def test_run_keeps_its_best_weights_and_warns_if_no_step_lowers_the_loss(monkeypatch):
    """The gradient points the wrong way from the fifth iteration on."""
    run, points = run_of(), []

    def wrong(model, batch, weights):
        update, metrics = gradient_of(model, batch, weights)
        if len(run.history) >= 4:
            metrics["loss"] += 1e3 * float(np.abs(row_of(weights) - points[-1]).sum())
        return update, metrics

    async def note(record):
        points.append(row_of(await run.run_context.progress.weights.fetch()))

    monkeypatch.setattr(NumpyModel, "gradient_of", wrong)
    run.on_round = note
    await run.train_model()
    assert len(run.history) == 4
    assert run.history.ended == "no step along the direction of iteration 5 lowers the loss, so the best weights stay"
    assert np.array_equal(row_of(run.model.get_weights()), points[-1])
    assert line(events_of(run, Converged)[0]) == f"ended     after 4 rounds, before all 12 epochs: {run.history.ended}"


async def test_portions_larger_than_the_data_are_refused():
    with pytest.raises(ConfigError, match=r"^portion=1,000 is larger than the data, which has 203 samples; leave"):
        await run_of(portion=1000).train_model()


async def test_portions_that_cards_share_unequally_are_refused(monkeypatch):
    monkeypatch.setattr("ddlf.training.strategies.lbfgs.replica.parts_of_batch", lambda model: 4, raising=False)
    with pytest.raises(
        AppError, match="a portion of 14 samples cannot be divided among 4 cards; let 8 divide each portion"
    ):
        await run_of(portion=14).train_model()


async def test_types_of_weights_that_differ_are_refused():
    start = {**START, "dense/bias": START["dense/bias"].astype("f4")}
    with pytest.raises(
        ConfigError, match="one type, float32 or float64, but the trained weights have float32 and float64"
    ):
        await run_of(start=start).train_model()


async def test_model_without_trained_weights_is_refused():
    with pytest.raises(ConfigError, match="steps weights by gradients, and this model has none that are trained"):
        await run_of(start={"w": np.zeros(3)}, frozen=frozenset("w")).train_model()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": 0}, "pairs must be a whole number of 1 or more, got 0"),
        ({"portion": 0}, "portion must be a whole number of 1 or more"),
        ({"tolerance": -1}, "tolerance must be"),
        ({"worker_steps": 5}, "worker_steps='5' is for local training: with mode='lbfgs' there is none"),
        ({"worker_epochs": 2}, "worker_epochs=2 has no effect in L-BFGS training"),
        (
            {"batch_size": 64},
            "batch_size=64 has no effect in L-BFGS training: a worker computes a whole portion at once",
        ),
        ({"codec": "int8"}, "codec='int8' has no effect in L-BFGS training"),
        ({"exchange": "sharded"}, "exchange='sharded' is for synchronous training: L-BFGS training does not use it"),
        ({"merge": "median"}, "merge='median' is for synchronous training"),
        ({"precision": "mixed_bfloat16"}, "precision='mixed_bfloat16' rounds gradients too coarsely"),
        ({"files": (100, 103)}, "mode='lbfgs' trains on arrays, but this app has train_data"),
    ],
)
async def test_settings_of_other_modes_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        await run_of(**settings).train_model()


USED = {
    *(
        "mode",
        "master_epochs",
        "seed",
        "slots",
        "planned",
        "scout",
        "threads",
        "deterministic",
        "tf32",
        "callbacks",
        "wait_for_workers_s",
    ),
    *("class_weight", "pairs", "tolerance", "portion", "shards"),
    *(
        "evaluate_every",
        "evaluate_on",
        "converge",
        "checkpoint",
        "checkpoint_every",
        "checkpoint_keep",
        "resume",
        "takeover",
    ),
    *("out", "run_name", "trackers", "echo", "verbose", "ui", "dashboard", "advice"),
}
FOR_FILES = {"shuffle", "data_memory", "on_bad"}
"""Settings for files. Every mode refuses them for arrays, and L-BFGS refuses files."""
REFUSED = {
    "exchange": "sharded",
    "worker_callbacks": ["one"],
    "batch_size": 8,
    "partition": "dirichlet:0.5",
    "private": True,
    "balance": "speed",
    "worker_epochs": 2,
    "worker_steps": 1,
    "round_samples": 100,
    "optimizer_state": "fresh",
    "local_rule": "fedprox:0.5",
    "precision": "mixed_bfloat16",
    "rate_decay": "webnn",
    "schedule": "cosine",
    "clip": "agc",
    "multipliers": "freeze:0.5",
    "codec": "int8",
    "weights_codec": "float16",
    "update_policy": "clip",
    "merge": "median",
    "outer": "nesterov",
    "batchnorm": "local",
    "arrival": "fedasync",
    "staleness": "inverse",
    "max_staleness": 2,
    "replicas": 3,
    "n_fetch": 2,
    "n_push": 2,
    "push_rule": "momentum",
    "shard_cut": "layers",
    "shard_workers": 1,
    "copies": 2,
    "softsync": 2,
    "warm_start": 3,
    "split": "stages:2",
    "micro_batches": 4,
    "peer": "http://127.0.0.1:8930/#code",
}


NOISE = {"update_clip": 1.0, "noise_multiplier": 1.0, "delta": 1e-6, "privacy_budget": 8.0, "privacy_unit": "sample"}
"""Settings of private data, which L-BFGS refuses."""
MASKS = {"secure_aggregation": True, "update_limit": 4.0}
"""Settings of masks, which L-BFGS refuses, too."""


def test_each_setting_is_used_or_refused():
    assert USED | FOR_FILES | set(REFUSED) | set(NOISE) | set(MASKS) == set(SETTINGS)
    assert not USED & set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_each_setting_without_an_effect_is_refused_by_name(name):
    run = run_of(**{name: REFUSED[name]})
    with pytest.raises(ConfigError) as refused:
        check(run, "lbfgs")
    assert re.search(rf"\b{name}(=| out)", str(refused.value))


@pytest.mark.parametrize("settings", [{name: value} for name, value in NOISE.items()] + [NOISE])
def test_noise_is_refused(settings):
    with pytest.raises(ConfigError, match="noise_multiplier"):
        check(run_of(**settings), "lbfgs")


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_refused(name):
    with pytest.raises(ConfigError, match=f"^{name} with"):
        check(run_of(**{name: MASKS[name]}), "lbfgs")


async def test_batch_size_of_a_class_for_another_mode_does_not_stop_lbfgs():
    class Usual(FakeRun):
        batch_size, worker_epochs = 64, 2

    run = Usual(FakeCluster(1), slots=1, start=START, frozen=FROZEN, master_epochs=1)
    run.mode = "lbfgs"
    await run.train_model()
    assert len(run.history) == 1
