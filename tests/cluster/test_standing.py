"""Where a link stands, and why it is not open: no worker is needed for that."""

import asyncio

import pytest

from ddlf.cluster.launch.launcher import Cause, Left
from ddlf.cluster.link import LinkState, Phase
from ddlf.errors import LeaseError, ProtocolError, WorkerLost

EXITED = {
    "text": "was killed",
    "pid": 7,
    "exit_code": None,
    "signal": "SIGKILL",
    "stderr_tail": "",
    "hint": "",
    "id": 12,
    "method": "f",
    "beside": 14,
}


class Data:
    """A data connection whose executor has the process id 7."""

    def is_explained_by(self, crash):
        return crash is not None and crash.pid == 7


async def running():
    return None


@pytest.fixture
def standing():
    return LinkState(running)


def test_it_is_new_then_open_then_lost_and_closed_only_by_this_side(standing):
    seen = [standing.phase]
    for step in (
        standing.open,
        standing.lose,
        standing.open,
        standing.close,
        standing.lose,
        standing.reopen,
        standing.open,
    ):
        step()
        seen.append(standing.phase)
    new, open, lost, closed = Phase
    assert seen == [new, open, lost, open, closed, closed, new, open]


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ((), "not connected yet; connect first"),
        (("open", "lose"), "the connection was lost; connect again; check the worker's terminal"),
        (("open", "close"), "the connection was closed on this side; connect again"),
        (("close", "reopen"), "not connected yet"),
    ],
)
def test_each_phase_but_open_refuses_requests_with_its_own_words(standing, steps, text):
    for step in steps:
        getattr(standing, step)()
    refusal = standing.refusal("w")
    assert type(refusal) is WorkerLost
    assert str(refusal).startswith(f"w: {text}")
    assert refusal.may_have_run is False


def test_a_worker_that_was_taken_over_is_refused_until_it_is_had_again(standing):
    standing.open()
    standing.heard("lease_lost", {"by": "anna", "since": "noon", "epoch": 3}, "w", epoch=2, first_id=1)
    standing.lose()
    assert type(standing.refusal("w")) is LeaseError
    assert "taken over by anna at noon, epoch 3 > 2" in str(standing.refusal("w"))
    standing.open()
    assert standing.lease is None


@pytest.mark.parametrize(("first_id", "begun"), [(1, 14), (13, 2**64)])
def test_a_crash_says_which_of_this_sides_requests_can_have_begun(standing, first_id, begun):
    standing.heard("executor_exited", EXITED, "w", epoch=1, first_id=first_id)
    assert standing.crash.begun == begun
    assert str(standing.crash) == "w: the executor was killed while it ran 'f'"


async def test_the_end_of_an_executor_is_awaited_until_its_daemon_tells_or_is_gone(standing):
    standing.open()
    waiting = asyncio.ensure_future(standing.of_executor(Data(), None))
    await asyncio.sleep(0)
    standing.heard("executor_exited", EXITED | {"pid": 6}, "w", epoch=1, first_id=1)
    await asyncio.sleep(0)
    assert not waiting.done(), "that was the executor before"
    standing.heard("executor_exited", EXITED, "w", epoch=1, first_id=1)
    assert (await waiting).pid == 7
    standing.crash = None
    waiting = asyncio.ensure_future(standing.of_executor(Data(), None))
    await asyncio.sleep(0)
    standing.lose()
    assert await waiting is None


async def test_who_broke_the_protocol_is_not_waited_for(standing):
    standing.open()
    assert await standing.of_executor(Data(), ProtocolError("noise")) is None


@pytest.mark.parametrize(
    ("code", "text"), [(-9, "its process was ended by SIGKILL"), (3, "its process ended with exit code 3")]
)
async def test_whoever_started_the_process_knows_best_how_it_ended(code, text):
    async def left():
        return Left(Cause.CRASH, exit_code=code)

    standing = LinkState(left)
    standing.open()
    standing.heard("stopped_by", {"by": "anna"}, "w", epoch=1, first_id=1)
    lost = await standing.of_worker(None, "w", 0.5)
    assert str(lost) == f"w: {text}; connect again: that starts a new one"
    assert lost.last_seen_s == 0.5


async def test_a_worker_that_somebody_stopped_says_who_it_was(standing):
    standing.open()
    standing.heard("stopped_by", {"by": "anna"}, "w", epoch=1, first_id=1)
    assert (
        str(await standing.of_worker(None, "w", None))
        == "w: was stopped by anna; ask that user, and start the worker again"
    )
