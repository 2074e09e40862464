"""Tests of slices of the weights: they are cut, taken and put back, and their steps have the bits of whole weights."""

import itertools

import numpy as np
import pytest

from ddlf.algorithms.codec import CODEC, peak_of
from ddlf.algorithms.encoding import decode_update, encode_parts, encode_update
from ddlf.algorithms.flat_weights import cut, cut_by_layer, overlapped
from ddlf.algorithms.merge import MERGE, merged
from ddlf.algorithms.outer import OUTER
from ddlf.errors import BadUpdate, ConfigError
from ddlf.training.exchanges.sharded.ranges import (
    crossed,
    cut_range,
    decode_slice,
    fits,
    pieces,
    runs,
    stepped,
    take_encoded,
    within,
    write_range,
)

CHANCE = np.random.default_rng(0)
MODEL = [
    CHANCE.normal(size=(41, 90)).astype("f4"),  # more than 90% of all
    np.asarray(0.5, "f4"),
    CHANCE.normal(size=(0, 3)).astype("f4"),
    CHANCE.normal(size=17).astype("f2"),
    np.arange(5),
    CHANCE.normal(size=(3, 7)).astype("f4"),
    np.array([True, False, True]),
    CHANCE.normal(size=300).astype("f4"),
]
TRAINABLE = [True, True, True, True, False, False, False, True]
SIZE = sum(w.size for w in MODEL)


def updates_of(slots, number):
    chance = np.random.default_rng((slots, number))
    return [
        [
            np.asarray(chance.normal(size=w.shape) * 10.0 ** chance.integers(-3, 2), w.dtype)
            if w.dtype.kind == "f"
            else np.ones_like(w)
            for w in MODEL
        ]
        for _ in range(slots)
    ]


def empty():
    return [np.zeros_like(w) for w in MODEL]


def same_bits(first, second):
    return [(a.dtype, a.shape, a.tobytes()) for a in first] == [(b.dtype, b.shape, b.tobytes()) for b in second]


# --- cuts -------------------------------------------------------------------------------------------------------------


def test_ten_values_on_three_shards_are_4_3_and_3():
    assert cut(10, 3) == [(0, 4), (4, 7), (7, 10)]


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 997])
def test_slices_cover_all_and_differ_by_at_most_one_value(shards):
    slices = cut(SIZE, shards)
    assert [begin for begin, _ in slices[1:]] == [end for _, end in slices[:-1]]
    assert (slices[0][0], slices[-1][1]) == (0, SIZE)
    lengths = {end - begin for begin, end in slices}
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("shards", [0, -1, 11])
def test_no_shards_or_more_than_values_are_refused(shards):
    with pytest.raises(ConfigError, match="10 values cannot be cut into"):
        cut(10, shards)


def test_cuts_by_layer_are_as_equal_as_layers_allow():
    sizes, layers = [100, 10, 50, 5, 60, 6, 0], ["a", "a", "b", "b", "c", "c", "d"]
    assert cut_by_layer(sizes, layers, 1) == [(0, 231)]
    assert cut_by_layer(sizes, layers, 2) == [(0, 110), (110, 231)]
    assert cut_by_layer(sizes, layers, 3) == [(0, 110), (110, 165), (165, 231)]
    with pytest.raises(ConfigError, match="3 layers cannot be cut into 4 shards"):
        cut_by_layer(sizes, layers, 4)


def test_a_layer_that_is_nearly_all_leaves_one_for_each_other_shard():
    sizes, layers = [1, 1, 1000, 1, 1], list("abcde")
    for shards in range(1, 6):
        slices = cut_by_layer(sizes, layers, shards)
        assert len(slices) == shards
        assert all(begin < end for begin, end in slices)
    assert cut_by_layer(sizes, layers, 5) == [(0, 1), (1, 2), (2, 1002), (1002, 1003), (1003, 1004)]


def test_pieces_of_a_slice_cover_it():
    assert pieces((3, 10), 3) == [(3, 6), (6, 9), (9, 10)]
    assert pieces((3, 3), 3) == []


def test_parts_within_a_slice_come_in_order_despite_copies():
    parts = [((5, 9), "b"), ((0, 5), "a"), ((9, 12), "c"), ((5, 9), "copy of b")]
    assert within((3, 10), parts) == [((3, 5), "a"), ((5, 9), "b"), ((9, 10), "c")]
    with pytest.raises(ConfigError, match="no range has the values 12 to 13"):
        within((10, 13), parts)


# --- taking and putting back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 997])
def test_taken_slices_are_views_and_make_up_the_whole(shards):
    row_of_all = empty()
    for part in cut(SIZE, shards):
        values = cut_range(MODEL, part)
        assert all(any(np.shares_memory(v, w) for w in MODEL) for v in values)
        assert sum(v.size for v in values) == part[1] - part[0]
        write_range(row_of_all, part, values)
    assert same_bits(row_of_all, MODEL)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda values: values[:-1],
        lambda values: [values[0][:-1], *values[1:]],
        lambda values: [values[0].astype("f8"), *values[1:]],
        lambda values: [values[0].tolist(), *values[1:]],
    ],
)
def test_slice_of_wrong_length_or_type_is_refused(wrong):
    row_of_all = empty()
    with pytest.raises(ConfigError, match=r"values 3,680 to 3,700 should be .*float32 \(10,\)"):
        write_range(row_of_all, (3680, 3700), wrong(cut_range(MODEL, (3680, 3700))))
    assert same_bits(row_of_all, empty())


@pytest.mark.parametrize("name", [*CODEC.names, "int8-block:100", "int4-block:7", "topk:0.3", "powersgd:rank=20"])
@pytest.mark.parametrize("shards", [1, 7, 50])
def test_slice_of_encoded_values_decodes_to_the_slice_of_decoded_ones(name, shards):
    encoded, _ = encode_update(CODEC.read(name), MODEL, [False] * len(MODEL))
    decoded = decode_update(encoded, MODEL)
    for part in cut(SIZE, shards):
        assert same_bits(decode_slice(take_encoded(encoded, MODEL, part), MODEL, part), cut_range(decoded, part))


LARGE = np.linspace(-1, 1, 700, dtype="f4")


@pytest.mark.parametrize("scale", [1.0, 65504.0, 1e-7, 3e-39, 1e30, 3.3e38, 3.4028e38, 0.0], ids=str)
def test_parts_are_encoded_with_the_peak_of_the_whole(scale):
    """The peak may be in another part, below the smallest normal number, or above the range of the codec."""
    codec, model = CODEC.read("float16"), [np.float32(scale) * LARGE, np.float32(7) * LARGE[:3], LARGE.astype("f2")]
    exact = [False] * len(model)
    encoded_whole, _ = encode_update(codec, model, exact)
    peaks = [max(peak_of(part) for part in np.array_split(w, 5)) for w in model]
    for part in cut(sum(w.size for w in model), 6):
        views, indices = cut_range(model, part), [i for i, _, _ in overlapped(model, part)]
        sizes, peaks_of_part = [model[i].nbytes for i in indices], [peaks[i] for i in indices]
        encoded = encode_parts(codec, views, sizes, [False] * len(indices), peaks_of_part)
        expected = take_encoded(encoded_whole, model, part)
        assert [sorted(payload) for payload in encoded["payloads"]] == [
            sorted(payload) for payload in expected["payloads"]
        ]
        assert same_bits(decode_slice(encoded, model, part), cut_range(decode_update(encoded_whole, model), part))


def test_adjacent_arrays_are_one_slice_and_crossings_are_in_order():
    assert runs(MODEL, {0, 1, 3, 5}) == [(0, 3708), (3713, 3734)]
    assert runs(MODEL, range(len(MODEL))) == [(0, SIZE)]
    assert runs(MODEL, {2}) == runs(MODEL, ()) == []
    assert crossed((10, 3720), [(0, 11), (11, 20), (3708, 3713), (3720, 3734)]) == [(10, 11), (11, 20), (3708, 3713)]


@pytest.mark.parametrize("name", ["int8", "int8-block", "int4-block", "topk:0.1", "powersgd"])
def test_slices_of_encoded_values_are_hardly_more_than_the_whole(name):
    codec = CODEC.read(name)
    encoded, _ = encode_update(codec, MODEL, [False] * len(MODEL))

    def size(message):
        return sum(array.nbytes for payload in message["payloads"] for array in payload.values())

    parts = [size(take_encoded(encoded, MODEL, part)) for part in cut(SIZE, 4)]
    # At each cut, both slices have the same block or matrix.
    overhead = 8192 if "block" in name or name == "powersgd" else 64
    assert sum(parts) <= size(encoded) + 3 * overhead


@pytest.mark.parametrize(
    "wrong",
    [
        lambda payload: {},
        lambda payload: {**payload, "places": payload["places"][:-1]},
        lambda payload: {**payload, "places": payload["places"] + np.uint16(3000)},
        lambda payload: {**payload, "places": payload["places"].astype("i8")},
    ],
)
def test_a_slice_with_places_outside_is_refused(wrong):
    encoded = take_encoded(encode_update(CODEC.read("topk:0.1"), MODEL, [False] * len(MODEL))[0], MODEL, (500, 1000))
    with pytest.raises(ConfigError, match="tensor 0: malformed payload"):
        decode_slice({**encoded, "payloads": [wrong(encoded["payloads"][0])]}, MODEL, (500, 1000))


@pytest.mark.parametrize("name", MERGE.names)
def test_a_merge_rule_fits_if_slices_give_the_bits_of_the_whole(name):
    rule, counts = MERGE.read(name), range(1, 10)
    chance = np.random.default_rng(1)
    updates = [chance.normal(size=400).astype("f4") * np.float32(10) ** (slot % 3) for slot in range(9)]
    (merged_row,) = merged(rule, [[update] for update in updates], counts)
    halves = [merged(rule, [[update[part]] for update in updates], counts)[0] for part in (slice(150), slice(150, 400))]
    assert fits(rule) == same_bits([merged_row], [np.concatenate(halves)])


def test_every_outer_optimizer_fits():
    assert all(fits(OUTER.read(name)) for name in OUTER.names)


# --- steps ------------------------------------------------------------------------------------------------------------


def rounds_of_shards(merge, outer, shards, slots, rounds, length):
    """Return weights and state after some rounds. Each slice is stepped alone, in pieces of ``length`` values."""
    weights = MODEL
    state_of_all = outer.init(MODEL)
    n = len(MODEL)
    states = [state_of_all[i : i + n] for i in range(0, len(state_of_all), n)]
    for number in range(rounds):
        updates = updates_of(slots, number)
        after, states_after = empty(), [empty() for _ in states]
        for part in itertools.chain.from_iterable(pieces(span, length) for span in cut(SIZE, shards)):
            indices = [i for i, _, _ in overlapped(MODEL, part)]
            state, values = stepped(
                merge,
                outer,
                [array for arrays in states for array in cut_range(arrays, part)],
                cut_range(weights, part),
                [(cut_range(update, part), 10 + slot) for slot, update in enumerate(updates)],
                [TRAINABLE[i] for i in indices],
                [MODEL[i].size for i in indices],
            )
            write_range(after, part, values)
            for i, arrays in enumerate(states_after):
                write_range(arrays, part, state[i * len(indices) : (i + 1) * len(indices)])
        weights, states = after, states_after
    return weights, [array for arrays in states for array in arrays]


def rounds_of_star(merge, outer, slots, rounds):
    weights, state = MODEL, outer.init(MODEL)
    for number in range(rounds):
        updates = updates_of(slots, number)
        state, weights = outer.update(state, weights, merged(merge, updates, range(10, 10 + slots)), TRAINABLE)
    return weights, state


MERGES = [name for name in MERGE.names if fits(MERGE.read(name))]
FITTING = [
    (merge, outer)
    for merge, outer in itertools.product(MERGES, OUTER.names)
    if fits(OUTER.read(outer)) and (merge == "mean" or outer in ("subtract", "fedadam"))
]


@pytest.mark.parametrize(("merge", "outer"), FITTING)
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_slices_give_the_bits_of_the_whole(merge, outer, shards):
    merge, outer = MERGE.read(merge), OUTER.read(outer)
    weights, state = rounds_of_shards(merge, outer, shards, 3, 3, 1000)
    expected, expected_state = rounds_of_star(merge, outer, 3, 3)
    assert same_bits(weights, expected)
    assert same_bits(state, expected_state)


@pytest.mark.parametrize("merge", MERGES)
def test_slice_of_one_value_has_the_bits_of_the_row(merge):
    """NumPy sums a single column of 9 or more values in another order than several columns."""
    merge, outer = MERGE.read(merge), OUTER.read("nesterov")
    updates = [[CHANCE.normal(size=20).astype("f4") * np.float32(10) ** (slot % 5)] for slot in range(33)]
    weights = [CHANCE.normal(size=20).astype("f4")]
    state = outer.init(weights)
    (expected_state,), (expected,) = outer.update(state, weights, merged(merge, updates, range(1, 34)), [True])
    for part in pieces((0, 20), 1):
        parts = [(cut_range(update, part), 1 + slot) for slot, update in enumerate(updates)]
        (velocity,), (value,) = stepped(
            merge, outer, cut_range(state, part), cut_range(weights, part), parts, [True], [20]
        )
        assert (value, velocity) == (expected[part[0]], expected_state[part[0]])


def test_a_slice_with_an_infinite_or_nan_value_is_not_merged():
    bad = [np.array([1, np.nan], "f4")]
    weights = [np.zeros(2, "f4")]
    with pytest.raises(BadUpdate, match="slot 1: 1 of 2 values"):
        stepped(MERGE.read("mean"), OUTER.read("subtract"), [], weights, [(weights, 1), (bad, 1)], [True], [2])
