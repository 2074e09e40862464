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
    Int4,
    Int8,
    PowerSGD,
    TopK,
)
from ddlf.algorithms.encoding import relative_error
from ddlf.errors import ConfigError

CODECS = [
    *(Float32(), Float16(), BFloat16()),
    *(Int8(), Int8(block=4096), Int8(block=3), TopK(), TopK(fraction=1)),
    *(Int4(), Int4(block=3), PowerSGD(rank=1), PowerSGD()),
]
every_codec = pytest.mark.parametrize("code", CODECS, ids=lambda code: code.name)
lossy_codec = pytest.mark.parametrize(
    "code", [code for code in CODECS if code != Float32()], ids=lambda code: code.name
)
biased_codec = pytest.mark.parametrize("code", [code for code in CODECS if code.biased], ids=lambda code: code.name)

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=12)
moderate = hnp.arrays(np.float32, shapes, elements=st.floats(-1000, 1000, width=32))
anything = hnp.arrays(np.float32, shapes, elements=st.floats(width=32))

TOO_SMALL = 127 * float(np.finfo(np.float32).smallest_normal)
"""Int8 sends blocks up to this magnitude as zeros."""


def round_trip(code, tensor):
    payload, _ = code.encode(tensor)
    return code.decode(payload, tensor.shape)


# --- one tensor -------------------------------------------------------------------------------------------------------


@every_codec
@given(tensor=anything)
def test_every_tensor_keeps_its_shape_and_type(code, tensor):
    decoded = round_trip(code, tensor)
    assert isinstance(decoded, np.ndarray)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, np.float32)


@every_codec
@given(tensor=anything)
def test_a_non_finite_value_never_becomes_a_finite_tensor(code, tensor):
    if not np.isfinite(tensor).all():
        assert not np.isfinite(round_trip(code, tensor)).all()


@every_codec
@given(tensor=anything)
def test_finite_values_within_range_stay_finite(code, tensor):
    if tensor.size and not np.abs(tensor).max() <= code.largest:
        return
    assert np.isfinite(round_trip(code, tensor)).all()


@every_codec
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1000,), (4096,), (4097,), (2, 4096)])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -0.25])
def test_constant_zero_single_and_empty_tensors_survive(code, shape, value):
    tensor = np.full(shape, value, np.float32)
    decoded = round_trip(code, tensor)
    if isinstance(code, TopK):
        sent = math.ceil(code.fraction * tensor.size)
        assert np.count_nonzero(decoded) == (sent if value else 0)
        assert set(decoded.ravel().tolist()) <= {0.0, value}
    elif isinstance(code, PowerSGD):
        np.testing.assert_allclose(decoded, tensor, rtol=1e-5)
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
    assert np.array_equal(round_trip(code, tensor), round_trip(code, tensor.copy()))


@every_codec
def test_a_codec_is_found_by_its_name(code):
    assert CODEC.read(code.name) == code


def test_short_names_have_the_documented_parameters():
    assert CODEC.read("int8-block") == CODEC.read("int8-block:4096") == Int8(block=4096)
    assert CODEC.read("int4-block") == CODEC.read("int4-block:64") == Int4(block=64)
    assert CODEC.read("powersgd") == CODEC.read("powersgd:rank=2") == PowerSGD(rank=2)
    assert CODEC.read("topk") == CODEC.read("topk:0.01") == TopK(fraction=0.01)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "int4",
        "int4-block:0",
        "powersgd:0",
        "powersgd:1.5",
        "powersgd:rank=2,rank=3",
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


def test_these_tests_have_every_codec():
    assert {code.name.partition(":")[0] for code in CODECS} == {*CODEC.names}


@pytest.mark.parametrize("name", CODEC.names)
def test_only_codecs_that_change_small_values_much_ask_for_error_feedback(name):
    code, chance = CODEC.read(name), np.random.default_rng(0)
    tensor = (chance.normal(size=(64, 64)) * 10 ** chance.uniform(-3, 0, (64, 64))).astype(np.float32)
    tensor = np.where(np.abs(tensor) < 1e-4, np.float32(1e-4), tensor)  # float16 rounds smaller values coarsely
    worst = np.abs(round_trip(code, tensor) / tensor - 1).max()
    assert code.biased == (worst > 2**-8)


# --- formats ----------------------------------------------------------------------------------------------------------


@given(tensor=hnp.arrays(np.uint32, 200, elements=st.integers(0, 2**32 - 1)))
def test_bfloat16_has_the_bits_of_ml_dtypes_for_every_bit_pattern(tensor):
    values = tensor.view(np.float32)
    with np.errstate(invalid="ignore"):
        expected = values.astype(ml_dtypes.bfloat16)
    packed = BFloat16().pack(values)["values"]
    number = ~np.isnan(values)
    assert np.array_equal(packed[number], expected.view(np.uint16)[number])
    assert np.isnan(BFloat16().decode({"values": packed}, (200,))[~number]).all()


def test_bfloat16_rounds_half_to_even():
    # 8 significant bits: between 1 and 2 the step is 2**-7
    step = 2.0**-7
    tensor = np.float32([1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2**-23, -1 - step / 2, 3.4e38])
    assert round_trip(BFloat16(), tensor).tolist() == [1, 1 + 2 * step, 1 + step, -1, math.inf]
    assert BFloat16().pack(np.float32([1.0, -2.0]))["values"].tolist() == [0x3F80, 0xC000]


def test_a_nan_with_only_low_bits_stays_a_nan_in_bfloat16():
    tensor = np.array([0x7F800001, 0xFF80FFFF, 0x7FFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(round_trip(BFloat16(), tensor)).all()


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
    limit = 1e-3 if size > 1e-38 else 1e-2  # float32 itself has few bits for such small values
    assert relative_error([tensor], [round_trip(Float16(), tensor)]) < limit


def test_the_unit_of_float16_changes_no_bit_of_values_in_the_range_of_a_half():
    tensor = np.float32(np.random.default_rng(0).normal(size=10_000))
    tensor = tensor[np.abs(tensor) > 2.0**-14]
    assert np.array_equal(round_trip(Float16(), tensor), tensor.astype(np.float16).astype(np.float32))


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
    decoded = round_trip(code, tensor).ravel()
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
    decoded = round_trip(Int8(block=2), np.float32([1, 1, np.nan, 1, 1]))
    assert np.isnan(decoded).tolist() == [False, False, True, True, False]


def test_int8_survives_the_extremes_of_float32():
    for largest in (Int8.largest, 1e-37, 1e-44):
        decoded = round_trip(Int8(), np.float32([largest, -largest, largest / 3]))
        assert np.isfinite(decoded).all()
        assert np.abs(decoded - np.float32([largest, -largest, largest / 3])).max() <= max(largest / 254, TOO_SMALL)


def test_blocks_lose_less_than_one_scale_for_the_whole_tensor():
    update = [np.float32(np.repeat([1, 10], 8192) * np.random.default_rng(0).normal(size=16_384))]
    one_scale, blocks = ([round_trip(code, update[0])] for code in (Int8(), Int8(block=4096)))
    quiet = [update[0][:8192]]
    assert relative_error(quiet, [blocks[0][:8192]]) < relative_error(quiet, [one_scale[0][:8192]]) / 5


@given(tensor=moderate, fraction=st.floats(0.01, 1))
def test_topk_sends_exactly_the_entries_largest_in_magnitude(tensor, fraction):
    payload = TopK(fraction=fraction).pack(tensor)
    by_magnitude = np.argsort(-np.abs(tensor.ravel()), kind="stable")  # the first of equal values
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


@given(tensor=moderate, block=st.integers(1, 70))
def test_int4_moves_no_value_by_more_than_half_a_step(tensor, block):
    decoded, values = round_trip(Int4(block=block), tensor).ravel(), tensor.ravel()
    for start in range(0, values.size, block):
        part = slice(start, start + block)
        step = np.abs(values[part]).max().astype(np.float64) / 7
        assert np.abs(values[part].astype(np.float64) - decoded[part]).max() <= step / 2 * (1 + 1e-4) + TOO_SMALL


def test_int4_gives_the_numbers_computed_by_hand():
    """Scales are 0.5 and 2, steps are -7, 2, 0, 7, -1. A byte has two steps plus 8: 1 + 10 * 16, 8 + 15 * 16, 7 + 8 * 16."""
    payload, error = Int4(block=3).encode(np.float32([-3.5, 1.1, 0.2, 14, -2.5]))
    assert payload["scales"].tolist() == [0.5, 2]
    assert payload["pairs"].tolist() == [161, 248, 135]
    assert error.tolist() == pytest.approx([0, 0.1, 0.2, 0, -0.5], abs=1e-6)


@pytest.mark.parametrize("size", [0, 1, 2, 63, 64, 65, 6400])
def test_int4_takes_half_a_byte_for_a_value_and_four_for_a_block(size):
    payload = Int4().pack(np.ones(size, np.float32))
    assert payload["pairs"].nbytes == (size + 1) // 2
    assert payload["scales"].nbytes == 4 * -(-size // 64)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_powersgd_is_a_power_iteration_from_the_last_payload(rank):
    """The formula in float64: multiply the matrix by the start, and project the matrix onto the base of this product."""
    chance = np.random.default_rng(0)
    tensor, start = chance.normal(size=(3, 10, 20)), chance.normal(size=(20, rank))
    matrix = tensor.reshape(30, 20)
    p, _ = np.linalg.qr(matrix @ start)
    code = PowerSGD(rank=rank)
    payload = code.pack_after(tensor.astype(np.float32), start.astype(np.float32).reshape(-1))
    decoded = code.decode(payload, tensor.shape)
    np.testing.assert_allclose(decoded.reshape(30, 20), p @ (p.T @ matrix), atol=1e-5)
    np.testing.assert_allclose(
        payload["right"].reshape(20, rank) @ payload["left"].reshape(30, rank).T, decoded.reshape(30, 20).T, atol=1e-5
    )


def test_powersgd_keeps_a_matrix_of_its_rank():
    chance = np.random.default_rng(1)
    tensor = np.float32(chance.normal(size=(60, 2)) @ chance.normal(size=(2, 40)))
    assert relative_error([tensor], [round_trip(PowerSGD(), tensor)]) < 1e-5
    assert relative_error([tensor], [round_trip(PowerSGD(rank=1), tensor)]) > 0.1


def test_powersgd_turns_towards_the_largest_directions():
    """Its error then equals that of the best product of its rank, which follows from the singular values."""
    chance = np.random.default_rng(2)
    tensor = np.float32(chance.normal(size=(60, 2)) @ chance.normal(size=(2, 40)) + 0.3 * chance.normal(size=(60, 40)))
    code, payload, errors = PowerSGD(), None, []
    for _ in range(20):
        payload = code.pack_after(tensor, payload and payload["right"])
        errors.append(relative_error([tensor], [code.decode(payload, tensor.shape)]))
    singular = np.linalg.svd(tensor, compute_uv=False)
    best = np.sqrt((singular[2:] ** 2).sum() / (singular**2).sum())
    assert errors[0] > 1.02 * best
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_powersgd_recovers_from_a_zero_matrix():
    chance = np.random.default_rng(3)
    tensor = np.float32(np.outer(chance.normal(size=60), np.r_[np.zeros(5), chance.normal(size=35)]))
    tensor[:5] = 0
    code = PowerSGD()
    payload = code.pack(np.zeros_like(tensor))
    assert not payload["right"].any()
    payload = code.pack_after(tensor, payload["right"])
    assert relative_error([tensor], [code.decode(payload, tensor.shape)]) < 1e-5


def test_powersgd_restarts_after_a_payload_of_another_rank():
    tensor = np.float32(np.random.default_rng(4).normal(size=(60, 40)))
    of_another_rank = PowerSGD(rank=3).pack(tensor)["right"]
    assert np.array_equal(PowerSGD().pack_after(tensor, of_another_rank)["left"], PowerSGD().pack(tensor)["left"])


@pytest.mark.parametrize("shape", [(), (0,), (7,), (1, 100), (100, 1), (4, 4), (0, 100)])
def test_powersgd_sends_a_tensor_unchanged_if_it_would_not_become_smaller(shape):
    tensor = np.ones(shape, np.float32)
    assert PowerSGD().pack(tensor)["values"].size == tensor.size


# --- error feedback ---------------------------------------------------------------------------------------------------


@biased_codec
@settings(max_examples=40)
@given(tensors=hnp.arrays(np.float32, (8, 30), elements=st.floats(-10, 10, width=32)))
def test_arrived_sum_equals_sent_sum_up_to_the_last_error(code, tensors):
    error, arrived = None, np.zeros(30)
    for tensor in tensors:
        payload, error = code.encode(tensor, error)
        arrived += code.decode(payload, tensor.shape)
    np.testing.assert_allclose(arrived + error, tensors.sum(axis=0, dtype=np.float64), atol=1e-3)


@biased_codec
@pytest.mark.parametrize("shape", [(8, 90), (3, 3, 5, 20)])
def test_arrived_sum_of_matrices_equals_sent_sum(code, shape):
    chance = np.random.default_rng(5)
    tensors = chance.normal(size=(8, *shape)).astype(np.float32)
    error, last, arrived = None, None, np.zeros(shape)
    for tensor in tensors:
        payload, error = code.encode(tensor, error, last)
        last = payload.get(code.goes_on)
        arrived += code.decode(payload, shape)
    np.testing.assert_allclose(arrived + error, tensors.sum(axis=0, dtype=np.float64), atol=1e-4)


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


def test_the_residual_of_another_codec_is_sent_once():
    payload, error = Float32().encode(np.float32([1]), np.float32([0.5]))
    assert payload["values"].tolist() == [1.5]
    assert error is None
