import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ddlf.algorithms.codec import (
    CODEC,
    BFloat16,
    Float16,
    Float32,
    Int8,
    TopK,
)
from ddlf.algorithms.encoding import apply_delta, decode_update, encode_delta, encode_update, relative_error
from ddlf.errors import ConfigError

CODECS = [Float32(), Float16(), BFloat16(), Int8(), Int8(block=4096), Int8(block=3), TopK(), TopK(fraction=1)]
every_codec = pytest.mark.parametrize("code", CODECS, ids=lambda code: code.name)
lossy_codec = pytest.mark.parametrize("code", CODECS[1:], ids=lambda code: code.name)
biased_codec = pytest.mark.parametrize("code", CODECS[3:], ids=lambda code: code.name)

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=12)
moderate = hnp.arrays(np.float32, shapes, elements=st.floats(-1000, 1000, width=32))
anything = hnp.arrays(np.float32, shapes, elements=st.floats(width=32))

TOO_SMALL = 127 * float(np.finfo(np.float32).smallest_normal)
"""Int8 sends blocks up to this magnitude as zeros."""


def there_and_back(code, tensor):
    payload, _ = code.encode(tensor)
    return code.decode(payload, tensor.shape)


def updates_of_a_cnn(rounds=1, seed=0):
    """Updates with heavy tails in the shapes of a small CNN with BatchNorm and a counter."""
    random = np.random.default_rng(seed)
    shapes = [(3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (300, 64), (64,), ()]
    for _ in range(rounds):
        tensors = [np.asarray(random.laplace(scale=1e-3, size=shape), np.float32) for shape in shapes]
        yield [*tensors, np.array([random.integers(100)], np.int64)]


EXACT = [False, False, False, False, False, True, True, False]


# --- one tensor -------------------------------------------------------------------------------------------------------


@every_codec
@given(tensor=anything)
def test_shape_and_type_survive_for_every_tensor(code, tensor):
    decoded = there_and_back(code, tensor)
    assert isinstance(decoded, np.ndarray)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, np.float32)


@every_codec
@given(tensor=anything)
def test_a_non_finite_value_never_becomes_a_finite_tensor(code, tensor):
    if not np.isfinite(tensor).all():
        assert not np.isfinite(there_and_back(code, tensor)).all()


@every_codec
@given(tensor=anything)
def test_finite_values_within_range_stay_finite(code, tensor):
    if tensor.size and not np.abs(tensor).max() <= code.largest:
        return
    assert np.isfinite(there_and_back(code, tensor)).all()


@every_codec
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1000,), (4096,), (4097,), (2, 4096)])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -0.25])
def test_constant_zero_single_and_empty_tensors_survive(code, shape, value):
    tensor = np.full(shape, value, np.float32)
    decoded = there_and_back(code, tensor)
    if isinstance(code, TopK):
        sent = math.ceil(code.fraction * tensor.size)
        assert np.count_nonzero(decoded) == (sent if value else 0)
        assert set(decoded.ravel().tolist()) <= {0.0, value}
    else:
        assert np.array_equal(decoded, tensor)


@every_codec
@given(tensor=moderate)
def test_the_argument_is_not_modified(code, tensor):
    before = tensor.copy()
    code.encode(tensor, np.ones_like(tensor))
    assert np.array_equal(tensor, before)


@every_codec
def test_a_tensor_that_is_not_contiguous_is_encoded_by_its_values(code):
    tensor = np.arange(24, dtype=np.float32).reshape(4, 6).T[::2]
    assert np.array_equal(there_and_back(code, tensor), there_and_back(code, tensor.copy()))


@every_codec
def test_a_codec_is_found_by_its_name(code):
    assert CODEC.read(code.name) == code


def test_short_names_have_the_documented_parameters():
    assert CODEC.read("int8-block") == CODEC.read("int8-block:4096") == Int8(block=4096)
    assert CODEC.read("topk") == CODEC.read("topk:0.01") == TopK(fraction=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "int4",
        "float32:1",
        "int8:4096",
        "int8-block:",
        "int8-block:0",
        "int8-block:x",
        "topk:0",
        "topk:2",
        "topk:nan",
    ],
)
def test_an_unknown_name_or_parameter_is_refused(name):
    with pytest.raises(ConfigError):
        CODEC.read(name)


def test_only_codecs_that_drop_small_values_ask_for_error_feedback():
    assert [code.name for code in CODECS if code.biased] == [
        "int8",
        "int8-block:4096",
        "int8-block:3",
        "topk:0.01",
        "topk:1",
    ]


# --- formats ----------------------------------------------------------------------------------------------------------


@given(tensor=hnp.arrays(np.uint32, 200, elements=st.integers(0, 2**32 - 1)))
def test_bfloat16_has_the_bits_of_ml_dtypes_for_every_bit_pattern(tensor):
    values = tensor.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    found = BFloat16().pack(values)["values"]
    number = ~np.isnan(values)
    assert np.array_equal(found[number], expected.view(np.uint16)[number])
    assert np.isnan(BFloat16().decode({"values": found}, (200,))[~number]).all()


def test_bfloat16_rounds_half_to_even():
    # 8 significant bits: between 1 and 2 the step is 2**-7
    step = 2.0**-7
    tensor = np.float32([1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2**-23, -1 - step / 2, 3.4e38])
    assert there_and_back(BFloat16(), tensor).tolist() == [1, 1 + 2 * step, 1 + step, -1, math.inf]
    assert BFloat16().pack(np.float32([1.0, -2.0]))["values"].tolist() == [0x3F80, 0xC000]


def test_a_nan_with_only_low_bits_stays_a_nan_in_bfloat16():
    tensor = np.array([0x7F800001, 0xFF80FFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(there_and_back(BFloat16(), tensor)).all()


@given(tensor=hnp.arrays(np.uint32, 200, elements=st.integers(0, 2**32 - 1)))
def test_float16_rounds_as_numpy_does_for_every_bit_pattern(tensor):
    values = tensor.view(np.float32)
    payload = Float16().pack(values)
    with np.errstate(all="ignore"):
        expected = (values / payload["unit"]).astype(np.float16)
    assert np.array_equal(payload["halves"], expected, equal_nan=True)


@pytest.mark.parametrize("size", [1e-42, 1e-38, 1e-30, 1e-12, 1e-8, 1e-6, 1e-3, 1.0, 1e4, 1e6, 1e37])
def test_float16_keeps_small_and_large_tensors_alike(size):
    tensor = np.float32(np.random.default_rng(0).normal(size=10_000) * size)
    limit = 1e-3 if size > 1e-38 else 1e-2  # float32 itself has few bits down there
    assert relative_error([tensor], [there_and_back(Float16(), tensor)]) < limit


def test_the_unit_of_float16_changes_no_bit_of_what_a_half_holds_well():
    tensor = np.float32(np.random.default_rng(0).normal(size=10_000))
    tensor = tensor[np.abs(tensor) > 2.0**-14]
    assert np.array_equal(there_and_back(Float16(), tensor), tensor.astype(np.float16).astype(np.float32))


def test_float16_has_the_largest_magnitude_near_the_end_of_its_range():
    payload = Float16().pack(np.float32([1e-8, -3e-9, 0]))
    assert payload["unit"].tolist() == [2.0**-41]
    assert payload["halves"].tolist() == [21984.0, -6596.0, 0.0]
    assert Float16().pack(np.float32([]))["unit"].tolist() == [1]
    assert Float16().pack(np.float32([0, 0]))["unit"].tolist() == [1]


def test_float16_rounds_as_numpy_does_around_all_its_subnormals():
    halves = np.arange(2049, dtype=np.float32) * np.float32(2.0**-24)
    middles = halves + np.float32(2.0**-25)
    values = np.concatenate(
        [halves, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(1))]
    )
    values = np.concatenate([values, -values])
    values = np.append(values, np.float32(2.0**14))  # so that the unit is 1
    payload = Float16().pack(values)
    assert payload["unit"].tolist() == [1]
    assert np.array_equal(payload["halves"], values.astype(np.float16))


@pytest.mark.parametrize("block", [None, 7])
@given(tensor=moderate)
def test_int8_moves_no_value_by_more_than_half_a_step(block, tensor):
    code = Int8(block=block)
    decoded = there_and_back(code, tensor).ravel()
    values = tensor.ravel()
    for start in range(0, values.size, block or max(1, values.size)):
        part = slice(start, start + (block or values.size))
        step = np.abs(values[part]).max().astype(np.float64) / 127
        assert np.abs(values[part].astype(np.float64) - decoded[part]).max() <= step / 2 * (1 + 1e-4) + TOO_SMALL


def test_int8_gives_the_numbers_computed_by_hand():
    payload, error = Int8().encode(np.float32([-2.54, 1.0, 0.011, 0.009, 0.0]))
    assert payload["steps"].tolist() == [-127, 50, 1, 0, 0]  # scale 0.02
    assert payload["scales"].tolist() == pytest.approx([0.02])
    assert error.tolist() == pytest.approx([0, 0, -0.009, 0.009, 0], abs=1e-6)


def test_int8_blocks_have_a_scale_each_and_the_last_may_be_shorter():
    payload, _ = Int8(block=2).encode(np.float32([127, 1, 254, 2, 381]))
    assert payload["scales"].tolist() == [1, 2, 3]
    assert payload["steps"].tolist() == [127, 1, 127, 1, 127]


def test_int8_confines_a_nan_to_its_block():
    decoded = there_and_back(Int8(block=2), np.float32([1, 1, np.nan, 1, 1]))
    assert np.isnan(decoded).tolist() == [False, False, True, True, False]


def test_int8_survives_the_extremes_of_float32():
    for largest in (Int8.largest, 1e-37, 1e-44):
        decoded = there_and_back(Int8(), np.float32([largest, -largest, largest / 3]))
        assert np.isfinite(decoded).all()
        assert np.abs(decoded - np.float32([largest, -largest, largest / 3])).max() <= max(largest / 254, TOO_SMALL)


def test_blocks_lose_less_than_one_scale_for_the_whole_tensor():
    update = [np.float32(np.repeat([1, 10], 8192) * np.random.default_rng(0).normal(size=16_384))]
    whole, blocks = ([there_and_back(code, update[0])] for code in (Int8(), Int8(block=4096)))
    quiet = [update[0][:8192]]
    assert relative_error(quiet, [blocks[0][:8192]]) < relative_error(quiet, [whole[0][:8192]]) / 5


@given(tensor=moderate, fraction=st.floats(0.01, 1))
def test_topk_sends_exactly_the_entries_largest_in_magnitude(tensor, fraction):
    payload = TopK(fraction=fraction).pack(tensor)
    by_magnitude = np.argsort(-np.abs(tensor.ravel()), kind="stable")  # of equal ones the first
    assert payload["places"].tolist() == sorted(by_magnitude[: math.ceil(fraction * tensor.size)].tolist())
    assert np.array_equal(payload["values"], tensor.ravel()[payload["places"]])


def test_topk_gives_the_numbers_computed_by_hand():
    payload, error = TopK(fraction=0.5).encode(np.float32([1, -5, 2, 3, 0]), np.float32([0, 0, 4, 0, 0]))
    assert payload["places"].tolist() == [1, 2, 3]
    assert payload["values"].tolist() == [-5, 6, 3]
    assert error.tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize(("size", "dtype"), [(256, np.uint8), (257, np.uint16), (65_537, np.uint32)])
def test_topk_places_have_the_smallest_type(size, dtype):
    payload = TopK().pack(np.arange(size, dtype=np.float32))
    assert payload["places"].dtype == dtype
    assert payload["places"][-1] == size - 1


# --- error feedback ---------------------------------------------------------------------------------------------------


@biased_codec
@settings(max_examples=40)
@given(tensors=hnp.arrays(np.float32, (8, 30), elements=st.floats(-10, 10, width=32)))
def test_the_sum_of_what_arrives_is_the_sum_of_what_was_sent_up_to_the_last_error(code, tensors):
    error, arrived = None, np.zeros(30)
    for tensor in tensors:
        payload, error = code.encode(tensor, error)
        arrived += code.decode(payload, tensor.shape)
    np.testing.assert_allclose(arrived + error, tensors.sum(axis=0, dtype=np.float64), atol=1e-3)


@biased_codec
def test_a_value_too_small_to_send_gets_through_in_time(code):
    tensor, error, arrived = np.full(200, 1e-4, np.float32), None, np.zeros(200)
    tensor[0] = 1
    for _ in range(1000):
        payload, error = code.encode(tensor, error)
        arrived += code.decode(payload, tensor.shape)
    np.testing.assert_allclose(arrived[1:].mean(), 0.1, rtol=0.25)


@lossy_codec
def test_a_non_finite_value_does_not_stay_in_the_error(code):
    tensor = np.ones(10, np.float32)
    tensor[3:5] = np.nan, np.inf
    _, error = code.encode(tensor, np.zeros(10, np.float32))
    payload, _ = code.encode(np.ones(10, np.float32), error)
    assert np.isfinite(code.decode(payload, (10,))).all()


def test_an_error_left_by_another_codec_is_sent_and_gone():
    payload, error = Float32().encode(np.float32([1]), np.float32([0.5]))
    assert payload["values"].tolist() == [1.5]
    assert error is None


# --- all tensors of a model -------------------------------------------------------------------------------------------


def data_only(value):
    """Whether a value is made of what the wire carries exactly, by exact type."""
    if type(value) in (dict, list, tuple):
        return all(map(data_only, value.values() if type(value) is dict else value))
    return type(value) in (str, int, float, np.ndarray)


@every_codec
def test_an_encoded_update_is_made_of_plain_data(code):
    (tensors,) = updates_of_a_cnn()
    encoded, _ = encode_update(code, tensors, EXACT)
    assert data_only(encoded)


@every_codec
def test_statistics_counters_and_small_tensors_arrive_exactly(code):
    (tensors,) = updates_of_a_cnn()
    encoded, errors = encode_update(code, tensors, EXACT)
    decoded = decode_update(encoded, like=tensors)
    for i, (sent, arrived) in enumerate(zip(tensors, decoded, strict=True)):
        assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
        if EXACT[i] or sent.dtype != np.float32 or sent.nbytes < 1024:
            assert arrived.tobytes() == sent.tobytes()
            assert errors[i] is None


@every_codec
def test_every_tensor_can_be_asked_to_arrive_exactly(code):
    (tensors,) = updates_of_a_cnn()
    encoded, errors = encode_update(code, tensors, [True] * len(tensors))
    assert relative_error(tensors, decode_update(encoded, like=tensors)) == 0
    assert errors == [None] * len(tensors)


@every_codec
def test_nothing_is_lost_over_many_rounds_but_the_last_error(code):
    errors, sent, arrived = None, 0.0, 0.0
    for tensors in updates_of_a_cnn(rounds=30):
        encoded, errors = encode_update(code, tensors, EXACT, errors)
        sent = sent + tensors[4].astype(np.float64)
        arrived = arrived + decode_update(encoded, like=tensors)[4].astype(np.float64)
    if code.biased:
        arrived = arrived + errors[4]
        np.testing.assert_allclose(arrived, sent, atol=1e-6)
    else:
        assert relative_error([sent], [arrived]) < 0.002


@lossy_codec
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_broken_update_arrives_broken_and_leaves_no_trace(code, value):
    (tensors,) = updates_of_a_cnn()
    broken = [tensor.copy() for tensor in tensors]
    broken[4][5, 6:9] = value
    _, errors = encode_update(code, tensors, EXACT)
    encoded, errors = encode_update(code, broken, EXACT, errors)
    assert (~np.isfinite(decode_update(encoded, like=tensors)[4])).sum() == 3  # the right number for the report
    encoded, _ = encode_update(code, tensors, EXACT, errors)
    assert np.isfinite(decode_update(encoded, like=tensors)[4]).all()


def test_a_value_beyond_the_range_of_a_codec_arrives_exactly():
    tensors = [np.full(1000, 3.402e38, np.float32)]
    encoded, _ = encode_update(Float16(), tensors, [False])
    assert relative_error(tensors, decode_update(encoded, like=tensors)) == 0


@pytest.mark.parametrize(
    ("code", "payload", "error"),
    [
        (Float32(), 1, 0),
        (Float16(), 1 / 2, 0.0003),
        (BFloat16(), 1 / 2, 0.002),
        (Int8(), 1 / 4, 0.1),
        (Int8(block=4096), 1 / 4, 0.03),
        (TopK(fraction=0.1), 0.15, 0.8),
    ],
)
def test_codecs_keep_to_their_size_and_error(code, payload, error):
    tensors = [np.float32(np.random.default_rng(1).standard_t(4, 60_000))]
    encoded, _ = encode_update(code, tensors, [False])
    sent = sum(array.nbytes for one in encoded["payloads"] for array in one.values())
    assert sent == pytest.approx(payload * 240_000, rel=0.002)
    assert relative_error(tensors, decode_update(encoded, like=tensors)) <= error


def test_relative_error_is_the_norm_of_the_difference_over_the_norm():
    assert (
        relative_error([np.float32([3]), np.float32([4]), np.array([7])], [np.float32([3]), np.float32([1]), None])
        == 0.6
    )
    assert relative_error([np.zeros(2)], [np.zeros(2)]) == 0
    assert relative_error([np.zeros(2)], [np.ones(2)]) == math.inf


LIKE = [np.zeros(400, np.float32), np.zeros(3, np.int64)]
INTS = {"raw": np.zeros(3, np.int64)}


@pytest.mark.parametrize(
    "encoded",
    [
        None,
        {},
        {"codec": 3, "payloads": []},
        {"codec": "int8"},
        {"codec": "int9", "payloads": [INTS, INTS]},
        {"codec": "int8", "payloads": [INTS]},
        {"codec": "int8", "payloads": [INTS, INTS]},
        {"codec": "int8", "payloads": [{}, INTS]},
        {"codec": "int8", "payloads": [7, INTS]},
        {"codec": "int8", "payloads": [{"raw": [0.0] * 400}, INTS]},
        {"codec": "int8", "payloads": [{"steps": "x", "scales": np.zeros(1, np.float32)}, INTS]},
        {"codec": "int8", "payloads": [{"steps": np.zeros(400, np.int8), "scales": np.zeros(2, np.float32)}, INTS]},
        {"codec": "int8", "payloads": [{"steps": np.zeros(399, np.int8), "scales": np.zeros(1, np.float32)}, INTS]},
        {"codec": "int8", "payloads": [{"steps": np.zeros(400, np.uint8), "scales": np.zeros(1, np.float32)}, INTS]},
        {
            "codec": "topk",
            "payloads": [{"places": np.full(4, 400, np.uint16), "values": np.zeros(4, np.float32)}, INTS],
        },
        {"codec": "topk", "payloads": [{"places": np.full(4, -1, np.int16), "values": np.zeros(4, np.float32)}, INTS]},
        {"codec": "float32", "payloads": [{"values": np.zeros(400, np.float32)}, {"values": np.zeros(3, np.float32)}]},
    ],
)
def test_a_malformed_update_is_refused(encoded):
    with pytest.raises(ConfigError):
        decode_update(encoded, like=LIKE)


@pytest.mark.parametrize("wrong", [{"lossless": [False]}, {"errors": [None]}])
def test_lists_of_different_length_are_refused(wrong):
    arguments = {"codec": Int8(), "tensors": LIKE, "lossless": [False, False], "errors": None} | wrong
    with pytest.raises(ConfigError):
        encode_update(**arguments)


# --- weights as differences -------------------------------------------------------------------------------------------


def weights_in_training(rounds):
    """Weights that move by one update per round."""
    weights = [np.asarray(50 * tensor, tensor.dtype) for tensor in next(updates_of_a_cnn(seed=9))]
    for update in updates_of_a_cnn(rounds):
        weights = [w - g for w, g in zip(weights, update, strict=True)]
        yield weights, update


@lossy_codec
def test_master_and_worker_hold_the_same_bits_and_do_not_drift_from_the_weights(code):
    history = weights_in_training(50)
    start, _ = next(history)
    on_master = on_worker = start
    behind = []
    for new, update in history:
        encoded, on_master = encode_delta(new, on_master, code, EXACT)
        on_worker = apply_delta(on_worker, encoded)
        assert [w.tobytes() for w in on_worker] == [w.tobytes() for w in on_master]
        for i in (1, 3, 5, 6, 7):  # small, statistics, counter
            assert on_worker[i].tobytes() == new[i].tobytes()
        behind.append(np.linalg.norm(on_worker[4] - new[4]) / np.linalg.norm(update[4]))
    if isinstance(code, TopK) and code.fraction < 1:
        assert max(behind) < 50**0.5  # random updates wait their turn, and no more than that
    else:
        assert max(behind[25:]) <= 1.2 * max(behind[:25]) < 0.12  # part of one update, however many there were


def test_differences_to_the_weights_sent_before_would_drift():
    """Otherwise the test above would prove nothing: this is what happens when the master forgets what was lost."""
    history = weights_in_training(50)
    old, _ = next(history)
    on_worker, behind = old, []
    for new, update in history:
        encoded, _held = encode_delta(new, old, Int8(), EXACT)
        on_worker, old = apply_delta(on_worker, encoded), new
        behind.append(np.linalg.norm(on_worker[4] - new[4]) / np.linalg.norm(update[4]))
    assert behind[-1] > 4 * behind[0]


def test_float32_weights_arrive_exactly():
    history = weights_in_training(5)
    held, _ = next(history)
    for new, _ in history:
        _, held = encode_delta(new, held, Float32(), EXACT)
        assert [w.tobytes() for w in held] == [w.tobytes() for w in new]


@lossy_codec
def test_weights_recover_after_a_non_finite_value_was_sent(code):
    (good,) = updates_of_a_cnn()
    broken = [w.copy() for w in good]
    broken[4][0, 0] = np.inf
    _, held = encode_delta(broken, good, code, EXACT)
    assert held[4][0, 0] == np.inf
    _, held = encode_delta(good, held, code, EXACT)
    assert np.array_equal(held[4], good[4])


def test_the_weights_held_before_are_not_modified():
    (base,) = updates_of_a_cnn(seed=1)
    (new,) = updates_of_a_cnn(seed=2)
    before = [w.tobytes() for w in base]
    encoded, _ = encode_delta(new, base, Int8(), EXACT)
    apply_delta(base, encoded)
    assert [w.tobytes() for w in base] == before
