"""Tests of the order, age and number of updates in asynchronous training. No process, no Keras."""

from unittest import mock

import numpy as np
import pytest

from ddlf.errors import AppError, ConfigError, WorkerLost
from ddlf.events import RunEnded, Warned
from ddlf.monitor.terminal.lines import Lines
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.training import reporter

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXACT = {"layer": np.linspace(-1, 1, 12).reshape(3, 4), "bias": np.zeros(5)}
"""Weights in float64, so that only the order of sums differs."""


async def trained(**settings):
    run = FakeRun(**{"mode": "async", "start": EXACT, "samples": 204, "batch_size": 17, **settings})
    run.event_log = []
    run.subscribe(run.event_log.append)
    await run.train_model()
    return run


def weights(run):
    return run.model.get_weights()


# -- bounded staleness -----------------------------------------------------------------------------------------------


async def test_a_bound_of_0_equals_synchronous_training():
    """Results are equal except for rounding, because each update is subtracted when it arrives instead of after the round.

    All slots have equally many samples, because synchronous training weighs updates by samples.
    """
    sync = await trained(mode="sync", slots=3)
    order = [1, 2, 3, 3, 1, 2, 2, 3, 1, 1, 2, 3]
    for arrivals in (order, None):
        bounded = await trained(slots=3, arrivals=arrivals, max_staleness=0, cluster=FakeCluster(3))
        for actual, expected in zip(weights(bounded), weights(sync), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
    assert [record.round for record in bounded.history] == [n for n in (1, 2, 3, 4) for _ in range(3)]
    free = await trained(slots=3, arrivals=[1, 1, 2, 3, 2, 3, 3, 1, 2, 3, 1, 2], cluster=FakeCluster(3))
    assert np.abs(weights(free)[0] - weights(sync)[0]).max() > 1e-6


async def test_one_slot_with_bound_0_has_the_bits_of_synchronous_training():
    single = {"slots": 1, "start": {name: array.astype("f4") for name, array in EXACT.items()}}
    runs = [await trained(mode="sync", **single), await trained(max_staleness=0, **single)]
    assert all(np.array_equal(a, b) for a, b in zip(*map(weights, runs), strict=True))


async def test_lost_slot_with_bound_0_restarts_with_weights_of_its_round():
    sync = await trained(mode="sync", slots=3)
    cluster = FakeCluster(4)
    lose_once(cluster, slot=1, round=2)
    bounded = await trained(slots=3, max_staleness=0, cluster=cluster)
    for actual, expected in zip(weights(bounded), weights(sync), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


def lose_once(cluster, slot, round):
    """Lose the worker that carries a slot's round after it has computed the round. Both numbers count from 0."""
    lost = []

    def train(worker, task):
        reply = FakeWorker.train(worker, task)
        if (task.slot, task.round) == (slot, round) and not lost:
            lost.append(worker)
            worker.lost = True
            raise WorkerLost("it was lost", worker=worker.name)
        return reply

    for worker in cluster.workers:
        worker.train = train.__get__(worker)


@pytest.mark.parametrize("bound", [0, 1, 2])
async def test_no_slot_begins_a_round_further_ahead_than_the_bound(bound):
    cluster, ahead = FakeCluster(3), []

    def train(worker, task):
        ahead.append(task.round - min(run.run_context.progress.slot_rounds) if run.run_context.progress else 0)
        return FakeWorker.train(worker, task)

    for worker in cluster.workers:
        worker.train = train.__get__(worker)
    run = FakeRun(cluster, mode="async", slots=3, max_staleness=bound, master_epochs=6)
    slow = cluster.workers[2]
    usual = slow.rpc

    async def rpc(request, timeout_s=None):
        for _ in range(40):  # turns of the loop
            await FakeWorker.rpc(cluster.workers[0], request_of_nothing)
        return await usual(request, timeout_s)

    from ddlf.rpc.messages import Request

    request_of_nothing = Request("call", "", "", "stop")
    slow.rpc = rpc
    await run.train_model()
    assert max(ahead) == bound
    assert run.ledger.is_exact(6)


async def test_a_bound_of_0_does_not_delay_the_end_of_a_run():
    run = FakeRun(mode="async", slots=2, max_staleness=0, master_epochs=50)
    run.is_convergent = lambda record: record.version == 5
    await run.train_model()
    assert 5 <= len(run.history) <= 7


async def test_an_order_that_the_bound_does_not_allow_is_refused():
    with pytest.raises(ConfigError, match="with max_staleness=1 slot 1 cannot be as far ahead as arrivals require"):
        FakeRun(mode="async", slots=2, arrivals=[1, 1, 1, 2, 2, 2], max_staleness=1, master_epochs=3)


async def test_arrivals_before_all_slots_are_measured_are_refused():
    pace = dict(balance="speed", worker_steps=13)
    with pytest.raises(ConfigError, match="2 rounds of all that are measured first slot 1 cannot be as far ahead"):
        FakeRun(mode="async", slots=2, arrivals=[1, 1, 1, 2, 2, 2], master_epochs=3, **pace)


async def test_staleness_is_reported_at_the_end(capsys):
    events = []
    run = FakeRun(mode="async", slots=2, arrivals=[1, 1, 2, 2], master_epochs=2, verbose=True)
    run.subscribe(events.append)
    await run.train_model()
    assert run.history.staleness == {0: 3, 2: 1}
    (ended,) = [event for event in events if isinstance(event, RunEnded)]
    assert ended.staleness == (3, 0, 1)
    assert "staleness 0 in 3, 2 in 1 of 4 updates" in capsys.readouterr().out


async def test_staleness_line_follows_the_last_record(capsys):
    run = FakeRun(mode="async", slots=2, verbose=True)
    run.run_context.display = Lines()
    run.subscribe(run.run_context.display.tell)
    try:
        await run.train_model()
    finally:
        run.run_context.display.close()
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("round ") for line in lines) == 3  # of eight records that have arrived at once
    assert lines[-1] == "staleness 0 in 4, 1 in 4 of 8 updates"


async def test_synchronous_training_after_asynchronous_reports_no_staleness(capsys):
    run = FakeRun(mode="async", slots=2, verbose=True)
    await run.train_model()
    assert "staleness" in capsys.readouterr().out
    events, run.mode = [], "sync"
    run.subscribe(events.append)
    await run.train_model()
    assert [event.staleness for event in events if isinstance(event, RunEnded)] == [()]


# -- convergence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_training_ends_when_the_mean_metric_reaches_the_target(mode):
    untargeted = await trained(mode=mode, slots=1, master_epochs=12)
    accuracies = [record.accuracy for record in untargeted.history]
    means = [sum(accuracies[n - 3 : n]) / 3 for n in range(3, 13)]
    assert means[0] != means[4]
    metric, value = ("accuracy", means[4]) if means[4] > means[0] else ("accuracy", max(means[4:]))
    first = next(n for n, mean in enumerate(means) if mean >= value) + 3
    run = await trained(mode=mode, slots=1, master_epochs=12, converge=f"target:{metric},{value!r},last=3")
    assert first <= len(run.history) <= first + (mode == "async")
    assert run.run_context.progress.converged


async def test_a_target_that_no_round_can_reach_is_refused_by_name():
    for settings, message in (
        (
            {"converge": "target:acc,0.9"},
            "looks at 'acc', which is not a metric of this run; name one of loss, accuracy",
        ),
        ({"converge": "target:test_loss,0.1"}, "looks at 'test_loss', but test data is evaluated at the end only"),
        ({"converge": "target:val_loss,0.1"}, "looks at 'val_loss', but there is no x_val; set x_val, y_val"),
    ):
        with pytest.raises((AppError, ConfigError)) as refused:
            await trained(mode="sync", **settings)
        assert message in str(refused.value)


# -- updates that wait in a buffer --------------------------------------------------------------------------------------


def warnings(run):
    return [event.why for event in run.event_log if isinstance(event, Warned)]


async def test_run_warns_of_a_buffer_that_is_never_full():
    assert not warnings(await trained(arrival="fedbuff:3", slots=3, cluster=FakeCluster(3)))
    (never,) = warnings(await trained(arrival="fedbuff:13", slots=3, cluster=FakeCluster(3)))
    assert never == (
        "it merges 13 updates at once, but only 12 more will come: they are merged only at the end, as a small step; use a smaller size"
    )
    (warning,) = warnings(await trained(arrival="fedbuff:3", converge="target:loss,100,last=4"))
    assert warning == "1 of its updates wait for others, and are not in the model: continued training merges them"


async def test_run_reports_waiting_updates_also_if_the_last_one_is_rejected():
    cluster = spoiling(FakeCluster(2), slot=1, round=3)
    run = await trained(arrival="fedbuff:4", update_policy="reject", arrivals=[1, 1, 1, 1, 2, 2, 2, 2], cluster=cluster)
    assert len(run.history) == 7
    assert warnings(run) == [
        "3 of its updates wait for others, and are not in the model: continued training merges them"
    ]


def spoiling(cluster, slot, round):
    """Make a slot's update of a round NaN. Both numbers count from 0."""

    def fit(worker, task, weights, momentum):
        update, momentum = FakeWorker.fit(worker, task, weights, momentum)
        return [u * np.nan for u in update] if (task.slot, task.round) == (slot, round) else update, momentum

    for worker in cluster.workers:
        worker.fit = fit.__get__(worker)
    return cluster


async def test_a_rejected_update_does_not_move_the_end_of_an_epoch():
    """Two slots train for 4 epochs, and the third update is not merged."""
    settings = {
        "update_policy": "reject",
        "arrivals": [1, 2, 1, 2, 1, 2, 1, 2],
        "x_val": np.zeros((1, 1)),
        "x_test": np.zeros((1, 1)),
    }
    with mock.patch.object(reporter, "validate", return_value={"val_loss": 0.5}):
        run = await trained(cluster=spoiling(FakeCluster(2), slot=0, round=1), **settings)
    validated = [(r.slot, r.round) for r in run.history if "val_loss" in r.metrics]
    assert validated == [(2, 1), (2, 2), (2, 3), (2, 4)]


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"staleness": "polynomial:a=-1"}, "staleness 'polynomial:a=-1': a must be finite and >= 0, got -1.0"),
        ({"staleness": "hinge:a=1,a=2"}, "a is given twice"),
        (
            {"arrival": "fedasync", "outer": "nesterov"},
            "outer='nesterov' has no effect with arrival='fedasync:rate=0.6'",
        ),
        ({"mode": "sync", "arrival": "fedbuff"}, "arrival='fedbuff' is for asynchronous training"),
        ({"mode": "sync", "staleness": "inverse"}, "staleness='inverse' is for asynchronous and Downpour training"),
        ({"mode": "sync", "max_staleness": 2}, "max_staleness=2 is for asynchronous and Downpour training"),
    ],
)
async def test_impossible_settings_are_refused_before_workers_are_connected(settings, message):
    run = FakeRun(**{"mode": "async", **settings})
    with pytest.raises(ConfigError) as refused:
        await run.train_model()
    assert message in str(refused.value)
    assert all(not worker.asked for worker in run.cluster.workers)
