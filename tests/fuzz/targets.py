"""Targets of the fuzzer: each one gives arbitrary bytes to a reader of the wire, which must read them or raise our error.

A target raises ``AssertionError`` if its reader breaks this promise. The first byte of an input selects what the target does
with the other bytes, so that a fuzzer also reaches code behind checks that random bytes do not pass. ``scripts/fuzz`` tries
millions of inputs, and ``test_corpus.py`` tries the inputs of the committed corpus.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import ml_dtypes
import numpy as np

from ddlf.errors import DDLFError
from ddlf.rpc.dial import EncryptionWanted, shake_hands
from ddlf.rpc.handshake import HELLO, PREAMBLE, ClientHandshake, Role, Verdict, WorkerHandshake, read_preamble
from ddlf.rpc.listen import answer
from ddlf.rpc.messages import PREFIX, FrameDecoder, Limits, dumps, encode_frame, loads, read_arguments, rebuild
from ddlf.rpc.stream import receive_exactly

TOKEN = b"t" * 43
LIMITS = Limits(max_header_bytes=4096, max_body_bytes=256 * 1024, max_buffers=64)
"""Small limits, so that short inputs reach them."""

FORBIDDEN = (
    "pickle.",
    "marshal.",
    "import",
    "exec",
    "compile",
    "open",
    "os.",
    "subprocess.",
    "ctypes.",
    "socket.connect",
)
"""Beginnings of forbidden audit events: bytes of a stranger must not cause unpickling, imports, code, files or connections."""

_watching = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event.startswith(FORBIDDEN):
        raise AssertionError(f"bytes from outside led to {event} {arguments!r}")


sys.addaudithook(_audit)


@contextmanager
def no_side_effects() -> Iterator[None]:
    """Raise ``AssertionError`` when code within this context causes a forbidden audit event."""
    global _watching
    _watching = True
    try:
        yield
    finally:
        _watching = False


def handshake(data: bytes) -> None:
    """Check that both sides refuse a stranger's bytes, and that a bit that changes between two friends ends their handshake."""
    mode, rest = data[:1], data[1:]
    with no_side_effects():
        match (mode or b"\0")[0] % 4:
            case 0:
                _with_stranger(rest, _worker_side)
            case 1:
                _with_stranger(rest, _client_side)
            case 2:
                assert _relayed(to_worker=rest) == (not any(rest[: HELLO.size + 32])), "an altered client was accepted"
            case 3:
                assert _relayed(to_client=rest) == (not any(rest[: HELLO.size + 33])), "an altered worker was accepted"


async def _worker_side(sock: socket.socket) -> None:
    preamble = await receive_exactly(sock, PREAMBLE.size)
    read_preamble(preamble)
    await answer(sock, preamble, (TOKEN,), 1000, delay_s=0)


async def _client_side(sock: socket.socket) -> None:
    await shake_hands(sock, Role.DATA, TOKEN, 1000)


_loop = asyncio.new_event_loop()
atexit.register(_loop.close)


def _with_stranger(says: bytes, side: Callable[[socket.socket], Any]) -> None:
    """Run one side of a handshake. The other side sends these bytes and closes the connection."""
    own_end, stranger_end = socket.socketpair()
    with own_end, stranger_end:
        own_end.setblocking(False)
        stranger_end.sendall(says[:4096])
        stranger_end.shutdown(socket.SHUT_WR)
        try:
            _loop.run_until_complete(side(own_end))
        except (DDLFError, OSError, EncryptionWanted):
            return
    raise AssertionError("a stranger was let in")


def _relayed(to_worker: bytes = b"", to_client: bytes = b"") -> bool:
    """Return whether a handshake with the same token on both sides succeeds when XOR changes its bytes on the way."""

    def altered(message: bytes, mask: bytes) -> bytes:
        return bytes(byte ^ change for byte, change in zip(message, mask.ljust(len(message), b"\0"), strict=False))

    client, worker = ClientHandshake(Role.DATA, TOKEN, 1000), WorkerHandshake((TOKEN,), 1000)
    try:
        _, hello = worker.answer(altered(client.hello, to_worker))
        _, proof = client.read_hello(altered(hello, to_client))
        accepted = worker.accepts(altered(proof, to_worker[HELLO.size :]))
        verdict = bytes([Verdict.ACCEPTED if accepted else Verdict.REFUSED])
        client.read_verdict(altered(verdict, to_client[HELLO.size + 32 :]))
    except DDLFError:
        return False
    return accepted


def frames(data: bytes) -> None:
    """Check that a stream gives the same frames and the same end wherever it is cut, and that each frame is read or refused."""
    mode, rest = (data[:1] or b"\0")[0], data[1:]
    with no_side_effects():
        if mode & 1:  # wrap the bytes as a valid frame: they are one value, or a value and the memory of an array
            buffers = [rest] if mode & 2 else [rest[: mode >> 2], rest[mode >> 2 :]]
            rest = b"".join(encode_frame(mode >> 2, 1, "run", buffers, limits=LIMITS))
            mode = 0
        whole = _decoded(rest, len(rest) or 1)
        assert whole == _decoded(rest, 1 + mode // 2), "another result when the stream is cut in other places"
        assert all(len(body) <= LIMITS.max_body_bytes for body in whole[0])


def _decoded(stream: bytes, piece: int) -> tuple[list[bytes], str]:
    """Return the meaning of each frame of a stream, as bytes, and how the stream ended."""
    decoder = FrameDecoder(LIMITS, _allocate)
    meanings: list[bytes] = []
    at = 0
    try:
        while at < len(stream):
            memory = decoder.wants()
            count = min(len(memory), piece, len(stream) - at)
            memory[:count] = stream[at : at + count]
            at += count
            for frame in decoder.received(count):  # the frames before a wrong frame count, so collect them one by one
                meanings.append(_meaning(frame.buffers))  # noqa: PERF401
    except DDLFError as error:
        return meanings, str(error)
    return meanings, "in the middle" if decoder.mid_frame else "at the end"


def _allocate(size: int) -> Any:
    assert size <= LIMITS.max_body_bytes, f"{size} bytes were allocated"
    return np.empty(size, np.uint8)


def _meaning(buffers: list[Any]) -> bytes:
    """Read a body in each way that DDLF does: as a value, as an error and as the arguments of a call."""
    try:
        value = loads(buffers)
    except DDLFError as error:
        return str(error).encode(errors="surrogatepass")
    assert isinstance(rebuild(value), DDLFError)
    try:
        read_arguments(value)
        return b"".join(bytes(buffer) for buffer in dumps(value))
    except DDLFError as error:
        return str(error).encode(errors="surrogatepass")


TARGETS: dict[str, Callable[[bytes], None]] = {"handshake": handshake, "frames": frames}


def seeds(target: str) -> Iterator[bytes]:
    """Yield inputs to begin with: messages of real peers, and bytes of strangers."""
    values = [
        *(None, True, -1, 2**63, 2**70, 1.5, 1 + 2j, "text", b"bytes", [1, 2], (1, (2, 3)), {"a": {1, 2}, (1, 2): 3}),
        *(datetime(2026, 5, 1, tzinfo=UTC), timedelta(1), Decimal("1.5"), UUID(int=5), range(3), Path("/x"), Role.DATA),
        *(
            np.array(["a", "bc"]),
            np.array([b"a"]),
            np.str_("a"),
            Limits(),
            inspect.FullArgSpec(*"abcdefg"),
            re.I | re.M,
        ),
        *([np.float32(1.5), np.arange(3)], np.arange(300.0).reshape(3, 100), np.ones(2, ml_dtypes.bfloat16)),
        *([[1, 2], {"axis": 0}], {"chain": [["ValueError", "no", [["file.py", 3, "f", "x = 1"]], ""]], "hint": "do"}),
    ]
    if target == "handshake":
        client = ClientHandshake(Role.DATA, TOKEN, 1000)
        _, hello = WorkerHandshake((TOKEN,), 1000).answer(client.hello)
        strangers = [b"", b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x02\x00", client.hello, hello]
        for mode in (0, 1):
            yield from (bytes([mode]) + says + bytes(32) for says in strangers)
        for mode in (2, 3):
            yield from (bytes([mode]) + bytes(at) + b"\x01" for at in (0, 7, 8, 16, 32, 64, 95, 96))
            yield bytes([mode])
    else:
        for value in values:
            buffers = dumps(value)
            stream = b"".join(encode_frame(1, 7, "run", buffers, 2.5, limits=LIMITS))
            yield from (bytes([mode]) + stream for mode in (0, 2, 200))
            yield b"\x03" + bytes(buffers[0])
        yield b"\0" + PREFIX.pack(2**32 - 1, 0, 0)
        yield b"\0" + PREFIX.pack(5, 0x80, 2**64 - 1) + b"12345"
