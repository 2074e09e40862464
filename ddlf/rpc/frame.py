"""Splits a stream of bytes into messages: frames of a header and raw buffers. Pure; runs on both sides of every
connection.

    u32  header length       little-endian, like everything on the wire
    u32  flags               0; unknown bits are refused
    u64  body length
    ...  header              msgpack array [kind, id, name, sizes, extra]
    ...  body                the buffers one after another, their sizes given in the header

The decoder does no I/O. ``wants`` returns the memory for the next bytes, and ``received`` takes the number of bytes
written to it. Small frames are cut out of one scratch buffer. A large buffer is received into its own final memory, so
the bytes of an array are copied only by the kernel. Every length is checked against ``Limits`` before any memory is
allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from ddlf.errors import FrameTooLarge, ProtocolError

PREFIX = struct.Struct("<IIQ")  # header length, flags, body length
Buffer = bytes | bytearray | memoryview

MAX_HEADER_BYTES = 64 * 1024
"""Enough for the sizes of ``MAX_BUFFERS`` buffers, with space to spare."""
MAX_BUFFERS = 4096
MAX_BODY_BYTES = 4 * 1024**3
"""Default limit of a message body. The system provides memory only as bytes arrive, so a false length costs address
space only.
"""
SCRATCH_BYTES = 32 * 1024
JOIN_BELOW_BYTES = 16 * 1024
"""Buffers up to this size are joined with the header into one piece. One copy is cheaper than one more piece for the
kernel.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that one side accepts.

    Args:
        max_header_bytes: Most bytes of one frame's header.
        max_body_bytes: Most bytes of all buffers of one frame.
        max_buffers: Most buffers in one frame.
    """

    max_header_bytes: int = MAX_HEADER_BYTES
    max_body_bytes: int = MAX_BODY_BYTES
    max_buffers: int = MAX_BUFFERS


CONTROL_LIMITS = Limits(max_header_bytes=4096, max_body_bytes=1024**2, max_buffers=1)
"""The limits of the control connection, which carries no arrays."""


class Frame(NamedTuple):
    """One received message.

    Args:
        kind: Number of the message kind (see ``messages``).
        id: The request that it belongs to; 0 if none.
        name: Command or event name; empty if none.
        extra: A number in the header of some kinds, or None.
        buffers: The body. The first buffer is the encoded value, the others are the memory of its arrays.
    """

    kind: int
    id: int
    name: str
    extra: float | None
    buffers: list[Any]


def encode_frame(
    kind: int, id: int, name: str, buffers: list[Buffer], extra: float | None = None, *, limits: Limits
) -> list[Buffer]:
    """Return a frame as pieces to send one after another. No piece is empty. Large buffers are not copied.

    Args:
        kind: Number of the message kind. ``id``, ``name`` and ``extra`` are also fields of ``Frame``.
        buffers: Contiguous, one-dimensional memory of bytes.
        limits: The sizes that the receiver accepts.

    Raises:
        FrameTooLarge: The frame exceeds a limit of the receiver.
    """
    sizes = [len(buffer) for buffer in buffers]
    body = sum(sizes)
    if body > limits.max_body_bytes:
        raise FrameTooLarge(
            f"a message of {body:,} bytes is over the receiver's limit of {limits.max_body_bytes:,}",
            hint="send it in parts, or raise max_message_bytes on both sides",
        )
    if len(sizes) > limits.max_buffers:
        raise FrameTooLarge(
            f"a message of {len(sizes):,} arrays is over the receiver's limit of {limits.max_buffers:,}",
            hint="stack small arrays into one",
        )
    header = msgpack.packb([kind, id, name, sizes, extra])
    if len(header) > limits.max_header_bytes:
        raise FrameTooLarge(f"a header of {len(header):,} bytes is over the limit of {limits.max_header_bytes:,}")
    if body <= JOIN_BELOW_BYTES:
        return [
            b"".join((PREFIX.pack(len(header), 0, body), header, *buffers))
        ]  # a shortcut for most messages; the loop gives the same result
    pieces: list[Buffer] = []
    small: list[Buffer] = [PREFIX.pack(len(header), 0, body), header]
    for size, buffer in zip(sizes, buffers, strict=True):
        if size <= JOIN_BELOW_BYTES:
            small.append(buffer)
        else:
            if rest := b"".join(small):
                pieces.append(rest)
            small = []
            pieces.append(buffer)
    if rest := b"".join(small):
        pieces.append(rest)
    return pieces


class FrameDecoder:
    """Splits a stream of bytes into frames.

    Args:
        limits: What to accept.
        allocate: Makes writable memory for a large buffer. ``bytearray`` needs no import; ``numpy.empty`` avoids
            zeroing.
    """

    def __init__(self, limits: Limits, allocate: Callable[[int], Any] = bytearray) -> None:
        self.limits = limits
        self._allocate = allocate
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._start = self._end = 0
        # Set only while a frame is longer than its part in the scratch buffer:
        self._header: list[Any] | None = None
        self._buffers: list[Any] = []
        self._target: memoryview | None = None
        self._filled = 0

    @property
    def mid_frame(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._header is not None or self._end > self._start

    @property
    def direct(self) -> bool:
        """Whether the next bytes go directly into a large buffer's own memory."""
        return self._target is not None

    def wants(self) -> memoryview:
        """Return the memory for the next bytes, never empty."""
        if self._target is not None:
            return self._target[self._filled :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._scratch):
            self._make_room()
        return self._view[self._end :]

    def received(self, count: int) -> Iterator[Frame]:
        """Accept ``count`` bytes that were written to the memory from ``wants``.

        Yields:
            The complete frames, one by one. Frames before a wrong one are always yielded, however the stream was split.

        Raises:
            ProtocolError: The bytes are not a frame, or a frame exceeds the limits. The stream cannot be used
                afterwards.
        """
        if self._target is not None:
            self._filled += count
            if self._filled < len(self._target):
                return
            self._target = None
        else:
            self._end += count
        while (frame := self._next()) is not None:
            yield frame

    def release(self) -> None:
        """Release all memory and the allocator. The stream has ended, and receives no more bytes."""
        self._scratch = bytearray()
        self._view = memoryview(self._scratch)
        self._target, self._buffers, self._allocate = None, [], bytearray

    def _next(self) -> Frame | None:
        """Return the next frame; None if bytes are missing."""
        if self._header is None:
            have = self._end - self._start
            if have < PREFIX.size:
                return None
            header_length, flags, body_length = PREFIX.unpack_from(self._scratch, self._start)
            self._check_prefix(header_length, flags, body_length)
            if have < PREFIX.size + header_length:
                self._need(PREFIX.size + header_length)
                return None
            begin = self._start + PREFIX.size
            self._header = self._read_header(self._view[begin : begin + header_length], body_length)
            self._start = begin + header_length
            self._buffers = []
        return self._fill()

    def _fill(self) -> Frame | None:
        assert self._header is not None
        kind, id, name, sizes, extra = self._header
        while len(self._buffers) < len(sizes):
            size = sizes[len(self._buffers)]
            have = self._end - self._start
            if have >= size:
                self._buffers.append(self._scratch[self._start : self._start + size])
                self._start += size
                continue
            if size <= JOIN_BELOW_BYTES:
                self._need(size)
                return None
            memory = self._allocate(size)
            target = memoryview(memory).cast("B")
            target[:have] = self._view[self._start : self._end]
            self._start = self._end = 0
            self._buffers.append(memory)
            self._target, self._filled = target, have
            return None
        frame = Frame(kind, id, name, extra, self._buffers)
        self._header, self._buffers = None, []  # from now on the decoder does not keep the arrays alive
        return frame

    def _check_prefix(self, header_length: int, flags: int, body_length: int) -> None:
        if header_length == 0:
            raise ProtocolError("empty header")
        if header_length > self.limits.max_header_bytes:
            raise ProtocolError(f"header {header_length} > {self.limits.max_header_bytes} bytes")
        if flags:
            raise ProtocolError(f"unknown flags {flags:#x}")
        if body_length > self.limits.max_body_bytes:
            raise ProtocolError(f"message {body_length} > {self.limits.max_body_bytes} bytes")

    def _read_header(self, data: memoryview, body_length: int) -> list[Any]:
        try:
            header = msgpack.unpackb(data, raw=False, strict_map_key=True, ext_hook=_no_extensions)
        except ProtocolError:
            raise
        except Exception as error:  # msgpack's errors share no base class
            raise ProtocolError(f"header cannot be read: {type(error).__name__}: {error}") from None
        if type(header) is not list or len(header) != 5:
            raise ProtocolError("header is not an array of 5 fields")
        kind, id, name, sizes, extra = header
        if not (type(kind) is int and type(id) is int and type(name) is str and type(sizes) is list):
            expected = (("kind", int), ("id", int), ("name", str), ("sizes", list))
            for (field, kind_of), value in zip(expected, header, strict=False):
                if type(value) is not kind_of:
                    raise ProtocolError(f"header field {field!r} is a {type(value).__name__}")
        if extra is not None and type(extra) not in (int, float):
            raise ProtocolError(f"header field 'extra' is a {type(extra).__name__}")
        if len(sizes) > self.limits.max_buffers:
            raise ProtocolError(f"{len(sizes)} buffers > {self.limits.max_buffers}")
        total = 0
        for size in sizes:
            if type(size) is not int or size < 0:
                raise ProtocolError(f"bad buffer size {size!r}")
            total += size
        if total != body_length:
            raise ProtocolError(f"buffers of {total} bytes in a body of {body_length}")
        return header

    def _need(self, count: int) -> None:
        """Make the scratch buffer large enough for ``count`` bytes from ``_start``."""
        if self._start + count > len(self._scratch):
            self._make_room(count)

    def _make_room(self, count: int = 0) -> None:
        have = self._end - self._start
        if self._start and count <= len(self._scratch):
            self._view[:have] = bytes(self._view[self._start : self._end])
        else:
            grown = bytearray(max(count, 2 * len(self._scratch)))
            grown[:have] = self._view[self._start : self._end]
            self._scratch, self._view = grown, memoryview(grown)
        self._start, self._end = 0, have


def _no_extensions(code: int, data: bytes) -> Any:
    raise ProtocolError(f"extension type {code} not allowed in a header")
