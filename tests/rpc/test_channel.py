"""Tests of requests on a channel, over a stream without a socket."""

import asyncio
import itertools

import pytest

from ddlf.errors import ProtocolError, RequestTimeout, WorkerLost
from ddlf.rpc.code import CodeSender
from ddlf.rpc.connection import Channel, Deadline
from ddlf.rpc.messages import Frame, Kind, Request, describe, dumps, loads


class Line:
    """A stream that records the sent frames, and delivers the answers that the test gives it."""

    def __init__(self, on_frame, on_close):
        self.on_frame, self.on_close = on_frame, on_close
        self.closed = False
        self.sent = []
        self.bytes_sent = self.bytes_received = 0
        self.detached = 0

    def send(self, kind, id, name, buffers, extra=None):
        if self.closed:
            raise ConnectionResetError("closed")
        self.sent.append((kind, id, name, extra, loads(buffers) if buffers else None))

    def detach(self):
        self.detached += 1

    def close(self, reason=None):
        self.closed = True
        self.on_close(reason)

    abort = close

    def answer(self, id, value, kind=Kind.RESULT):
        self.on_frame(Frame(kind, id, "", None, dumps(value)))


class Owner:
    """An owner of channels that records its callbacks."""

    name = "worker 1 (line)"

    def __init__(self):
        self.calls = []
        self.tasks = []

    def spawn(self, coroutine):
        self.tasks.append(asyncio.ensure_future(coroutine))

    def on_event(self, frame):
        self.calls.append(("event", frame.name))

    def on_end(self, channel):
        self.calls.append("end")

    def on_cancel(self, channel, id):
        self.calls.append(("cancel", id))

    async def error_of(self, channel, reason):
        return WorkerLost(f"because {reason}", worker=self.name)


@pytest.fixture
async def channel():
    return Channel(Owner(), Line, itertools.count(5), code=CodeSender())


async def called(channel, *requests, deadline=None):
    calls = [
        asyncio.ensure_future(channel.call(request, deadline or Deadline(None)))
        for request in requests or [Request("run", "f")]
    ]
    await asyncio.sleep(0)
    return calls


async def test_answers_find_their_requests_in_any_order(channel):
    first, second = await called(channel, Request("run", "f", x=1), Request("run", "g"))
    assert channel.stream.sent == [
        (Kind.REQUEST, 5, "run", None, [["f"], {"x": 1}]),
        (Kind.REQUEST, 6, "run", None, [["g"], {}]),
    ]
    channel.stream.answer(6, "second")
    channel.stream.answer(5, "first")
    assert (await first, await second) == ("first", "second")
    assert channel.pending == {}


async def test_an_error_of_the_other_side_names_it(channel):
    (call,) = await called(channel)
    channel.stream.answer(5, describe(ValueError("no")), Kind.ERROR)
    with pytest.raises(ValueError, match="no") as caught:
        await call
    assert caught.value.worker == "worker 1 (line)"


async def test_a_request_ends_when_its_time_is_over_and_the_other_side_learns_it(channel):
    (call,) = await called(channel, deadline=Deadline(0.01))
    with pytest.raises(RequestTimeout, match=r"'f' did not end within 0.01 s"):
        await call
    assert 0 < channel.stream.sent[0][3] <= 0.01
    assert channel.stream.sent[-1][:2] == (Kind.CANCEL, 5)
    assert channel.stream.detached == 1
    assert channel._owner.calls == [("cancel", 5)]
    channel.stream.answer(5, "late")  # no request waits for it


async def test_a_cancelled_caller_releases_its_request(channel):
    (call,) = await called(channel)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (channel.pending, channel._owner.calls) == ({}, [("cancel", 5)])


async def test_the_end_of_a_channel_raises_a_separate_error_with_its_reason_in_each_request(channel):
    calls = await called(channel, Request("run", "f"), Request("run", "g"))
    channel.stream.close(ConnectionResetError("a storm"))
    first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert str(first) == str(second) == "worker 1 (line): because a storm"
    assert first is not second
    assert first.may_have_run
    assert channel._owner.calls == ["end"]


async def test_a_request_that_was_not_sent_cannot_have_run(channel):
    channel.stream.closed = True
    with pytest.raises(WorkerLost, match="because closed") as caught:
        await channel.call(Request("run", "f"))
    assert caught.value.may_have_run is False


async def test_events_go_to_the_owner_and_other_messages_break_the_protocol(channel):
    channel.stream.on_frame(Frame(Kind.EVENT, 0, "stopped_by", None, []))
    assert channel._owner.calls == [("event", "stopped_by")]
    with pytest.raises(ProtocolError, match="a master expects answers"):
        channel.stream.on_frame(Frame(Kind.REQUEST, 1, "run", None, []))


async def test_only_an_open_request_that_listens_hears_its_events(channel):
    received, request = [], Request("run", "f")
    request.hear = received.append
    call, second_call = await called(channel, request, Request("run", "g"))
    for id in (5, 6, 7):
        channel.stream.on_frame(Frame(Kind.EVENT, id, "doing", None, dumps({"done": id})))
    channel.stream.answer(5, None)
    channel.stream.answer(6, None)
    await asyncio.gather(call, second_call)
    channel.stream.on_frame(Frame(Kind.EVENT, 5, "doing", None, dumps({"done": 5})))
    assert received == [{"done": 5}]
    assert channel._owner.calls == []


async def test_an_unreadable_event_of_a_request_breaks_the_protocol(channel):
    request = Request("run", "f")
    request.hear = lambda facts: int(facts["done"])
    (call,) = await called(channel, request)
    with pytest.raises(ProtocolError, match=r"event 'doing' cannot be read \(KeyError: 'done'\)"):
        channel.stream.on_frame(Frame(Kind.EVENT, 5, "doing", None, dumps({})))
    channel.stream.answer(5, None)
    await call


async def test_another_event_loop_is_refused(channel):
    with pytest.raises(WorkerLost, match="its connection belongs to another event loop") as caught:
        await asyncio.to_thread(asyncio.run, channel.call(Request("run", "f")))
    assert caught.value.may_have_run is False


def test_a_deadline_gives_the_remaining_time():
    deadline = Deadline(10)
    assert 9 < deadline.left_s() <= 10
    assert deadline.allows(3) == 3
    assert Deadline(0).left_s() == 0
    assert Deadline(0).allows(3) == 0
    assert Deadline(None).left_s() is None
    assert Deadline(None).allows(3) == 3
