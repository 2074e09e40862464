"""Tests of codecs of sets: golden bits, readable files, exact weights, and peers that lose no update."""

import asyncio
import struct
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ddlf.algorithms.set_merge import WeightSet, mean_by_trainings
from ddlf.errors import ConfigError
from ddlf.peers.merging import Part, mean_of_swaps, next_base
from ddlf.peers.peer import Peer
from ddlf.peers.plan import Plan
from ddlf.peers.served_model import Model
from ddlf.peers.serving import Served, check_sets
from ddlf.peers.sets import layout_of
from ddlf.peers.wire import Wire, check_codec
from ddlf.training.checkpoints.tensors import read
from tests.peers.test_server import LAYOUT, Added, Running, a_set, value

GOLDEN = [  # float32, bfloat16, float16
    (0x00000000, 0x0000, 0x0000),
    (0x80000000, 0x8000, 0x8000),
    (0x3F800000, 0x3F80, 0x3C00),  # 1
    (0xBF7FFFFF, 0xBF80, 0xBC00),  # just below 1 in magnitude
    (0x3F808000, 0x3F80, 0x3C04),  # 1 + 2^-8: a tie of bfloat16 to the even 1
    (0x3F818000, 0x3F82, 0x3C0C),  # 1 + 3 * 2^-8: a tie to the even 1 + 2^-6
    (0x3F801000, 0x3F80, 0x3C00),  # 1 + 2^-11: a tie of float16 to the even 1
    (0x3F803000, 0x3F80, 0x3C02),  # 1 + 3 * 2^-11: a tie to the even 1 + 2^-9
    (0x3F801001, 0x3F80, 0x3C01),  # just above the tie
    (0x477FE000, 0x4780, 0x7BFF),  # 65504, the largest half
    (0x477FEFFF, 0x4780, 0x7BFF),  # just below 65520
    (0x477FF000, 0x4780, 0x7C00),  # 65520 becomes infinite
    (0xC7800000, 0xC780, 0xFC00),  # -65536
    (0x7F7F7FFF, 0x7F7F, 0x7C00),
    (0x7F7F8000, 0x7F80, 0x7C00),  # becomes infinite
    (0x7F800000, 0x7F80, 0x7C00),
    (0xFF800000, 0xFF80, 0xFC00),
    (0x7FC00000, 0x7FC0, 0x7E00),
    (0x7F800001, 0x7FC0, 0x7E00),  # a NaN with the upper half of an infinity
    (0xFFA02000, 0xFFE0, 0xFF01),
    (0x38800000, 0x3880, 0x0400),  # 2^-14, the smallest normal half
    (0x387FFFFF, 0x3880, 0x0400),
    (0x387FC000, 0x3880, 0x03FF),
    (0xB8000000, 0xB800, 0x8200),  # -2^-15
    (0x33800000, 0x3380, 0x0001),  # 2^-24, the smallest half
    (0x33000000, 0x3300, 0x0000),  # 2^-25: a tie to 0
    (0x33000001, 0x3300, 0x0001),
    (0x33C00000, 0x33C0, 0x0002),  # 3 * 2^-25: a tie to the even 2^-23
    (0xB3000000, 0xB300, 0x8000),
    (0x00000001, 0x0000, 0x0000),  # the smallest float32
    (0x00008001, 0x0001, 0x0000),
    (0x80018000, 0x8002, 0x8000),
]
"""The bits of float32 values, and of their roundings to bfloat16 and float16."""
SPECIAL = np.array([bits for bits, _, _ in GOLDEN], np.uint32).view(np.float32)


def halves_of(values, codec):
    """Return the 16 bits of each value in an encoded set."""
    wire = Wire(layout_of({"w": values}), codec, [True])
    return np.frombuffer(wire.encode([values])[len(wire.layout.header) :], np.uint16)


@pytest.mark.parametrize(("codec", "column"), [("bfloat16", 1), ("float16", 2)])
def test_codec_rounds_to_the_golden_bits(codec, column):
    assert list(halves_of(SPECIAL, codec)) == [row[column] for row in GOLDEN]


def test_codec_has_the_bits_of_other_libraries():
    chance = np.random.default_rng(3)
    values = chance.integers(0, 2**32, 20_000, np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    assert (halves_of(values, "bfloat16") == values.astype(ml_dtypes.bfloat16).view(np.uint16)).all()
    values = chance.normal(size=20_000).astype(np.float32) * np.float32(2) ** chance.integers(-26, 15, 20_000)
    values = values[np.abs(values) < 65520].astype(np.float32)
    assert halves_of(values, "float16").tobytes() == struct.pack(f"<{len(values)}e", *values.tolist())


WEIGHTS = {
    "dense/kernel": np.linspace(-1, 1, 600, dtype=np.float32).reshape(20, 30),
    "dense/bias": np.array([0.1, 1e-9], np.float32),
    "norm/mean": np.array([1000.1], np.float32),
    "double": np.array([1 / 3], np.float64),
    "count": np.array(2**53, np.int64),
    "half": np.array([0.5], np.float16),
}
TRAINED = (True, True, False, True, False, True)


@pytest.mark.parametrize("codec", ["bfloat16", "float16"])
def test_encoded_set_has_half_of_the_bytes_and_keeps_all_other_weights(codec):
    exact = layout_of(WEIGHTS)
    wire = Wire(exact, codec, TRAINED)
    data = wire.encode(list(WEIGHTS.values()))
    assert len(data) == wire.bytes <= exact.bytes - 602 * 2 + 16
    arrays = read(data, Path("a set"))
    assert arrays.keys() == WEIGHTS.keys()
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        name: codec if name.startswith("dense") else array.dtype.name for name, array in WEIGHTS.items()
    }
    assert not wire.fault(data)
    for (name, array), back in zip(WEIGHTS.items(), wire.decode(data), strict=True):
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, arrays[name].astype(array.dtype))
        if not name.startswith("dense"):
            np.testing.assert_array_equal(back, array)
    assert wire.encode(wire.decode(data)) == data  # values are rounded only once
    assert "'dense/kernel' has the dtype F32" in wire.fault(exact.encode(list(WEIGHTS.values())))


def test_values_that_a_codec_makes_infinite_are_named():
    layout = layout_of({"w": SPECIAL})
    weights = [np.array([1, 65519.9, -65520, 70000], np.float32).repeat(8)[: SPECIAL.size]]
    assert Wire(layout, "float16", [True]).unfit(weights) == (
        "16 of 32 values of 'w' are 65,520 or more, which float16 makes infinite"
    )
    for codec, trained in (("float32", True), ("bfloat16", True), ("float16", False)):
        assert not Wire(layout, codec, [trained]).unfit(weights)
    assert "NaN or infinite" in Wire(layout, "bfloat16", [True]).unfit([SPECIAL])


@pytest.mark.parametrize("codec", ["int8", "int8-block:64", "topk:0.01", "powersgd", "delta:int8"])
def test_codecs_of_updates_are_refused_with_the_reason(codec):
    with pytest.raises(ConfigError, match="lost part follows with the next update") as error:
        Plan(codec=codec)
    assert error.value.hint == "use bfloat16, float16 or float32"


def test_unknown_codec_is_refused():
    with pytest.raises(ConfigError, match="no codec 'zip'"):
        check_codec("zip")


def served(weights, trained=(True,)):
    layout = layout_of(weights)
    model = Model(text="", layout=layout, first=layout.encode(list(weights.values())), trainable=trained)
    return Served(model, None, lambda weights: None)


def test_codec_without_effect_and_first_weights_beyond_it_are_refused():
    with pytest.raises(ConfigError, match="no effect: the model trains no float32 weights"):
        check_sets(Plan(codec="bfloat16"), served({"w": np.zeros(3)}))
    large = served({"w": np.full(3, 1e5, np.float32)})
    with pytest.raises(ConfigError, match="3 of 3 values of 'w'"):
        check_sets(Plan(codec="float16"), large)
    check_sets(Plan(codec="bfloat16"), large)


WIRE = Wire(LAYOUT, "bfloat16", (True, True))


def coded(number):
    return WIRE.encode(LAYOUT.decode(a_set(number)))


def values(data):
    return {float(value) for weight in WIRE.decode(data) for value in weight.reshape(-1)}


async def test_posted_sets_are_unchanged_and_computed_sets_are_exact_after_a_restart(tmp_path):
    async with Running(tmp_path, codec="bfloat16") as running:
        first, second = await running.peer(), await running.peer()
        assert first.set == coded(0.0)
        await first.post(coded(1.0))
        assert (await second.post(coded(2.0)))["answer"] == "merge"
        assert second.set == coded(1.0)
        await first.post(coded(1 + 2**-7))
        await running.server._command("merge", "")
        await running.until(lambda: running.server.ledger.base > 1)
        assert (await first.post(coded(9.0)))["answer"] == "replace"
        mean = (1.0 + 2.0 + 2 * (1 + 2**-7)) / 4  # weighted by trainings; the first set is outstanding
        assert (mean, values(first.set)) == (1.25 + 2**-8, {1.25})
        sets = dict(running.server.sets.travelling)
    async with Running(tmp_path, codec="bfloat16") as again:
        assert again.server.sets.travelling == sets
        base = again.server.ledger.base
        assert float(again.server.wire.decode(again.server.sets.exact(base))[0][0, 0]) == mean
        exact = await again.server.last_set()
        assert not LAYOUT.fault(exact)


@pytest.mark.parametrize("trainings", [(3, 0, 4), (0, 0, 0), (1, 1, 7)])
def test_mean_of_sets_read_one_by_one_has_the_bits_of_the_mean_by_trainings(trainings):
    chance, shapes = np.random.default_rng(1), [(20, 3), (), (4,)]
    sets = [[chance.normal(size=shape).astype(np.float32) for shape in shapes] for _ in trainings]
    sets = [[*arrays, np.array(number), np.array([-0.0], np.float32)] for number, arrays in enumerate(sets)]
    rows = list(zip(sets, trainings, strict=True))
    parts = [Part(read=partial(list, arrays), trainings=count, samples=1) for arrays, count in rows]
    expected = mean_by_trainings([WeightSet(weights=arrays, trainings=count) for arrays, count in rows])
    for actual, array in zip(mean_of_swaps(parts), expected.weights, strict=True):
        assert (actual.dtype, actual.shape, actual.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_rounded_base_keeps_its_bits_if_no_peer_has_trained():
    base = [np.full((3, 2), 1 + 2**-10, np.float32), np.zeros(2, np.float32)]
    rounded = WIRE.decode(WIRE.encode(base))
    assert rounded[0][0, 0] == 1
    parts = {number: Part(read=partial(list, rounded), trainings=1, samples=10) for number in (2, 3)}
    new_base, _, _ = next_base(Plan(way="rounds", merge="mean"), base, rounded, parts, [], (True, True))
    np.testing.assert_array_equal(new_base[0], base[0])


async def test_unrounded_set_is_refused_if_sets_are_rounded(tmp_path):
    async with Running(tmp_path, codec="float16") as running:
        peer = await running.peer()
        assert "a set of this model has" in (await peer.post(a_set(1.0)))["end"]["why"]
        other = await running.peer()
        rounded = Wire(LAYOUT, "bfloat16", (True, True)).encode(LAYOUT.decode(a_set(1.0)))
        assert "has the dtype BF16, and must have F16" in (await other.post(rounded))["why"]


class Steps(Added):
    """A training that adds an eighth of the distance between two bfloat16 numbers above 1 in a batch."""

    def batch(self, size):
        self.live = [array + np.float32(2**-10) for array in self.live]


async def test_updates_below_the_precision_of_the_codec_add_up_in_rounds(tmp_path):
    """Without error feedback, rounding would remove each update, and the weights would stay at 1."""
    first = Model(text="", layout=LAYOUT, first=a_set(1.0), trainable=(True, True))
    running = Running(tmp_path, model=first, codec="bfloat16", way="rounds", merge="mean", updates=1, quorum=2)
    async with running:
        links = [f"http://127.0.0.1:{running.port}/#{code}" for code in await running.server.invite(2)]
        peers = [Peer(link, lambda welcome: Steps(), say=lambda line: None) for link in links]
        await asyncio.gather(*(asyncio.to_thread(peer.run, most_updates=32) for peer in peers))
        await running.until(lambda: running.server.ledger.round >= 32)
        base = WIRE.decode(running.server.sets.exact(running.server.ledger.base))
        assert float(base[0][0, 0]) == pytest.approx(1 + 32 * 2**-10, abs=2**-7)
        assert value(running.server.model.first) == 1.0
