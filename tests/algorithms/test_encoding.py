import math

import numpy as np
import pytest

from ddlf.algorithms.codec import BFloat16, Float16, Float32, Int4, Int8, PowerSGD, TopK
from ddlf.algorithms.encoding import (
    apply_delta,
    decode_update,
    encode_delta,
    encode_update,
    relative_error,
    without_zeros,
)
from ddlf.errors import ConfigError
from tests.algorithms.test_codec import every_codec, lossy_codec


def updates_of_a_cnn(rounds=1, seed=0):
    """Yield updates with heavy tails in the shapes of a small CNN with BatchNorm and a counter."""
    random = np.random.default_rng(seed)
    shapes = [(3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (300, 64), (64,), ()]
    for _ in range(rounds):
        tensors = [np.asarray(random.laplace(scale=1e-3, size=shape), np.float32) for shape in shapes]
        yield [*tensors, np.array([random.integers(100)], np.int64)]


EXACT = [False, False, False, False, False, True, True, False]


def data_only(value):
    """Whether a value consists only of exact types that the wire carries unchanged."""
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
def test_every_tensor_can_be_sent_exactly(code):
    (tensors,) = updates_of_a_cnn()
    encoded, errors = encode_update(code, tensors, [True] * len(tensors))
    assert relative_error(tensors, decode_update(encoded, like=tensors)) == 0
    assert set(errors) == {None}


@every_codec
def test_only_the_last_error_is_lost_over_many_rounds(code):
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
    assert (~np.isfinite(decode_update(encoded, like=tensors)[4])).sum() == 3  # the report needs the exact number
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
        (Int4(), 1 / 8 + 1 / 64, 0.2),
        (PowerSGD(), 2 / 200 + 2 / 300, 1),
    ],
)
def test_codecs_keep_within_their_size_and_error(code, payload, error):
    tensors = [np.float32(np.random.default_rng(1).standard_t(4, (200, 300)))]
    encoded, _ = encode_update(code, tensors, [False])
    sent = sum(array.nbytes for payload_arrays in encoded["payloads"] for array in payload_arrays.values())
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
        *(
            {"codec": "int4-block", "payloads": [{"pairs": pairs, "scales": scales}, INTS]}
            for pairs, scales in [
                (np.zeros(199, np.uint8), np.zeros(7, np.float32)),
                (np.zeros(201, np.uint8), np.zeros(7, np.float32)),
                (np.zeros(200, np.int8), np.zeros(7, np.float32)),
                (np.zeros((200, 1), np.uint8), np.zeros(7, np.float32)),
                (np.zeros(200, np.uint8), np.zeros(6, np.float32)),
                (np.zeros(200, np.uint8), np.zeros(7)),
            ]
        ),
        {"codec": "int4-block:1000000000000", "payloads": [{"pairs": np.zeros(200, np.uint8)}, INTS]},
        *(
            {"codec": codec, "payloads": [{"left": left, "right": right}, INTS]}
            for codec, left, right in [
                ("powersgd", np.zeros(80, np.float32), np.zeros(18, np.float32)),
                ("powersgd", np.zeros(78, np.float32), np.zeros(20, np.float32)),
                ("powersgd", np.zeros(80), np.zeros(20, np.float32)),
                ("powersgd", np.zeros((40, 2), np.float32), np.zeros(20, np.float32)),
                ("powersgd:3", np.zeros(80, np.float32), np.zeros(20, np.float32)),
                ("powersgd:1000000000000", np.zeros(80, np.float32), np.zeros(20, np.float32)),
            ]
        ),
    ],
)
def test_a_malformed_update_is_refused(encoded):
    with pytest.raises(ConfigError):
        decode_update(encoded, like=LIKE)
    if isinstance(encoded, dict) and str(encoded.get("codec")).startswith(
        "powersgd"
    ):  # a vector has no payload of PowerSGD
        with pytest.raises(ConfigError):
            decode_update(encoded, like=[np.zeros((40, 10), np.float32), LIKE[1]])


def test_the_start_of_a_codec_is_stored_with_its_residual():
    (tensors,) = updates_of_a_cnn()
    count = len(tensors)
    encoded, residual = encode_update(PowerSGD(), tensors, EXACT)
    assert [len(residual), [part is not None for part in residual[count:]]] == [
        2 * count,
        [part is not None for part in residual[:count]],
    ]
    assert np.array_equal(residual[count + 4], encoded["payloads"][4]["right"])
    on, _ = encode_update(PowerSGD(), tensors, EXACT, [None] * count + residual[count:])
    anew, _ = encode_update(PowerSGD(), tensors, EXACT)
    assert not np.array_equal(on["payloads"][4]["left"], anew["payloads"][4]["left"])
    _, residual_of_int8 = encode_update(Int8(), tensors, EXACT, residual)  # another codec drops this state
    assert len(residual_of_int8) == count


@pytest.mark.parametrize("wrong", [{"lossless": [False]}, {"residuals": [None]}])
def test_lists_of_different_length_are_refused(wrong):
    arguments = {"codec": Int8(), "tensors": LIKE, "lossless": [False, False], "residuals": None} | wrong
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
def test_master_and_worker_hold_the_same_bits_without_drift(code):
    history = weights_in_training(50)
    start, _ = next(history)
    on_master = on_worker = start
    distances = []
    for new, update in history:
        encoded, on_master = encode_delta(new, on_master, code, EXACT)
        on_worker = apply_delta(on_worker, encoded)
        assert [w.tobytes() for w in on_worker] == [w.tobytes() for w in on_master]
        for i in (1, 3, 5, 6, 7):  # small tensors, statistics, the counter
            assert on_worker[i].tobytes() == new[i].tobytes()
        distances.append(np.linalg.norm(on_worker[4] - new[4]) / np.linalg.norm(update[4]))
    if isinstance(code, PowerSGD) or (isinstance(code, TopK) and code.fraction < 1):
        assert max(distances) < 50**0.5  # a random update waits for its turn, without more drift
    else:
        limit = 0.25 if isinstance(code, Int4) else 0.12
        assert (
            max(distances[25:]) <= 1.2 * max(distances[:25]) < limit
        )  # part of one update after any number of updates


def test_differences_to_the_weights_sent_before_would_drift():
    """The test above can fail: weights drift if the master forgets the lost parts."""
    history = weights_in_training(50)
    old, _ = next(history)
    on_worker, distances = old, []
    for new, update in history:
        encoded, _received = encode_delta(new, old, Int8(), EXACT)
        on_worker, old = apply_delta(on_worker, encoded), new
        distances.append(np.linalg.norm(on_worker[4] - new[4]) / np.linalg.norm(update[4]))
    assert distances[-1] > 4 * distances[0]


def test_float32_weights_arrive_exactly():
    history = weights_in_training(5)
    received, _ = next(history)
    for new, _ in history:
        _, received = encode_delta(new, received, Float32(), EXACT)
        assert [w.tobytes() for w in received] == [w.tobytes() for w in new]


@lossy_codec
def test_weights_recover_after_a_non_finite_value_was_sent(code):
    (good,) = updates_of_a_cnn()
    broken = [w.copy() for w in good]
    broken[4][0, 0] = np.inf
    _, received = encode_delta(broken, good, code, EXACT)
    assert received[4][0, 0] == np.inf
    _, received = encode_delta(good, received, code, EXACT)
    assert np.array_equal(received[4], good[4])


def test_the_earlier_weights_are_not_modified():
    (base,) = updates_of_a_cnn(seed=1)
    (new,) = updates_of_a_cnn(seed=2)
    before = [w.tobytes() for w in base]
    encoded, _ = encode_delta(new, base, Int8(), EXACT)
    apply_delta(base, encoded)
    assert [w.tobytes() for w in base] == before


def test_zero_tensors_do_not_travel_and_arrive_as_zeros():
    tensors = [np.zeros((40, 10), np.float32), np.arange(3), np.zeros(2, np.int64), np.float32([-0.0])]
    encoded = without_zeros(encode_update(Int8(), tensors, [True] * 4)[0])
    assert [list(payload) for payload in encoded["payloads"]] == [["same"], ["raw"], ["same"], ["raw"]]
    decoded = decode_update(encoded, tensors)
    assert [tensor.tobytes() for tensor in decoded] == [tensor.tobytes() for tensor in tensors]


def test_a_difference_leaves_unchanged_tensors_out():
    old = [np.float32([-0.0, 1.0]), np.ones(400, np.float32), np.asarray(3)]
    new = [old[0].copy(), old[1] + 1, np.asarray(3)]
    encoded, received = encode_delta(new, old, Float32(), [False] * 3)
    assert [list(payload) for payload in encoded["payloads"]] == [["same"], ["raw"], ["same"]]
    assert [tensor.tobytes() for tensor in received] == [tensor.tobytes() for tensor in new]
