"""Tests of the sharded exchange: it has the bits of the star, also with lost workers. The model stays on workers. No Keras."""

import asyncio
import functools
import itertools
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from ddlf.algorithms.outer import Nesterov
from ddlf.errors import BadUpdate, ClusterTooSmall, ConfigError, ConnectError, WorkerLost
from ddlf.events import ExchangeChosen, ResidualDropped, UpdateClipped, Warned, WorkerGone, WorkerReturned
from ddlf.events import WorkerLost as WorkerLostEvent
from ddlf.rpc.messages import dumps, loads
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from ddlf.training.checkpoints.slices import Slices
from ddlf.training.exchanges.sharded.copies import SlotCopies
from ddlf.training.progress import WeightsRef
from ddlf.training.slot.parts import keeps_little
from tests.training.doubles import Doubles

CHANCE = np.random.default_rng(1)
START = {
    "dense/kernel": CHANCE.normal(size=(60, 40)).astype("f4"),  # more than 90% of all values
    "dense/bias": CHANCE.normal(size=7).astype("f4"),
    "scale": np.asarray(0.5, "f4"),
    "nothing": np.zeros((0, 3), "f4"),
    "half": CHANCE.normal(size=5).astype("f2"),
    "norm/variance": CHANCE.random(7, "f4"),
    "norm/steps": np.asarray(41, "i8"),
}
FROZEN = frozenset(["norm/variance", "norm/steps"])
ROUNDS, K = 3, 3

LATELY = {
    "float16": {"weights_codec": "float16", "outer": "fedadam"},
    "averaged": {"optimizer_state": "averaged", "codec": "int8", "outer": "nesterov"},
    "scaffold": {"local_rule": "scaffold", "worker_steps": 5, "codec": "topk:0.3"},
    "both means": {"local_rule": "scaffold", "optimizer_state": "averaged", "outer": "nesterov"},
    "streaming": {"outer": "streaming:2", "codec": "int8"},
    "recalibrated": {"batchnorm": "recalibrated", "norms": ("norm/variance", "dense/bias"), "outer": "nesterov"},
}
"""Settings that keep state beside a generation of weights. Each kind of state occurs once."""


def run_of(exchange="sharded", workers=K, **settings):
    settings = {"slots": K, "start": START, "frozen": FROZEN, "master_epochs": ROUNDS, **settings}
    return FakeRun(FakeCluster(workers), exchange=exchange, **settings)


async def trained(*arguments, **settings):
    run = run_of(*arguments, **settings)
    run.event_log = []
    run.subscribe(run.event_log.append)
    await run.train_model()
    assert run.ledger.is_exact(run.master_epochs)
    return run


def events_of(run, kind):
    return [event for event in run.events if isinstance(event, kind)]


def bits(run):
    state = run.run_context.progress.state["outer"]
    optimizers = [array for state in run.optimizers for array in state or ()]
    return [(a.dtype, a.shape, a.tobytes()) for a in [*run.model.get_weights(), *state, *optimizers]]


KNOWN = {}


async def star_bits(**settings):
    """Return the bits of a run of the star with these settings, which is trained once."""
    key = repr(sorted(settings.items()))
    if key not in KNOWN:
        KNOWN[key] = bits(await trained("star", **settings))
    return KNOWN[key]


def lose_at(worker, verb, number, copies=False):
    """Lose a worker when it receives a verb for the n-th time, from the master or from another worker."""
    end = worker.replica.exchange.copies if copies else worker.replica.exchange
    count, usual = itertools.count(1), getattr(end, verb)

    @functools.wraps(usual)
    async def lost(*arguments):
        if next(count) == number:
            worker.lost = worker.was_lost = True
            raise WorkerLost("it was lost", worker=worker.name)
        return await usual(*arguments)

    setattr(end, verb, lost)


def when_opened(run, number, do):
    """Call ``do`` with a worker when it has opened the app for the first time."""
    worker = run.cluster.workers[number - 1]

    def opened(app):
        FakeWorker.open(worker, app)
        del worker.open
        do(worker)

    worker.open = opened


# --- the bits of the star ---------------------------------------------------------------------------------------------


SETTINGS = [
    {"slots": 8},
    {"merge": "median", "outer": "fedadam", "slots": 8},
    {"merge": "trimmed:0.3", "outer": "fedavgm", "codec": "bfloat16", "slots": 8},
    {"outer": "fedyogi", "codec": "float16", "slots": 10},
    {"outer": "nesterov", "codec": "int8", "optimizer_state": "stays", "slots": 5},
    {"merge": "krum:bad=1", "outer": "nesterov", "slots": 5},
    {"merge": "krum:bad=1,keep=3", "slots": 6},
    {"merge": "geometric", "outer": "fedadam", "codec": "topk:0.3", "slots": 8},
    {"merge": "clipped:0.9", "slots": 5},
    {"update_policy": "clip", "merge": "geometric", "slots": 4},
    {"batchnorm": "local", "norms": ("norm/variance", "dense/bias"), "slots": 5},
    {"batchnorm": "recalibrated", "norms": ("norm/variance", "dense/bias"), "merge": "geometric", "slots": 5},
    {"batchnorm": "recalibrated", "norms": ("norm/variance",), "weights_codec": "bfloat16", "outer": "nesterov"},
    {"codec": "int4-block:7", "slots": 5},
    {"codec": "topk:0.1", "slots": 5},
    {"codec": "powersgd", "slots": 5},
    {"weights_codec": "bfloat16", "outer": "fedadam", "codec": "int8", "merge": "geometric", "slots": 5},
    {"outer": "fedadagrad", "balance": "speed", "worker_steps": 2, "local_rule": "fedprox:0.1", "slots": 4},
    {"weights_codec": "float16", "outer": "nesterov", "codec": "int8", "merge": "geometric", "worker_steps": 2},
    {"weights_codec": "float16", "outer": "fedadam", "batchnorm": "recalibrated", "norms": ("norm/variance",)},
    {"optimizer_state": "averaged", "outer": "nesterov", "slots": 5},
    {"optimizer_state": "averaged", "codec": "topk:0.3", "worker_steps": 5, "slots": 8},
    {"local_rule": "scaffold", "optimizer_state": "averaged", "weights_codec": "bfloat16", "outer": "nesterov"},
    {"local_rule": "scaffold", "codec": "int8", "worker_steps": 5, "slots": 8, "balance": "speed"},
    {"local_rule": "scaffold", "optimizer_state": "fresh", "batchnorm": "recalibrated", "norms": ("norm/variance",)},
    {"outer": "streaming:fragments=2,alpha=0.25", "codec": "int8", "slots": 5},
    {"outer": "streaming:3", "merge": "geometric", "update_policy": "reject", "local_rule": "scaffold", "slots": 5},
    {"outer": "streaming:2", "optimizer_state": "averaged", "worker_steps": 5, "slots": 8},
    {"outer": "streaming:2", "batchnorm": "recalibrated", "norms": ("norm/variance",), "merge": "median"},
]
NUMBERS = (3, 1, 8, 2, 3, 8)
"""Numbers of workers. Each setting is trained with two of them, in turn."""
PAIRS = [
    pytest.param(settings, NUMBERS[(i + k) % 6], marks=[pytest.mark.slow] * k)
    for i, settings in enumerate(SETTINGS)
    for k in (0, 1)
]


@pytest.mark.parametrize(("settings", "workers"), PAIRS, ids=str)
async def test_sharded_run_has_the_bits_of_the_star(settings, workers):
    assert bits(await trained(workers=workers, **settings)) == bits(await trained("star", workers=workers, **settings))


@pytest.mark.parametrize("bad", [30.0, -1.0, 0.0])
@pytest.mark.parametrize(
    "settings",
    [
        {"update_policy": "reject"},
        {"update_policy": "clip", "merge": "clipped"},
        {"update_policy": "reject", "local_rule": "scaffold", "optimizer_state": "averaged"},
    ],
    ids=str,
)
async def test_suspicious_updates_are_rejected_or_scaled_like_in_the_star(settings, bad):
    """The update of one slot is wrong on every worker, and all other updates agree."""

    async def come_to(exchange):
        run = run_of(exchange, workers=3, slots=5, **settings)
        for worker in run.cluster.workers:

            def fit(task, weights, momentum, trainer=worker):
                update, momentum = FakeWorker.fit(trainer, task, weights, momentum)
                factor = bad if task.slot == 2 else 1
                return [
                    u + np.asarray(factor, u.dtype) if u.dtype.kind == "f" and factor else u * 0 for u in update
                ], momentum

            worker.fit = fit
        received = []
        run.subscribe(received.append)
        await run.train_model()
        verdicts = [(verdict.rpartition(" (")[0]) for record in run.history for verdict in record.verdicts]
        clipped = [event.factor for event in received if isinstance(event, UpdateClipped)]
        return bits(run), sorted(set(verdicts)), sorted(clipped)

    star = await come_to("star")
    assert await come_to("sharded") == star
    assert star[1]


async def test_worker_lost_while_updates_are_compared_changes_no_bit():
    for verb, number in itertools.product(("lengths", "compare", "update"), (1, 2)):
        settings = {"merge": "krum:bad=1,keep=2", "update_policy": "reject", "slots": 6}
        run = run_of(workers=4, **settings)
        when_opened(run, 2, lambda worker, verb=verb, number=number: lose_at(worker, verb, number))
        await run.train_model()
        assert sum(record.recomputed for record in run.history) >= 1
        assert bits(run) == bits(await trained("star", **settings))


@pytest.mark.parametrize(
    "start", [{"w": np.asarray(0.5, "f4")}, {"w": np.ones(3, "f4"), "b": np.zeros(0, "f4")}], ids=["1", "3"]
)
@pytest.mark.parametrize("workers", [1, 2, 8])
async def test_a_model_with_fewer_values_than_workers_has_the_bits_of_the_star(start, workers):
    settings = {"start": start, "frozen": frozenset(), "workers": workers, "slots": 8, "outer": "nesterov"}
    assert bits(await trained(**settings)) == bits(await trained("star", **settings))


@pytest.mark.parametrize("state", ["kept", "averaged"])
async def test_added_slots_begin_with_the_means_of_the_star(state):
    """A new slot gets the mean of all earlier optimizers. The mean of the controls then counts one slot more."""

    async def come_to(exchange):
        run = run_of(exchange, slots=None, local_rule="scaffold", optimizer_state=state, master_epochs=4, workers=2)
        late = FakeCluster(3).workers[2]
        late.others = {worker.id: worker for worker in [*run.cluster.workers, late]}
        for worker in run.cluster.workers:
            worker.others[late.id] = late
        run.on_round = lambda record: run.cluster.workers.append(late) if record.round == 1 else None
        await run.train_model()
        assert [record.slots for record in run.history] == [2, 2, 3, 3]
        return bits(run)

    assert await come_to("sharded") == await come_to("star")


async def test_controls_of_idle_slots_count(tmp_path):
    """The run continues within an epoch, and the last round of the epoch has too few samples for all slots."""
    settings = {"local_rule": "scaffold", "samples": 19, "worker_steps": 1, "batch_size": 3, "slots": 5, "workers": 3}
    star = await trained("star", **settings, checkpoint=tmp_path, checkpoint_keep=99)
    rounds = [record.samples for record in star.history]
    assert rounds[:3] == [15, 4, 15], "in round 2, one of the five slots has no samples"
    for number in (1, 2, 3):
        resume_options = {"resume": tmp_path / f"round-{number:06d}", "checkpoint": tmp_path / f"from {number}"}
        assert bits(await trained("sharded", **settings, **resume_options)) == bits(star)


@pytest.mark.parametrize("settings", LATELY.values(), ids=LATELY)
async def test_shared_state_of_slots_does_not_pass_the_master_in_a_round(settings, monkeypatch):
    monkeypatch.setattr("ddlf.training.slot.parts.keeps_little", lambda optimizer: False)
    start = {**START, "dense/kernel": CHANCE.normal(size=(400, 300)).astype("f4")}
    size, passed = start["dense/kernel"].nbytes, [0]
    run = run_of(**{**settings, "worker_steps": None, "master_epochs": 4, "start": start})

    async def rpc(worker, request, timeout_s=None, rpc=FakeWorker.rpc):
        answer = await rpc(worker, request, timeout_s)
        passed[-1] += len(b"".join(map(bytes, dumps([request.args[2:], answer]))))
        return answer

    def begun(record):
        if record.round < 4:
            passed.append(0)

    monkeypatch.setattr(FakeWorker, "rpc", rpc)
    run.on_round = begun
    await run.train_model()
    assert max(passed[1:-1]) < 64_000 < size < min(passed[0], passed[-1]), (
        "only the first and the last round send the model"
    )


async def test_statistics_are_recalibrated_if_auto_chooses_the_star():
    """Its replicas are those of the sharded exchange."""
    run = await trained("auto", **LATELY["recalibrated"])
    (chosen,) = [event for event in run.event_log if isinstance(event, ExchangeChosen)]
    assert chosen.exchange == "star"
    assert bits(run) == await star_bits(**LATELY["recalibrated"])


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
async def test_tensors_that_are_frozen_do_not_travel_between_workers(codec, monkeypatch):
    """Their updates are zero, and all workers have their values, so neither travels."""

    async def bytes_passed(frozen):
        passed = []

        async def ask(worker, peer, role, verb, *arguments):
            answer = await usual_ask(worker, peer, role, verb, *arguments)
            if peer != worker.id and verb in ("update", "values"):
                passed.append(sum(len(part) for part in dumps(answer)))
            return answer

        def fit(worker, *arguments):
            update, momentum = usual_fit(worker, *arguments)
            return [np.zeros_like(update[0]), *update[1:]] if frozen else update, momentum

        with monkeypatch.context() as patch:
            patch.setattr(FakeWorker, "_ask", ask)
            patch.setattr(FakeWorker, "fit", fit)
            runs = [await trained(exchange, weights_codec=codec, outer="nesterov") for exchange in ("sharded", "star")]
        assert bits(runs[0]) == bits(runs[1])
        assert (runs[0].model.get_weights()[0].tobytes() == START["dense/kernel"].tobytes()) == frozen
        return sum(passed)

    usual_ask, usual_fit = FakeWorker._ask, FakeWorker.fit
    assert await bytes_passed(True) < 0.3 * await bytes_passed(False)


async def test_many_pieces_give_the_same_bits(monkeypatch):
    monkeypatch.setattr("ddlf.training.exchanges.sharded.worker.PIECE", 100)
    monkeypatch.setattr("ddlf.training.exchanges.sharded.master.PIECE", 100)
    monkeypatch.setattr("ddlf.training.exchanges.sharded.updates.PIECE", 100)
    monkeypatch.setattr("ddlf.training.exchanges.sharded.pairs.BLOCK", 70)
    monkeypatch.setattr("ddlf.algorithms.pairwise.BLOCK", 70)
    settings = {"outer": "nesterov", "merge": "geometric", "codec": "int8-block:9"}
    assert bits(await trained(**settings)) == bits(await trained("star", **settings))
    settings["weights_codec"] = "bfloat16"
    assert bits(await trained(**settings)) == bits(await trained("star", **settings))
    for settings in LATELY.values():
        assert bits(await trained(**settings)) == bits(await trained("star", **settings))


@pytest.mark.parametrize(
    "settings",
    [{"outer": "nesterov"}, {"outer": "nesterov", "weights_codec": "bfloat16"}, *LATELY.values()],
    ids=["float32", "bfloat16", *LATELY],
)
@pytest.mark.parametrize(
    ("before", "after"),
    [("sharded", "star"), ("star", "sharded"), pytest.param("sharded", "sharded", marks=pytest.mark.slow)],
)
async def test_a_run_continues_with_the_other_exchange_and_the_same_bits(before, after, settings, tmp_path):
    uninterrupted = await star_bits(**settings)
    await trained(before, **settings, checkpoint=tmp_path, checkpoint_keep=99)
    for number in (1, 2) if after == before else (2,):
        resume_options = {"resume": tmp_path / f"round-{number:06d}", "checkpoint": tmp_path / f"from {number}"}
        assert bits(await trained(after, **settings, **resume_options)) == uninterrupted


async def test_two_trainings_in_a_row_have_the_same_bits():
    runs = [run_of(exchange, outer="nesterov", master_epochs=2) for exchange in ("star", "sharded")]
    for run in runs:
        await run.train_model()
        await run.train_model()
    assert bits(runs[1]) == bits(runs[0])


async def test_each_worker_reports_the_slice_and_version_that_it_keeps():
    run = await trained(workers=3)
    shards = [worker.replica.exchange.shard for worker in run.cluster.workers]
    size = sum(array.size for array in START.values())
    assert [begin for begin, *_ in shards] == [0, *(end for _, end, *_ in shards[:-1])]
    assert [shard[2:] for shard in shards] == [(size, ROUNDS)] * 3
    assert shards[-1][1] == size


async def test_encoded_weights_travel_and_exact_ones_are_evaluated():
    """Each value of a large trained tensor travels as two bytes. A worker evaluates the exact weights of the run."""
    run = run_of(weights_codec="bfloat16", outer="nesterov", workers=3)
    sizes, pairs = [], []
    for worker in run.cluster.workers:

        async def ask(peer, role, verb, *arguments, asker=worker):
            answer = await FakeWorker._ask(asker, peer, role, verb, *arguments)
            if verb == "values" and arguments[2] <= START["dense/kernel"].size:
                sizes.append(loads(dumps(answer))["payloads"][0]["values"].nbytes / (arguments[2] - arguments[1]))
            return answer

        worker._ask = ask

    async def read_weights(record):
        weights = run.run_context.progress.weights
        if isinstance(weights, WeightsRef):
            source = weights.evaluate.args[1]
            end = run.cluster.workers[0].replica.exchange
            pairs.append((await end.exact(source["generation"], source["exact"]), await weights.fetch()))

    run.on_round = read_weights
    await run.train_model()
    assert len(sizes) > ROUNDS
    assert set(sizes) == {2.0}
    for number, pair in enumerate(pairs, 1):
        star = await trained("star", weights_codec="bfloat16", outer="nesterov", master_epochs=number)
        for weights in pair:
            assert [w.tobytes() for w in weights] == [w.tobytes() for w in star.model.get_weights()]
    assert len(pairs) == ROUNDS - 1


# --- what goes through the master ---------------------------------------------------------------------------------------


async def test_master_sends_weights_twice_and_reads_slices_once():
    run = await trained(outer="nesterov", workers=3)
    verbs = [[request[0] for request in worker.asked] for worker in run.cluster.workers]
    rounds = ["train", "merge"] * ROUNDS
    assert verbs == [[*["hold"] * (number < 2), *rounds, "values", "kept"] for number in range(3)]


async def test_master_has_weights_of_rounds_with_a_checkpoint(tmp_path):
    run = run_of(checkpoint=tmp_path, checkpoint_every=2, checkpoint_keep=9, master_epochs=5)
    await run.train_model()
    star = run_of("star", checkpoint=tmp_path / "star", checkpoint_every=2, checkpoint_keep=9, master_epochs=5)
    await star.train_model()
    assert [path.name for path in sorted(tmp_path.glob("round-*"))] == ["round-000002", "round-000004", "round-000005"]
    for path in tmp_path.glob("round-*"):
        checkpoint, star_checkpoint = (
            CheckpointFolder(folder).load(path.name) for folder in (tmp_path, tmp_path / "star")
        )
        assert [(name, array.tobytes()) for name, array in checkpoint.arrays["weights"].items()] == [
            (name, array.tobytes()) for name, array in star_checkpoint.arrays["weights"].items()
        ]
    assert [request[0] for request in run.cluster.workers[0].asked].count("values") == 1  # at the end of the run
    assert [request[0] for request in run.cluster.workers[0].asked].count("write") == 2


async def test_a_hook_that_reads_the_model_between_checkpoints_gets_an_error_with_a_hint():
    run = run_of()
    run.on_round = lambda record: run.model.get_weights()
    with pytest.raises(ConfigError, match=r"the weights of this round are on the workers.*checkpoint_every"):
        await run.train_model()
    assert run.run_context.progress.round == 1
    assert [w.tobytes() for w in run.model.get_weights()] == [
        w.tobytes() for w in (await trained("star", master_epochs=1)).model.get_weights()
    ]


async def test_a_hook_may_read_the_model_in_rounds_with_a_checkpoint(tmp_path):
    kernels = []
    run = run_of(checkpoint=tmp_path)
    run.on_round = lambda record: kernels.append(run.model.get_weights()[0].tobytes())
    await run.train_model()
    assert len(set(kernels)) == ROUNDS


async def test_a_run_that_the_app_stops_ends_with_its_current_weights():
    run = run_of()
    run.is_convergent = lambda record: record.round == 2
    await run.train_model()
    star = await trained("star", master_epochs=2)
    assert bits(run) == bits(star)


async def test_workers_continue_with_weights_that_a_callback_set(monkeypatch):
    monkeypatch.setattr("ddlf.training.start.Callbacks", Doubles)
    runs = [
        await trained(exchange, outer="nesterov", callbacks=[1], master_epochs=4) for exchange in ("star", "sharded")
    ]
    assert bits(runs[1]) == bits(runs[0])
    assert bits(runs[1]) != bits(await trained("star", outer="nesterov", master_epochs=4))
    assert runs[1].weights_were_remote == [False] * 4


async def test_callbacks_of_metrics_bring_no_weights_to_the_master(monkeypatch):
    monkeypatch.setattr("ddlf.training.start.Callbacks", Doubles)
    monkeypatch.setattr(Doubles, "need_weights", False)
    run = await trained(callbacks=[1], workers=3)
    assert run.weights_were_remote == [True, True, False]
    assert ["values" in [request[0] for request in worker.asked[:-2]] for worker in run.cluster.workers] == [False] * 3


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["update", "values", "kept", "merge"])
@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize(
    "settings",
    [{"outer": "fedadam"}, {"weights_codec": "bfloat16", "batchnorm": "recalibrated", "norms": ("norm/variance",)}],
    ids=["state", "codec"],
)
async def test_worker_lost_in_the_exchange_of_slices_changes_no_bit(verb, number, settings):
    """No checkpoint is needed: other workers have the weights, and copies of its slice of the state and of exact weights."""
    run = run_of(workers=4, **settings)
    when_opened(run, 2, lambda worker: lose_at(worker, verb, number))
    await run.train_model()
    assert bits(run) == await star_bits(**settings)


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        *(("float16", "peaks"), ("float16", "values"), ("averaged", "mean"), ("averaged", "left")),
        *(("scaffold", "mean"), ("scaffold", "left"), ("both means", "mean"), ("both means", "merge")),
        *(("streaming", "update"), ("streaming", "kept"), ("recalibrated", "update"), ("recalibrated", "merge")),
    ],
)
@pytest.mark.parametrize("number", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 5))])
async def test_worker_lost_while_shared_states_are_made_changes_no_bit(name, verb, number):
    run = run_of(workers=4, **LATELY[name])
    when_opened(run, 2, lambda worker: lose_at(worker, verb, number, copies=verb == "left"))
    await run.train_model()
    assert not events_of(run, ResidualDropped)
    assert vars(run.cluster.workers[1]).get("was_lost") or number > 3
    assert bits(run) == await star_bits(**LATELY[name])


@pytest.mark.parametrize(
    ("verb", "settings"),
    [("train", {"outer": "nesterov"}), ("measure", LATELY["recalibrated"])],
    ids=["update", "statistics"],
)
async def test_worker_that_returns_in_the_round_of_its_loss_has_no_earlier_update(verb, settings, monkeypatch):
    """Two workers carry six slots. One of them is lost with its second slot, returns, and carries another slot."""
    settings = {**settings, "slots": 6, "workers": 2}
    run, back, count = run_of(**settings), asyncio.Event(), itertools.count(1)
    run.subscribe(lambda event: back.set() if isinstance(event, WorkerReturned) else None)

    async def rpc(worker, request, timeout_s=None, usual=FakeWorker.rpc):
        second = run.cluster.workers[1]
        if request.args[2] == verb and worker is second and next(count) == 2:
            second.lost = True
        elif request.args[2] == verb and second.lost:
            await back.wait()
        return await usual(worker, request, timeout_s)

    monkeypatch.setattr(FakeWorker, "rpc", rpc)
    await run.train_model()
    assert back.is_set()
    monkeypatch.undo()
    assert bits(run) == bits(await trained("star", **settings))


async def test_loss_of_the_first_holders_of_weights_changes_no_bit():
    run = run_of(workers=4, slots=4, outer="fedadam")
    for number in (1, 2):
        when_opened(run, number, lambda worker: lose_at(worker, "update", 1))
    await run.train_model()
    assert all(worker.was_lost for worker in run.cluster.workers[:2])
    assert bits(run) == bits(await trained("star", workers=4, slots=4, outer="fedadam"))


async def test_twenty_losses_at_random_moments_change_no_bit():
    """Two workers have the outer state of each slice. After a loss, two workers have it again at the end of the round."""
    chance, rounds = np.random.default_rng(1), 21
    run = run_of(outer="fedadam", workers=4, slots=4, master_epochs=rounds, learning_rate=0.01)
    lost, wait = [], 3
    for worker in run.cluster.workers:

        async def rpc(request, timeout_s=None, worker=worker):
            nonlocal wait
            wait -= 1
            reached = 0 if run.run_context.progress is None else run.run_context.progress.round + 1
            if wait <= 0 and reached > len(lost):
                lost.append(chance.integers(4))
                run.cluster.workers[lost[-1]].lost = True
                wait = chance.integers(1, 10)
            return await FakeWorker.rpc(worker, request, timeout_s)

        worker.rpc = rpc
    await run.train_model()
    assert len(lost) >= 20
    star = await trained("star", outer="fedadam", workers=4, slots=4, master_epochs=rounds, learning_rate=0.01)
    assert bits(run) == bits(star)


async def test_a_returning_worker_gets_the_weights_from_other_workers():
    run = run_of(outer="nesterov", workers=3, master_epochs=5)
    when_opened(run, 3, lambda worker: lose_at(worker, "merge", 2))
    await run.train_model()
    assert "hold" not in [request[0] for request in run.cluster.workers[2].asked]
    assert sum(record.recomputed for record in run.history) == 1
    assert bits(run) == bits(await trained("star", outer="nesterov", master_epochs=5))


def cut_links(run, *pairs, after=0):
    """Cut the links between pairs of workers after ``after`` calls."""
    calls = itertools.count()

    def of(worker):
        async def call(peer, *arguments):
            if {worker.id, peer} in pairs and next(calls) >= after:
                raise WorkerLost("no answer", worker=f"worker {peer}")
            return await FakeWorker._ask(worker, peer, *arguments)

        return call

    for worker in run.cluster.workers:
        worker._ask = of(worker)
    received = []
    run.subscribe(received.append)
    return received


@pytest.mark.parametrize("after", [0, 3, 10])
async def test_worker_with_a_failed_link_is_excluded_without_changing_a_bit(after):
    run = run_of(outer="nesterov")
    received = cut_links(run, {2, 3}, after=after)
    await run.train_model()
    (exclusion,) = [event for event in received if isinstance(event, WorkerGone)]
    assert exclusion.worker == 3
    assert "cannot reach worker" in exclusion.why
    assert "worker 3 is left out" in exclusion.why
    assert run.ledger.is_exact(ROUNDS)
    assert bits(run) == bits(await trained("star", outer="nesterov"))


@pytest.mark.parametrize("workers", [2, 3, 8])
async def test_worker_that_reaches_no_other_is_excluded_without_changing_a_bit(workers):
    run = run_of(outer="nesterov", workers=workers, slots=workers)
    received = cut_links(run, *({workers, peer} for peer in range(1, workers)), after=5)
    await run.train_model()
    (exclusion,) = [event for event in received if isinstance(event, WorkerGone)]
    assert exclusion.worker == workers
    assert f"worker {workers} is left out" in exclusion.why
    assert bits(run) == bits(await trained("star", outer="nesterov", workers=workers, slots=workers))


async def test_run_ends_with_its_last_checkpoint_when_all_workers_are_lost(tmp_path):
    run = run_of(outer="nesterov", workers=2, checkpoint=tmp_path, checkpoint_every=2, master_epochs=6, slots=2)

    def lose_all(record):
        if record.round == 3:
            for worker in run.cluster.workers:
                worker.lost = True

    run.on_round = lose_all
    received = []
    run.subscribe(received.append)
    with pytest.raises(ClusterTooSmall, match=r"weights after round 3 were on workers that are lost.*last checkpoint"):
        await run.train_model()
    assert run.run_context.progress.round == 2
    assert len(run.history) == 2
    assert "the run returns to round 2" in [event.why for event in received if isinstance(event, Warned)][-1]
    star = await trained("star", outer="nesterov", workers=2, slots=2, master_epochs=2)
    assert bits(run) == bits(star)
    run.on_round = lambda record: None
    run.resume, run.master_epochs = "auto", 6
    await run.train_model()
    assert bits(run) == bits(await trained("star", outer="nesterov", workers=2, slots=2, master_epochs=6))


async def test_run_with_a_checkpoint_of_each_round_survives_the_loss_of_all_workers(tmp_path):
    run = run_of(outer="nesterov", workers=2, checkpoint=tmp_path, slots=2, master_epochs=4)

    def lose_all(record):
        if record.round == 2:
            for worker in run.cluster.workers:
                worker.lost = True

    run.on_round = lose_all
    await run.train_model()
    assert bits(run) == bits(await trained("star", outer="nesterov", workers=2, slots=2, master_epochs=4))


async def test_loss_of_the_only_worker_with_merged_weights_before_they_are_recalibrated_ends_the_run_clearly(tmp_path):
    """The worker returns without them. No other worker fails because of this."""
    run = run_of(slots=1, checkpoint=tmp_path, **LATELY["recalibrated"])
    worker, count = run.cluster.workers[0], itertools.count(1)

    async def rpc(request, timeout_s=None):
        if request.args[2] == "measure" and next(count) == 2:
            worker.lost = True
        return await FakeWorker.rpc(worker, request, timeout_s)

    worker.rpc = rpc
    received = []
    run.subscribe(received.append)
    with pytest.raises(ClusterTooSmall, match=r"were on workers that are lost.*last checkpoint"):
        await run.train_model()
    assert [event.worker for event in received if isinstance(event, WorkerLostEvent)] == [1]
    assert not [event for event in received if isinstance(event, WorkerGone)]


async def test_run_continues_from_a_checkpoint_that_lacks_the_state_of_a_slot(tmp_path, monkeypatch):
    """The state was lost before it was written, so the numbers of the slices have a gap. The other slots keep their states."""
    settings = {"codec": "int8", "workers": 2, "master_epochs": 3}

    async def write_one(slices, number, *arguments, usual=Slices.write_one):
        return {} if number == 3 else await usual(slices, number, *arguments)

    monkeypatch.setattr(Slices, "write_one", write_one)
    await trained(**settings, checkpoint=tmp_path)
    resumed = await trained(**settings, resume=tmp_path / "round-000002", checkpoint=tmp_path / "resumed")
    assert len(resumed.history) == 3
    requests = [request for worker in resumed.cluster.workers for request in worker.asked]
    assert {request[1] for request in requests if request[0] == "read_slice"} >= {2, 4}, (
        "slices of the first and third slot"
    )


# --- bad input --------------------------------------------------------------------------------------------------------


async def test_an_update_with_nan_ends_the_run_with_the_error_of_the_star():
    async def error_of(exchange):
        run = run_of(exchange)
        worker = run.cluster.workers[1]

        def fit(task, weights, momentum):
            update, momentum = FakeWorker.fit(worker, task, weights, momentum)
            if task.round == 1:
                update[0][3, :2] = np.nan
            return update, momentum

        worker.fit = fit
        with pytest.raises(BadUpdate) as caught:
            await run.train_model()
        assert run.run_context.progress.round == 1
        return str(caught.value), caught.value.tensor, caught.value.count, bits(run)

    assert await error_of("sharded") == await error_of("star")


@pytest.mark.parametrize("wrong", ["short", "type", "nan", "nothing"])
async def test_slice_that_does_not_fit_is_refused_with_its_worker(wrong):
    run = run_of()

    def spoil(worker):
        update = worker.replica.exchange.update

        @functools.wraps(update)
        async def spoilt(*arguments):
            answer = await update(*arguments)
            (raw,) = answer["payloads"][0].values()
            changed = {"short": raw[:-1], "type": raw.astype("f8"), "nan": raw * np.float32(np.nan), "nothing": None}
            return {**answer, "payloads": [{"raw": changed[wrong]}, *answer["payloads"][1:]]}

        worker.replica.exchange.update = spoilt

    when_opened(run, 1, spoil)
    error, text = (
        (BadUpdate, "NaN or infinite")
        if wrong == "nan"
        else (ConnectError, "from worker 1: it sent an update that does not")
    )
    with pytest.raises(error, match=text):
        await run.train_model()
    assert np.array_equal(run.model.get_weights()[0], START["dense/kernel"])


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"outer": type("Mine", (Nesterov,), {})()}, "outer=.* is not a rule of DDLF, and workers find the rule by"),
        (
            {"weights_codec": "delta:int8"},
            "weights_codec='delta:int8' encodes the difference to the weights of each slot",
        ),
        ({"weights_codec": "delta:bfloat16"}, "weights_codec='delta:bfloat16' encodes the difference"),
        ({"mode": "async"}, "exchange='sharded' is for synchronous training"),
    ],
)
async def test_settings_that_need_whole_updates_in_one_place_are_refused_by_name(settings, text):
    run = run_of(**settings)
    with pytest.raises(ConfigError, match=text):
        await run.train_model()
    assert run.cluster.workers[0].asked == []


async def test_a_model_without_weights_is_refused():
    with pytest.raises(ConfigError, match=r"gives each worker a slice of the weights, and this model has none.*star"):
        await run_of(start={"nothing": START["nothing"]}, frozen=frozenset()).train_model()


# --- auto -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "workers", "exchange", "reason"),
    [
        (
            {"start": {"large": np.zeros((3000, 1000), "f4")}},
            3,
            "sharded",
            "for 3 workers and 12 MB of weights the exchange of a round",
        ),
        ({}, 3, "star", " MB of weights the exchange of a round takes about 0.000"),
        ({"start": {"large": np.zeros((3000, 1000), "f4")}}, 1, "star", "for 1 worker and 12 MB"),
        (
            {"start": {"large": np.zeros((3000, 1000), "f4")}, "weights_codec": "delta:int8"},
            *(3, "star", "weights_codec='delta:int8'"),
        ),
    ],
)
async def test_auto_takes_the_faster_exchange_and_gives_the_reason(settings, workers, exchange, reason):
    settings = {"frozen": frozenset(), "slots": 2, "master_epochs": 1, **settings} if settings else {}
    run = await trained("auto", workers=workers, **settings)
    (chosen,) = [event for event in run.event_log if isinstance(event, ExchangeChosen)]
    assert chosen.exchange == exchange
    assert reason in chosen.why
    assert bits(run) == bits(await trained("star", workers=workers, **settings))


@pytest.mark.parametrize("workers", [2, 3])
async def test_auto_takes_the_star_if_two_workers_cannot_reach_each_other(workers):
    settings = {"start": {"large": np.zeros((3000, 1000), "f4")}, "frozen": frozenset(), "slots": 2, "master_epochs": 1}
    run = run_of("auto", workers=workers, **settings)
    run.event_log = []
    run.subscribe(run.event_log.append)
    first, second = run.cluster.workers[:2]

    async def introduced(workers, name):
        return [(first, second, "no route")]

    run.cluster.introduced = introduced
    await run.train_model()
    (chosen,) = [event for event in run.event_log if isinstance(event, ExchangeChosen)]
    assert chosen.exchange == "star"
    assert chosen.why == "worker 1 cannot reach worker 2: no route"
    assert run.ledger.is_exact(1)


async def test_auto_reports_no_choice_for_a_refused_run():
    run = run_of("auto", local_rule="scaffold")
    run.event_log = []
    run.subscribe(run.event_log.append)
    with (
        mock.patch.object(FakeRun, "compiled_with", "Adam"),
        pytest.raises(ConfigError, match="local_rule='scaffold' needs plain SGD"),
    ):
        await run.train_model()
    assert not [event for event in run.event_log if isinstance(event, ExchangeChosen)]


async def test_a_resumed_run_of_auto_chooses_its_exchange_again(tmp_path):
    await trained("star", master_epochs=1, checkpoint=tmp_path)
    run = await trained("auto", checkpoint=tmp_path, resume="auto")
    assert bits(run) == bits(await trained("star"))


# --- states of slots ----------------------------------------------------------------------------------------------------


@pytest.fixture
def keeps_much(monkeypatch):
    """Treat the optimizer as one with a state as large as the weights, as it has in these runs."""
    monkeypatch.setattr(FakeRun, "compiled_with", "Adam")


@pytest.mark.parametrize(
    "optimizer", [{"optimizer": "Adam"}, {"optimizer": "SGD", "optimizer momentum": 0.9}, {"optimizer": "Own"}]
)
def test_optimizers_with_a_state_as_large_as_the_weights_are_known(optimizer):
    assert not keeps_little(optimizer)
    assert keeps_little({"optimizer": "SGD", "optimizer momentum": 0.0, "optimizer use_ema": False})


@pytest.mark.usefixtures("keeps_much")
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
async def test_optimizer_states_stay_on_workers_until_the_end(workers):
    run = run_of(workers=workers, slots=5, codec="topk:0.2")
    brought = []
    for worker in run.cluster.workers:

        def train(task, trainer=worker):
            reply = FakeWorker.train(trainer, task)
            brought.append((task.round, sorted(task.state or ()), sorted(reply.state)))
            return reply

        worker.train = train
    await run.train_model()
    assert all(not received and not returned for number, received, returned in brought if number)
    star = await trained("star", workers=workers, slots=5, codec="topk:0.2")
    assert bits(run) == bits(star)
    assert all(run.optimizers)


@pytest.mark.usefixtures("keeps_much")
@pytest.mark.parametrize("verb", ["train", "update", "left", "merge"])
async def test_lost_worker_costs_no_slot_state_without_a_checkpoint(verb):
    """The next worker of the slot gets the state from a worker that has a copy."""
    settings = {"slots": 4, "codec": "int8", "master_epochs": 4}
    run = run_of(workers=4, **settings)
    received = []
    run.subscribe(received.append)

    def lose(worker):
        count, train = itertools.count(1), worker.train

        def lost(task):
            if next(count) == 3:
                worker.lost = True
                raise WorkerLost("it was lost", worker=worker.name)
            return train(task)

        if verb == "train":
            worker.train = lost
        else:
            lose_at(worker, verb, 3, copies=verb == "left")

    when_opened(run, 2, lose)
    await run.train_model()
    assert sum(record.recomputed for record in run.history) >= 1
    assert not [event for event in received if isinstance(event, ResidualDropped)]
    assert bits(run) == bits(await trained("star", **settings))


@pytest.mark.usefixtures("keeps_much")
async def test_checkpoint_has_slot_states_of_a_worker_lost_in_the_meantime(tmp_path):
    settings = {"slots": 3, "master_epochs": 3, "outer": "nesterov"}
    run = run_of(workers=3, **settings)

    def lose(worker):
        async def lost(request, timeout_s=None):
            if request.args[2] == "give":
                worker.lost = True
            return await FakeWorker.rpc(worker, request, timeout_s)

        worker.rpc = lost

    when_opened(run, 1, lose)
    await run.train_model()
    assert bits(run) == bits(await trained("star", **settings))
    star = await trained("star", checkpoint=tmp_path, master_epochs=1, slots=3, outer="nesterov")
    assert star.history
    assert bits(await trained(resume="auto", checkpoint=tmp_path, **settings)) == bits(run)


async def test_a_copy_of_a_slot_state_has_its_types_and_bits():
    numbers = CHANCE.normal(size=(3, 2))
    state = [np.asarray(numbers, kind) for kind in (ml_dtypes.bfloat16, "f2", "f4")] + [None, np.asarray(7, "i8")]
    source = SlotCopies(mock.Mock(state_after=lambda slot, number: {"optimizer": state}), mock.Mock())

    async def ask(worker, verb, *arguments):
        return loads([bytearray(part) for part in dumps(await getattr(source, verb)(*arguments))])

    target = SlotCopies(mock.Mock(), ask)
    await target.keep(0, 1, 2, ["optimizer"])
    copied = target.state(0, 1)["optimizer"]
    assert [None if array is None else (array.dtype, array.shape, array.tobytes()) for array in copied] == [
        None if array is None else (array.dtype, array.shape, array.tobytes()) for array in state
    ]
