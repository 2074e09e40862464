"""Tests of wrong messages from a peer with the token: the connection ends with a sentence, and the worker serves other masters.

The tests use real ports. Data connections lead to an executor, and control connections lead to the daemon in this process.
The wrong headers are from ``tests/rpc/test_frame.py``, which shows that they cause no allocation.
"""

import asyncio
import hashlib
import socket

import msgpack
import pytest
import pytest_asyncio

from ddlf.errors import NotPicklable, ProtocolError, WorkerLost
from ddlf.rpc.code import CodeSender
from ddlf.rpc.dial import dial
from ddlf.rpc.handshake import Role
from ddlf.rpc.heartbeats import HEARTBEAT_ID
from ddlf.rpc.messages import PREFIX, FrameDecoder, Kind, Limits, Tag, dumps, encode_frame, loads
from tests.daemons import TOKEN, connected
from tests.patience import PATIENCE_S
from tests.rpc.test_frame import REFUSED, header, raw

pytestmark = pytest.mark.asyncio(loop_scope="module")

LIMITS = Limits()
NOTHING = dumps([[], {}])


class Peer:
    """An authenticated connection to a worker that can send any bytes."""

    def __init__(self, sock):
        self.sock = sock
        self._decoder = FrameDecoder(LIMITS)
        self._frames = []

    @classmethod
    async def on(cls, port, role, *, then_close=False):
        sock, _ = await dial("127.0.0.1", port, role, TOKEN, max_message_bytes=LIMITS.max_body_bytes)
        peer = cls(sock)
        if role is Role.DATA:
            await peer.say(frame(dumps([[], {"guest": True}]), name="connect"))
            assert (await peer.hear()).kind == Kind.RESULT
        if then_close:
            sock.close()
        return peer

    async def say(self, data):
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def hear(self):
        """Return the next frame; None if the worker has closed the connection."""
        while not self._frames:
            async with asyncio.timeout(PATIENCE_S):
                try:
                    count = await asyncio.get_running_loop().sock_recv_into(self.sock, self._decoder.wants())
                except ConnectionResetError:  # the worker closed the connection before it had read all bytes
                    count = 0
            if not count:
                self.sock.close()
                return None
            self._frames += self._decoder.received(count)
        return self._frames.pop(0)


def frame(buffers, *, kind=Kind.REQUEST, id=1, name="ping"):
    return b"".join(encode_frame(kind, id, name, buffers, limits=LIMITS))


@pytest_asyncio.fixture(loop_scope="module")
async def serves_other_masters(running):
    """After the test, check that the executor has not restarted, and that the worker serves another master."""
    before = running.daemon.status().executor_pid
    yield
    async with connected(running.port) as other:
        assert await other.run_code("1 + 1") == 2
    assert running.daemon.status().executor_pid == before


def argument(tag, *fields):
    """Return a request with this extension as its only argument, and a second buffer of 8 bytes."""
    value = msgpack.packb([[msgpack.ExtType(tag, msgpack.packb(list(fields)))], {}])
    return frame([value, bytes(8)], name="run_code")


async def wait_indefinitely():
    await asyncio.Event().wait()


TWICE = frame(dumps([[wait_indefinitely], {}], CodeSender().dump), name="run_method", id=5) * 2
HEADERS = ("B72 header of length 0", "B74 body of 16 EiB", "B80 extension", "B86 huge size")
EXECUTOR = {
    **{case: REFUSED[case] for case in HEADERS},
    "value with a reserved byte": (frame([b"\xc1"]), "value cannot be read: FormatError"),
    "extension in a value": (argument(42), "extension type 42 not allowed"),
    "no arguments": (frame(dumps([[]])), "a request's value is [arguments, keyword arguments]"),
    "kind": (frame(NOTHING, kind=200), "a worker expects requests, not messages of kind 200"),
    "answer": (frame(NOTHING, kind=Kind.RESULT), "a worker expects requests, not messages of kind 2"),
    "id that is open": (TWICE, "request 5 is open already"),
    "id 0": (frame(NOTHING, id=0), "a request has a number from 1, not 0"),
    "id below 0": (frame(NOTHING, id=-1), "a request has a number from 1, not -1"),
    "array": (argument(Tag.ARRAY, 1, "O", "C", 8), "dtype 'O' not allowed"),
    "code that is not its address": (
        frame([msgpack.packb([[msgpack.ExtType(Tag.CODE, bytes(32) + b"code")], {}])], name="run_method"),
        "code does not match its address",
    ),
}


@pytest.mark.parametrize("case", EXECUTOR)
async def test_wrong_bytes_end_their_data_connection_only(running, serves_other_masters, case):
    data, sentence = EXECUTOR[case]
    before = running.executor_log
    peer = await Peer.on(running.port, Role.DATA)
    await peer.say(data)
    assert await peer.hear() is None
    await Peer.on(running.port, Role.DATA, then_close=True)  # its answer shows that the executor has printed the line
    (line,) = running.executor_log.removeprefix(before).splitlines()
    assert line.startswith(f"ddlf-worker: closed a connection: {sentence}")


DAEMON = {
    "header": (raw(b""), "empty header"),
    "size": (PREFIX.pack(9, 0, 1024**2 + 1), "message 1048577 > 1048576 bytes"),
    "value": (frame([b"\xc1"]), "value cannot be read: FormatError"),
    **{
        f"arguments {value}": (frame(dumps(value)), "a request's value is [arguments, keyword arguments]")
        for value in (None, [[]], [[], {1: 2}])
    },
    "kind": (frame(NOTHING, kind=200), "a worker expects requests, not messages of kind 200"),
    "answer": (frame(NOTHING, kind=Kind.RESULT), "a worker expects requests, not messages of kind 2"),
    "buffers": (raw(header(1, 7, "", [1, 1], None), b"ab"), "2 buffers > 1"),
    "object": (frame([msgpack.packb([[msgpack.ExtType(Tag.OBJECT, b"N.")], {}])]), "pickled payload not allowed here"),
}


@pytest.mark.parametrize("case", DAEMON)
async def test_wrong_bytes_end_their_control_connection_only(running, serves_other_masters, case):
    data, sentence = DAEMON[case]
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    before = len(running.lines)
    peer = await Peer.on(running.port, Role.CONTROL)
    await peer.say(data)
    assert await peer.hear() is None
    asyncio.get_running_loop().set_exception_handler(None)
    (line,) = running.lines[before:]
    assert line.startswith(f"closed a connection: {sentence}")
    assert reported == []


@pytest.mark.parametrize("role", [Role.CONTROL, Role.DATA])
async def test_unknown_command_is_answered_and_the_connection_stays(running, serves_other_masters, role):
    peer = await Peer.on(running.port, role)
    for id in (7, 8):
        await peer.say(frame(NOTHING, id=id, name="format_disk"))
        answer = await peer.hear()
        assert (answer.kind, answer.id) == (Kind.ERROR, id)
        assert "command 'format_disk'" in loads(answer.buffers)["chain"][0][1]
    peer.sock.close()


PICKLES = {
    "truncated": b"\x80\x05\x95\xff",
    "opcodes of another Python": b"\x80\x05\xfe.",
    "of a missing module": b"cno_such_module\nname\n.",
}


@pytest.mark.parametrize("tag", [Tag.OBJECT, Tag.CODE], ids=["object", "code"])
@pytest.mark.parametrize("case", PICKLES)
async def test_code_that_cannot_be_loaded_is_answered(running, serves_other_masters, case, tag):
    data = PICKLES[case]
    sent = msgpack.ExtType(tag, hashlib.sha256(data).digest() + data if tag is Tag.CODE else data)
    peer = await Peer.on(running.port, Role.DATA)
    for id in (7, 8):
        await peer.say(frame([msgpack.packb([[sent], {}])], id=id, name="run_method"))
        answer = await peer.hear()
        assert (answer.kind, answer.id) == (Kind.ERROR, id)
        facts = loads(answer.buffers)
        assert facts["chain"][0][:1] == [f"ddlf.errors.{NotPicklable.__name__}"]
        assert "cannot load code sent to Python 3." in facts["chain"][0][1]
        of_a_module = "module" in case
        assert ("install no_such_module" if of_a_module else "use the same Python version") in facts["hint"]
    peer.sock.close()


async def test_peer_that_floods_a_daemon_is_held_back_alone(running, serves_other_masters, monkeypatch):
    monkeypatch.setattr("ddlf.worker.daemon.MAX_QUEUED_BYTES", 10_000)
    peer = await Peer.on(running.port, Role.CONTROL)
    async with asyncio.timeout(PATIENCE_S):
        await peer.say(frame(NOTHING))
        await peer.hear()
        (control,) = running.daemon._controls
        held_back, hold_back = asyncio.Event(), control._hold_back
        monkeypatch.setattr(control, "_hold_back", lambda: (hold_back(), held_back.set()))
        # Small buffers of the kernel, so that the daemon would have to keep the answers in memory.
        peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        control._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        count = 3000
        saying = asyncio.create_task(peer.say((frame(NOTHING, id=1) + frame(NOTHING, id=HEARTBEAT_ID)) * (count // 2)))
        await held_back.wait()
        async with connected(running.port) as other:
            assert await other.run_code("2 + 2") == 4
        assert control._is_held_back
        assert control._connection.queued_bytes < 10_000 + 1500 * 30  # plus the answers to the requests of one read
        for _ in range(count):
            assert (await peer.hear()).kind == Kind.RESULT
        await saying
        await peer.say(frame(NOTHING, id=7))
        assert (await peer.hear()).id == 7
    peer.sock.close()


async def test_thousands_of_tiny_requests_are_answered_in_order(running, serves_other_masters):
    peer = await Peer.on(running.port, Role.DATA)
    count = 20_000
    requests = [frame(NOTHING, id=id, name="list_variables") for id in range(1, count + 1)]
    saying = asyncio.create_task(peer.say(b"".join(requests)))
    async with asyncio.timeout(PATIENCE_S):
        assert [(await peer.hear()).id for _ in range(count)] == list(range(1, count + 1))
        await saying
    peer.sock.close()


SEND_CODE = "import ddlf.worker.calls as module, ddlf.rpc.code as code\nmodule.dump_result = code.CodeSender().dump"
SEND_PICKLES = """
import ddlf.worker.calls as module, ddlf.rpc.code as code

def pickle_once(value, usual=module.refuse_objects):
    module.refuse_objects = usual  # objects in answers about the worker are not pickled
    return code.dump_result(value)

module.refuse_objects = pickle_once
"""


@pytest.mark.parametrize(
    ("turn", "result", "options", "sentence"),
    [
        pytest.param(SEND_CODE, "lambda: 1", dict(pickle_results=True), "a worker may not send code", id="code"),
        pytest.param(SEND_PICKLES, "object()", {}, "pickled payload not allowed here", id="object"),
    ],
)
async def test_forbidden_pickle_of_a_worker_ends_the_connection(running, turn, result, options, sentence):
    async with connected(running.port, **options) as master:
        await master.run_code(turn)
        waiting = asyncio.ensure_future(master.run_method(wait_concurrently))
        with pytest.raises(ProtocolError, match=sentence):
            await master.run_code(result)
        with pytest.raises(WorkerLost, match=sentence):
            await asyncio.wait_for(waiting, PATIENCE_S)
        assert await master.run_code("1 + 1") == 2, "on a new connection"
        await master.restart()


async def wait_concurrently():
    await asyncio.Event().wait()


wait_concurrently.concurrent = True
SAY = (
    "import gc\nfrom ddlf.worker.calls import Session\n"
    "sessions = [thing for thing in gc.get_objects() if type(thing) is Session]\n"
    "next(session for session in sessions if session._lease and not session.closed.done())._connection.send({}, 12345, '', [b'\\xc0'])"
)


async def test_answer_that_nobody_awaits_is_ignored(running, serves_other_masters):
    async with connected(running.port) as master:
        await master.run_code(SAY.format(int(Kind.RESULT)))
        connection = master._link.data.stream
        assert await master.run_code("1 + 1") == 2
        assert master._link.data.stream is connection


async def test_request_from_a_worker_ends_the_connection(running, serves_other_masters):
    async with connected(running.port) as master:
        with pytest.raises(WorkerLost, match="a master expects answers, not messages of kind 1"):
            await master.run_code(SAY.format(int(Kind.REQUEST)))
        assert await master.run_code("1 + 1") == 2, "on a new connection"


@pytest.mark.parametrize("name", ["executor_exited", "lease_lost", "stopped_by", "wanted", "wrote"])
async def test_unreadable_event_ends_the_connection(running, serves_other_masters, name):
    async with connected(running.port) as master:
        with pytest.raises(WorkerLost, match=f"event '{name}' cannot be read"):
            await master.run_code(SAY.format(int(Kind.EVENT)).replace("''", f"'{name}'"))
        assert await master.run_code("1 + 1") == 2, "on a new connection"


async def test_event_of_a_newer_worker_is_ignored(running, serves_other_masters):
    async with connected(running.port) as master:
        await master.run_code(SAY.format(int(Kind.EVENT)).replace("'', [b'\\xc0']", "'sang', []"))
        connection = master._link.data.stream
        assert await master.run_code("1 + 1") == 2
        assert master._link.data.stream is connection


@pytest.mark.parametrize("facts", ["None", "7", "{'chain': []}", "{'chain': [['ValueError']]}"])
async def test_unreadable_error_is_an_error_with_a_sentence(running, facts):
    async with connected(running.port) as master:
        await master.run_code(f"import ddlf.worker.calls as module\nmodule.describe = lambda error: {facts}")
        with pytest.raises(ProtocolError, match="error data cannot be read"):
            await master.run_code("1 / 0")
        assert await master.run_code("1 + 1") == 2
        await master.restart()
