"""Tests of copies of Downpour's shards: each push counts once, whichever worker is lost at any time. No process, no Keras."""

import asyncio
import random

import numpy as np
import pytest

from ddlf.algorithms.flat_weights import Rows
from ddlf.errors import AppMissing, ClusterTooSmall, ConfigError, ConnectError
from ddlf.events import Warned
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.training.crew.crew import Crew
from ddlf.training.roles import SERVERS
from ddlf.training.strategies.downpour.server import Server, Servers
from ddlf.worker.calls import Hosting
from tests.patience import PATIENCE_S
from tests.training.server_states import state

pytestmark = pytest.mark.usefixtures("short_waits")
CHANCE = np.random.default_rng(1)
START = {
    "dense/kernel": CHANCE.normal(size=(30, 7)).astype("f4"),
    "dense/bias": CHANCE.normal(size=7).astype("f4"),
    "norm/variance": CHANCE.random(7, "f4"),
}
FROZEN = frozenset(["norm/variance"])
PLAIN = {"push_rule": "sgd:rate=0.01", "staleness": "constant"}
NONE = np.zeros(0, "f4")


def run_of(workers=3, **settings):
    settings = {"slots": workers, "start": START, "frozen": FROZEN, "master_epochs": 2, **settings}
    run = FakeRun(FakeCluster(workers), mode="downpour", **settings)
    for worker in run.cluster.workers:
        worker.gradient = lambda app, task, samples, weights: whole_numbers(samples, weights.size)
    run.event_log, run.dead = [], []
    run.subscribe(run.event_log.append)
    return run


def warned(run):
    return [event.why for event in run.event_log if isinstance(event, Warned) and event.about == "shards"]


WHOLE = {path: np.zeros_like(array) for path, array in START.items()}
EXACT = {"push_rule": "sgd:rate=1", "staleness": "constant", "start": WHOLE}
"""Settings in which weights are minus the sum of all gradients, without any rounding."""


def whole_numbers(samples, size):
    """Return a gradient of whole numbers. Its sum does not depend on how samples are cut into batches."""
    return np.float32((np.asarray(samples, np.int64) ** 2 % 97 + 1).sum()) * (1 + np.arange(size, dtype="f4") % 3)


def check_each_push_counts_once(run, pushes):
    """Compare the weights with the sum of all gradients, and each shard's count with the number of pushes."""
    weights = [np.ravel(w) for w, path in zip(run.model.get_weights(), START, strict=True) if path not in FROZEN]
    trained = np.concatenate(weights)
    assert trained.tolist() == (-run.master_epochs * whole_numbers(np.arange(run.samples), trained.size)).tolist()
    assert set(run.run_context.progress.state["shards"][0][:, 1].tolist()) == {pushes}
    assert run.ledger.is_exact(run.master_epochs)


def kill_workers(run, chance, kills, every):
    """Lose one worker after another, each between two random messages."""
    pending = [kills]
    count = [chance.randrange(5, every)]

    def maybe():
        count[0] -= 1
        lost = [worker for worker in run.cluster.workers if worker.lost]
        if count[0] <= 0 and pending[0] and not lost and run.calm():
            pending[0] -= 1
            count[0] = chance.randrange(5, every)
            worker = chance.choice(run.cluster.workers)
            run.dead.append(worker.end)
            worker.lost = True

    for worker in run.cluster.workers:

        async def ask(*arguments, worker=worker):
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
            maybe()
            answer = await FakeWorker._ask(worker, *arguments)
            maybe()
            return answer

        worker._ask = ask
    return pending


def have_copies(run):
    """Whether each shard has a copy, so that any worker may be lost."""
    ends = [worker.end for worker in run.cluster.workers if not worker.lost and worker.end not in run.dead]
    shards = {number: shard for end in ends for number, shard in end.shards.items() if not shard.closed}
    is_complete = len(ends) == run.cluster.N and all(end.owners.arranged == ends[0].owners.arranged for end in ends)
    is_complete = is_complete and len(shards) == len(ends[0].owners.owners)
    return is_complete and all(shard.holders and shard._with.issuperset(shard.holders) for shard in shards.values())


@pytest.mark.parametrize("seed", [1, 3, 5])
async def test_each_push_counts_once_if_workers_are_lost_between_messages(seed):
    chance = random.Random(seed)
    workers = chance.choice([2, 3, 4])
    settings = {
        "n_push": chance.choice([1, 2]),
        "n_fetch": chance.choice([1, 3]),
        "shards": chance.choice([None, 1, 6]),
    }
    run = run_of(workers, replicas=workers + chance.randrange(3), master_epochs=4, **settings, **EXACT)
    run.calm = lambda: have_copies(run)
    pending = kill_workers(run, chance, 4, 60)
    await run.train_model()
    assert pending[0] < 4
    undisturbed = run_of(workers, replicas=run.replicas, master_epochs=4, **settings, **EXACT)
    await undisturbed.train_model()
    check_each_push_counts_once(run, int(undisturbed.run_context.progress.state["shards"][0][0, 1]))
    assert not [message for message in warned(run) if "are lost" in message]


async def test_joining_worker_takes_a_shard_and_no_push_is_repeated():
    run = run_of(2, shards=4, master_epochs=6, **EXACT)
    second = run.cluster.workers.pop()
    joined = []

    def join(record):
        if record.version == 2:
            run.cluster.workers.append(second)
        joined.append(len(run.cluster.workers[0].end.shards))

    run.on_round = join
    await run.train_model()
    assert joined[0] == 4
    assert joined[-1] == 2
    assert [message for message in warned(run) if "which had fewer" in message]
    check_each_push_counts_once(run, int(run.run_context.progress.state["shards"][0][0, 1]))
    numbers = sorted(push[6] for record in run.history for push in record.pushes)
    assert numbers == list(range(len(numbers)))


async def test_excluded_worker_hands_its_shard_on_without_a_copy(monkeypatch):
    run, crews, ready = run_of(3, copies=0, master_epochs=6, **EXACT), [], Crew.ready

    async def caught(crew):
        crews.append(crew)
        await ready(crew)

    monkeypatch.setattr(Crew, "ready", caught)

    def out(record):
        if record.version == 3:
            crews[0].exclude(run.cluster.workers[1], ConnectError("it is left out"))

    run.on_round = out
    await run.train_model()
    assert any("went from worker 2, which takes no part any more" in message for message in warned(run))
    check_each_push_counts_once(run, int(run.run_context.progress.state["shards"][0][0, 1]))


@pytest.mark.parametrize(("copies", "both"), [(0, False), (1, True)], ids=["no copy", "with its copy"])
async def test_lost_shard_resumes_from_the_last_checkpoint(copies, both, tmp_path):
    run = run_of(4, copies=copies, checkpoint=tmp_path, checkpoint_every=4, master_epochs=5, **PLAIN)

    def lose(record):
        if record.version == 7:
            for worker in run.cluster.workers[1 : 2 + both]:
                worker.lost = True

    run.on_round = lose
    history = await run.train_model()
    assert run.ledger.is_exact(5)
    verdicts = [verdict for record in history for verdict in record.verdicts]
    assert any(
        "shard 2 of 4 was on worker 2" in verdict and "continues from update 4" in verdict for verdict in verdicts
    )
    assert any("which is lost" in message and "are lost" in message for message in warned(run))
    lost, received = (
        run.run_context.progress.state["shards"][0][:, 1],
        run.run_context.progress.state["shards"][0][0, 1],
    )
    assert lost[1] < received or not any(" 0 pushes" not in verdict for verdict in verdicts)


async def test_run_ends_when_a_shard_and_its_copy_are_lost():
    run = run_of(4, **PLAIN)

    def lose(record):
        if record.version == 3:
            run.cluster.workers[1].lost = run.cluster.workers[2].lost = True

    run.on_round = lose
    with pytest.raises(
        ClusterTooSmall, match=r"^shards? .* of 4 of the weights w.* lost.*; resume from the last checkpoint"
    ):
        await run.train_model()


async def test_one_worker_has_no_copies_and_refuses_them():
    with pytest.raises(ConfigError, match="copies=1 of each shard and the shard itself need 2 workers, and there is 1"):
        await run_of(1, copies=1).train_model()
    for copies in (0, None):
        run = run_of(1, copies=copies, master_epochs=1)
        await run.train_model()
        assert run.ledger.is_exact(1)


async def test_run_with_two_copies_survives_the_loss_of_two_neighbours():
    run = run_of(4, copies=2, master_epochs=5, **EXACT)

    def lose(record):
        if record.version == 7:
            run.cluster.workers[1].lost = run.cluster.workers[2].lost = True

    run.on_round = lose
    await run.train_model()
    check_each_push_counts_once(run, int(run.run_context.progress.state["shards"][0][0, 1]))
    assert run.run_context.progress.state["shards"][0][0, 1] == 5 * 4 * 4
    assert not any("are lost" in message for message in warned(run))


# --- a shard and its copies ------------------------------------------------------------------------------------------------


def start(**counters):
    return state(rule="adagrad", every=3, **counters)


async def test_copy_has_each_safe_push_and_continues_with_the_same_bits():
    ends, roles, rows = {}, {}, Rows.of([np.zeros(4, "f4")], [True])

    async def ask(worker, role, verb, *arguments):
        await roles[worker].call("run", role, verb, *arguments)

    for number in (1, 2):
        roles[number] = Hosting(None)
        ends[number] = Servers(number, "run", roles[number], ask, lambda: rows)
        roles[number].play("run", SERVERS, ends[number], of="replica")
    await ends[1].own(1, 0, start().to_message())
    for end in ends.values():
        await end.arrange(1, [1], [((0, 4), (0, 0))], [1], [[(2, 0)]])
    owned, g = ends[1].shards[0], np.arange(4, dtype="f4")
    for number in range(5):
        await owned.push(0, 1, 0, number, 0, g, NONE)
    assert await owned.safe(5) == 5
    assert await ends[2].take_over(2, 0, [], whole=False) == [[2, 5]]
    copy = ends[2].shards[0]
    for shard in (owned, copy):
        await shard.push(0, 1, 0, 5, 2, g, NONE)
    assert owned.weights.tobytes() == copy.weights.tobytes()
    assert await copy.resume(0, 1, 0) == {"last": (5, 5, 3), "rollbacks": [(2, 5)]}
    with pytest.raises(
        AppMissing, match="shard 1 now belongs to another worker"
    ):  # the old owner handles a late message
        await ends[2].copy(1, 0, start(received=9).to_message())
    await asyncio.gather(*(end.close() for end in ends.values()))


async def test_shard_that_could_not_be_moved_is_copied_again():
    ends, roles, rows = {}, {}, Rows.of([np.zeros(4, "f4")], [True])

    async def ask(worker, role, verb, *arguments):
        if worker == 3:
            raise ConnectError("it is lost")
        await roles[worker].call("run", role, verb, *arguments)

    for number in (1, 2):
        roles[number] = Hosting(None)
        ends[number] = Servers(number, "run", roles[number], ask, lambda: rows)
        roles[number].play("run", SERVERS, ends[number], of="replica")
    await ends[1].own(1, 0, start().to_message())
    for end in ends.values():
        await end.arrange(1, [1], [((0, 4), (0, 0))], [1], [[(2, 0)]])
    shard = ends[1].shards[0]
    await shard.push(0, 1, 0, 0, 0, np.ones(4, "f4"), NONE)
    assert await shard.safe(1) == 1
    assert await ends[1].release(1, 0, 2, [3, 2]) == "it is lost"
    await ends[1].take_over(3, 0, [], whole=True)
    for end in ends.values():
        await end.arrange(2, [1], [((0, 4), (0, 0))], [3], [[(2, 0)]])
    async with asyncio.timeout(PATIENCE_S / 4), shard._news:
        await shard._news.wait_for(lambda: shard._with)
    assert await ends[2].take_over(4, 0, [], whole=False) == [[4, 1]]
    await asyncio.gather(*(end.close() for end in ends.values()))


async def test_push_from_undone_weights_is_not_refused():
    server = Server.from_state(start(), 2, [[2, 0]])
    assert await server.push(0, 1, 0, 0, 7, np.ones(4, "f4"), NONE) == (0, 0)


async def test_shard_that_was_handed_on_refuses_everything():
    server = Server.from_state(start())
    await server.shut()
    for request in (
        server.fetch(0, 1),
        server.push(0, 1, 0, 0, 0, np.ones(4, "f4"), NONE),
        server.begin([0], 1, 0),
        server.safe(0),
    ):
        with pytest.raises(AppMissing, match="this shard now belongs to another worker"):
            await request
