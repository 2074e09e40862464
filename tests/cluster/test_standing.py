"""Tests of the state of a link and the reason for a closed link, without a worker."""

import asyncio
from dataclasses import replace

import pytest

from ddlf.cluster.launch.launcher import Cause, Left
from ddlf.cluster.link import LinkState, LinkStatus
from ddlf.errors import LeaseError, ProtocolError, WorkerLost
from ddlf.worker.events import ExecutorExited, LeaseLost, StoppedBy

EXITED = ExecutorExited(text="was killed", pid=7, signal="SIGKILL", begun=12, method="f", beside=14)


class Data:
    """A data connection to an executor with the process id 7."""

    def is_explained_by(self, crash):
        return crash is not None and crash.pid == 7


async def running():
    return None


@pytest.fixture
def standing():
    return LinkState(running)


def test_a_link_is_new_open_lost_and_closed_only_by_this_side(standing):
    phases = [standing.status]
    for step in (
        standing.open,
        standing.note_end,
        standing.open,
        standing.close,
        standing.note_end,
        standing.reopen,
        standing.open,
    ):
        step()
        phases.append(standing.status)
    new, open, lost, closed = LinkStatus
    assert phases == [new, open, lost, open, closed, closed, new, open]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ((), "not connected yet; connect first"),
        (("open", "note_end"), "the connection was lost; connect again; check the worker's terminal"),
        (("open", "close"), "the connection was closed on this side; connect again"),
        (("close", "reopen"), "not connected yet"),
    ],
)
def test_each_phase_except_open_refuses_requests_with_its_own_text(standing, steps, text):
    for step in steps:
        getattr(standing, step)()
    refusal = standing.refusal("w")
    assert type(refusal) is WorkerLost
    assert str(refusal).startswith(f"w: {text}")
    assert refusal.may_have_run is False


def test_requests_to_a_worker_that_was_taken_over_are_refused_until_it_is_reclaimed(standing):
    standing.open()
    standing.on_lease_lost(LeaseLost(by="anna", since="noon", epoch=3), "w", 2)
    standing.note_end()
    assert type(standing.refusal("w")) is LeaseError
    assert "taken over by anna at noon, epoch 3 > 2" in str(standing.refusal("w"))
    standing.open()
    assert standing.lease is None


@pytest.mark.parametrize(("first_id", "begun"), [(1, 14), (13, 2**64)])
def test_a_crash_tells_which_requests_may_have_begun(standing, first_id, begun):
    standing.on_executor_exited(EXITED, "w", first_id)
    assert standing.crash.begun == begun
    assert str(standing.crash) == "w: the executor was killed while it ran 'f'"


async def test_the_end_of_an_executor_is_awaited_until_its_daemon_reports_it_or_is_lost(standing):
    standing.open()
    waiting = asyncio.ensure_future(standing.executor_crash(Data(), None))
    await asyncio.sleep(0)
    standing.on_executor_exited(replace(EXITED, pid=6), "w", 1)
    await asyncio.sleep(0)
    assert not waiting.done(), "that was the executor before"
    standing.on_executor_exited(EXITED, "w", 1)
    assert (await waiting).pid == 7
    standing.crash = None
    waiting = asyncio.ensure_future(standing.executor_crash(Data(), None))
    await asyncio.sleep(0)
    standing.note_end()
    assert await waiting is None


async def test_the_end_of_an_executor_is_not_awaited_after_a_protocol_error(standing):
    standing.open()
    assert await standing.executor_crash(Data(), ProtocolError("noise")) is None


@pytest.mark.parametrize(
    ("code", "text"), [(-9, "its process was ended by SIGKILL"), (3, "its process ended with exit code 3")]
)
async def test_the_launcher_of_a_process_gives_the_reason_of_its_end(code, text):
    async def left():
        return Left(Cause.CRASH, exit_code=code)

    standing = LinkState(left)
    standing.open()
    standing.on_stopped(StoppedBy(by="anna"))
    lost = await standing.reason_of_loss(None, "w", 0.5)
    assert str(lost) == f"w: {text}; connect again: that starts a new one"
    assert lost.last_seen_s == 0.5


async def test_a_stopped_worker_names_the_user_who_stopped_it(standing):
    standing.open()
    standing.on_stopped(StoppedBy(by="anna"))
    assert (
        str(await standing.reason_of_loss(None, "w", None))
        == "w: was stopped by anna; ask that user, and start the worker again"
    )
