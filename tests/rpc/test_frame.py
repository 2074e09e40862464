"""Tests of encoding and decoding frames.

The decoder gives the same frames for any split of the stream, and refuses an invalid frame before it allocates memory.
"""

import struct
from random import Random

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.errors import FrameTooLarge, ProtocolError
from ddlf.rpc.messages import (
    CONTROL_LIMITS,
    JOIN_BELOW_BYTES,
    MAX_HEADER_BYTES,
    PREFIX,
    SCRATCH_BYTES,
    Frame,
    FrameDecoder,
    Limits,
    encode_frame,
)

LIMITS = Limits()


class Recorder:
    """An allocator that records the requested sizes."""

    def __init__(self):
        self.sizes = []

    def __call__(self, size):
        self.sizes.append(size)
        return bytearray(size)


def feed(decoder: FrameDecoder, data: bytes, chunk: int, frames: list[Frame] | None = None) -> list[Frame]:
    """Give the decoder ``data``, at most ``chunk`` bytes at once like a kernel, and add the decoded frames to ``frames``."""
    frames, at = [] if frames is None else frames, 0
    while at < len(data):
        memory = decoder.wants()
        assert len(memory) > 0
        count = min(chunk, len(memory), len(data) - at)
        memory[:count] = data[at : at + count]
        for complete in decoder.received(count):
            frames.append(complete)
        at += count
    return frames


def wire(*frames: Frame) -> bytes:
    return b"".join(b"".join(encode_frame(f.kind, f.id, f.name, f.buffers, f.extra, limits=LIMITS)) for f in frames)


def frame(*buffers, kind=1, id=7, name="run", extra=None) -> Frame:
    return Frame(kind, id, name, extra, list(buffers))


def raw(header: bytes, body=b"", *, flags=0, body_length=None) -> bytes:
    return PREFIX.pack(len(header), flags, len(body) if body_length is None else body_length) + header + body


# --- Valid frames ----------------------------------------------------------------------------------------------------

frames = st.builds(
    Frame,
    st.integers(0, 255),
    st.integers(0, 2**64 - 1),
    st.text(max_size=20),
    st.none() | st.floats(allow_nan=False) | st.integers(0, 100),
    st.lists(
        st.binary(max_size=50)
        | st.builds(lambda size, byte: bytes([byte]) * size, st.integers(0, 3 * SCRATCH_BYTES), st.integers(0, 255)),
        max_size=5,
    ),
)


@given(st.lists(frames, max_size=4), st.sampled_from([1, 2, 3, 7, 16, 100, 1 << 14, 1 << 15, 1 << 30]))
def test_any_split_of_the_stream_gives_the_same_frames(sent, chunk):
    data = wire(*sent)
    if chunk < 16 and len(data) > 10_000:
        chunk = 1009
    decoder = FrameDecoder(LIMITS)
    assert feed(decoder, data, chunk) == sent
    assert not decoder.mid_frame


@pytest.mark.parametrize("at_once", [1, 10**9])
def test_a_stream_may_arrive_byte_by_byte_or_all_at_once(at_once):
    sent = [frame(b"value", b"a" * 20_000, b"", b"b" * 17_000), frame(), frame(b"c" * 40_000)]
    assert feed(FrameDecoder(LIMITS), wire(*sent), at_once) == sent


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=30), st.integers(0, 9999))
def test_random_splits_give_the_same_frames(cuts, seed):
    random = Random(seed)
    sent = [
        frame(random.randbytes(size), random.randbytes(999)) for size in (9, 16_383, 16_384, 16_385, 32_768, 99_999)
    ]
    data, decoder, frames, at = wire(*sent), FrameDecoder(LIMITS), [], 0
    while at < len(data):
        size = cuts[len(frames) % len(cuts)]
        frames += feed(decoder, data[at : at + size], 10**9)
        at += size
    assert frames == sent


def test_the_header_may_have_its_full_size():
    sent = [frame(name="n" * (MAX_HEADER_BYTES - 8)), frame(b"after")]
    assert PREFIX.unpack_from(wire(sent[0]))[0] == MAX_HEADER_BYTES
    for chunk in (1, 1000, 10**9):
        assert feed(FrameDecoder(LIMITS), wire(*sent), chunk) == sent


def test_four_thousand_buffers_arrive_in_one_frame():
    sent = frame(*[b"%d" % number for number in range(4096)])
    assert feed(FrameDecoder(LIMITS), wire(sent), 1000) == [sent]
    with pytest.raises(FrameTooLarge, match="4,097 arrays is over the receiver's limit of 4,096; stack small arrays"):
        wire(frame(*[b""] * 4097))


def test_a_large_buffer_is_received_into_memory_of_its_exact_size_and_not_copied():
    allocate = Recorder()
    decoder = FrameDecoder(LIMITS, allocate)
    (received,) = feed(decoder, wire(frame(b"tree", b"x" * 100_000, b"y" * 5, b"z" * 50_000)), 10**9)
    assert allocate.sizes == [100_000, 50_000]
    assert [len(buffer) for buffer in received.buffers] == [4, 100_000, 5, 50_000]


def test_a_large_buffer_is_written_directly_to_its_memory_and_not_to_the_scratch_memory():
    allocated = []
    decoder = FrameDecoder(LIMITS, lambda size: allocated.append(bytearray(size)) or allocated[-1])
    data = wire(frame(b"", b"x" * 100_000))
    feed(decoder, data[:200], 200)
    assert decoder.direct
    memory = decoder.wants()
    memory[:3] = b"abc"
    assert b"abc" in allocated[0]
    assert len(memory) < 100_000


def test_a_small_buffer_is_copied_out_of_the_scratch_memory():
    decoder = FrameDecoder(LIMITS)
    (first,) = feed(decoder, wire(frame(b"first")), 10**9)
    feed(decoder, wire(frame(b"other")), 10**9)
    assert first.buffers == [b"first"]
    first.buffers[0][:1] = b"F"


def test_large_buffers_are_passed_on_and_small_ones_joined_so_that_the_kernel_gets_few_pieces():
    large, small = bytearray(JOIN_BELOW_BYTES + 1), b"s" * JOIN_BELOW_BYTES
    pieces = encode_frame(1, 1, "", [small, small, large, small, large], limits=LIMITS)
    assert [piece is large for piece in pieces] == [False, True, False, True]
    assert len(encode_frame(1, 1, "", [small] * 50, limits=LIMITS)) == 1


def test_the_scratch_memory_of_the_decoder_stays_small():
    decoder = FrameDecoder(LIMITS)
    sent = [frame(b"v" * 16_000, b"w" * 16_000, name="n" * 60_000), *[frame(b"x" * 16_384)] * 50, frame(b"y" * 10**6)]
    for chunk in (997, 10**9):
        assert len(feed(decoder, wire(*sent), chunk)) == len(sent)
    assert len(decoder._scratch) <= PREFIX.size + MAX_HEADER_BYTES


def test_mid_frame_is_true_from_the_first_byte_to_the_last():
    data = wire(frame(b"tree", b"x" * 20_000))
    decoder = FrameDecoder(LIMITS)
    assert not decoder.mid_frame
    for byte in data[:-1]:
        assert feed(decoder, bytes([byte]), 1) == []
        assert decoder.mid_frame
    assert len(feed(decoder, data[-1:], 1)) == 1
    assert not decoder.mid_frame


# --- Limits of the sender --------------------------------------------------------------------------------------------


def test_a_frame_at_the_receivers_limit_is_sent_and_one_above_it_is_refused():
    limits = Limits(max_body_bytes=1000)
    encode_frame(1, 1, "", [b"x" * 600, b"y" * 400], limits=limits)
    with pytest.raises(FrameTooLarge) as caught:
        encode_frame(1, 1, "", [b"x" * 600, b"y" * 401], limits=limits)
    assert str(caught.value) == (
        "a message of 1,001 bytes is over the receiver's limit of 1,000; "
        "send it in parts, or raise max_message_bytes on both sides"
    )
    with pytest.raises(FrameTooLarge, match=r"a header of 5,0\d\d bytes is over the limit of 4,096"):
        encode_frame(1, 1, "n" * 5000, [], limits=CONTROL_LIMITS)


# --- Invalid frames (each is refused with this sentence, before the decoder allocates memory) -------------------------


def header(*fields) -> bytes:
    return msgpack.packb(list(fields))


GOOD = header(1, 7, "run", [3], None)
REFUSED = {
    "B72 header of length 0": (raw(b""), "empty header"),
    "B73 header of 64 KiB and 1": (PREFIX.pack(65537, 0, 0), "header 65537 > 65536 bytes"),
    "B73 header of 4 GiB": (PREFIX.pack(2**32 - 1, 0, 0), "header 4294967295 > 65536 bytes"),
    "B74 body above the limit": (PREFIX.pack(9, 0, 4 * 1024**3 + 1), "message 4294967297 > 4294967296 bytes"),
    "B74 body of 16 EiB": (PREFIX.pack(9, 0, 2**64 - 1), "message 18446744073709551615 > 4294967296 bytes"),
    "B75 unknown flag": (raw(GOOD, b"abc", flags=0x80), "unknown flags 0x80"),
    "B75 all flags": (raw(GOOD, b"abc", flags=2**32 - 1), "unknown flags 0xffffffff"),
    "B76 truncated header": (raw(GOOD[:-1]), "header cannot be read: ValueError: Unpack failed: incomplete input"),
    "B77 bytes after the header": (
        raw(GOOD + b"\0\0\0"),
        "header cannot be read: ExtraData: unpack(b) received extra data.",
    ),
    "B78 reserved byte": (raw(b"\xc1"), "header cannot be read: FormatError: "),
    "B78 text that is not UTF-8": (raw(b"\x95\x01\x07\xa1\xff\x90\xc0"), "header cannot be read: UnicodeDecodeError"),
    "B78 2,000 arrays in each other": (raw(b"\x91" * 2000 + b"\x01"), "header cannot be read: StackError: "),
    "B78 map with numbers as keys": (
        raw(b"\x81\x01\x02"),
        "header cannot be read: ValueError: int is not allowed for map key",
    ),
    "B78 array that claims 4 Gi items": (
        raw(b"\xdd\xff\xff\xff\xff"),
        "header cannot be read: ValueError: 4294967295 exceeds",
    ),
    "B78 text that claims 4 GiB": (raw(b"\xdb\xff\xff\xff\xff"), "header cannot be read: ValueError"),
    "B79 map": (raw(msgpack.packb({"kind": 1})), "header is not an array of 5 fields"),
    "B79 map with a key twice": (raw(b"\x82\xa1a\x01\xa1a\x02"), "header is not an array of 5 fields"),
    "B80 extension": (
        raw(header(1, 7, msgpack.ExtType(42, b""), [], None)),
        "extension type 42 not allowed in a header",
    ),
    "B80 timestamp": (raw(header(1, 7, "", [], msgpack.Timestamp(1))), "header field 'extra' is a Timestamp"),
    "B81 number": (raw(b"\x07"), "header is not an array of 5 fields"),
    "B81 field missing": (raw(header(1, 7, "run", [])), "header is not an array of 5 fields"),
    "B81 field too many": (raw(header(1, 7, "run", [], None, 0)), "header is not an array of 5 fields"),
    "B81 kind is text": (raw(header("1", 7, "run", [], None)), "header field 'kind' is a str"),
    "B81 kind is a bool": (raw(header(True, 7, "run", [], None)), "header field 'kind' is a bool"),
    "B81 id is a float": (raw(header(1, 7.0, "run", [], None)), "header field 'id' is a float"),
    "B81 id is nothing": (raw(header(1, None, "run", [], None)), "header field 'id' is a NoneType"),
    "B81 name is bytes": (raw(header(1, 7, b"run", [], None)), "header field 'name' is a bytes"),
    "B81 sizes is a number": (raw(header(1, 7, "run", 3, None), b"abc"), "header field 'sizes' is a int"),
    "B81 extra is a list": (raw(header(1, 7, "run", [], [1])), "header field 'extra' is a list"),
    "B86 sizes above the body": (raw(header(1, 7, "run", [9, 9], None), b"abc"), "buffers of 18 bytes in a body of 3"),
    "B86 sizes below the body": (raw(header(1, 7, "run", [1], None), b"abc"), "buffers of 1 bytes in a body of 3"),
    "B86 huge size": (
        raw(header(1, 7, "run", [2**63], None), b"abc"),
        "buffers of 9223372036854775808 bytes in a body of 3",
    ),
    "B86 negative size": (raw(header(1, 7, "run", [-3, 6], None), b"abc"), "bad buffer size -3"),
    "B86 size is a float": (raw(header(1, 7, "run", [3.0], None), b"abc"), "bad buffer size 3.0"),
    "B86 size is a bool": (raw(header(1, 7, "run", [True], None), b"a"), "bad buffer size True"),
    "B86 too many buffers": (raw(header(1, 7, "run", [0] * 4097, None)), "4097 buffers > 4096"),
}


@pytest.mark.parametrize("chunk", [1, 10**9])
@pytest.mark.parametrize("case", REFUSED)
def test_an_invalid_frame_is_refused_before_memory_is_allocated(case, chunk):
    data, sentence = REFUSED[case]
    allocate = Recorder()
    with pytest.raises(ProtocolError) as caught:
        feed(FrameDecoder(LIMITS, allocate), data, chunk)
    assert sentence in str(caught.value)
    assert allocate.sizes == []


@pytest.mark.parametrize("chunk", [1, 100, 10**9])
def test_the_frames_before_an_invalid_one_arrive_for_any_split(chunk):
    sent = [frame(b"one"), frame(b"two")]
    frames = []
    with pytest.raises(ProtocolError, match="empty header"):
        feed(FrameDecoder(LIMITS), wire(*sent) + raw(b""), chunk, frames)
    assert frames == sent


def test_a_false_size_allocates_only_one_buffer_at_a_time():
    allocate = Recorder()
    sizes = [1024**2] * 4
    decoder = FrameDecoder(LIMITS, lambda size: allocate(0) or bytearray(size))
    feed(decoder, raw(header(1, 7, "run", sizes, None), body_length=sum(sizes)), 10**9)
    assert len(allocate.sizes) == 1


def test_the_control_connection_accepts_no_arrays_and_no_large_message():
    for data, sentence in (
        (raw(header(1, 7, "", [1, 1], None), b"ab"), "2 buffers > 1"),
        (PREFIX.pack(9, 0, 1024**2 + 1), "message 1048577 > 1048576 bytes"),
        (PREFIX.pack(4097, 0, 0), "header 4097 > 4096 bytes"),
    ):
        with pytest.raises(ProtocolError, match=sentence):
            feed(FrameDecoder(CONTROL_LIMITS), data, 10**9)


@given(st.binary(max_size=300), st.integers(1, 300))
def test_any_bytes_give_frames_or_a_protocol_error(data, chunk):
    for stream in (data, raw(data), raw(GOOD, b"abc") + data, struct.pack("<IIQ", len(data), 0, 3) + data + b"abc"):
        try:
            feed(FrameDecoder(Limits(max_body_bytes=10_000)), stream, chunk)
        except ProtocolError:
            continue


# --- The document ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ping-request", Frame(1, 7, "ping", None, [b"\x92\x90\x80"])),
        ("ping-result", Frame(2, 7, "", None, [b"\xc0"])),
        ("cancel", Frame(4, 9, "", None, [])),
    ],
)
def test_the_frames_of_the_document_equal_the_encoded_ones(written_bytes, name, expected):
    assert wire(expected) == written_bytes[name]
    assert feed(FrameDecoder(CONTROL_LIMITS), written_bytes[name], 1) == [expected]


def test_the_frame_with_an_array_in_the_document_equals_the_encoded_one(written_bytes):
    begin, memory = written_bytes["array-frame"], bytes(4096)
    sent = frame(written_bytes["large-array"], memory, kind=2, id=8, name="")
    assert wire(sent) == begin + memory
    assert feed(FrameDecoder(LIMITS), begin + memory, 100) == [sent]


@given(st.lists(st.sampled_from([0, 1, 100, JOIN_BELOW_BYTES, JOIN_BELOW_BYTES + 1, 50_000]), max_size=6))
def test_no_piece_is_empty(sizes):
    """A kernel takes no bytes of an empty piece, so a loop that sends until all pieces are taken would never end."""
    pieces = encode_frame(1, 7, "run", [bytes(size) for size in sizes], limits=Limits())
    assert all(len(piece) for piece in pieces)
    assert sum(map(len, pieces)) > sum(sizes)
