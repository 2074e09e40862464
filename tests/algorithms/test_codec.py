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
from ddlf.algorithms.encoding import relative_error
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
