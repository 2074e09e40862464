"""Tests that compare each optimizer and loss on the backend with numbers computed by hand."""

import numpy as np
import pytest

from tests.algorithms.test_clipping import FACTORS, NORMS

pytestmark = pytest.mark.slow


def variable(value, path="layer/w"):
    import keras

    layer, _, name = path.partition("/")
    with keras.name_scope(layer):
        return keras.Variable(np.asarray(value, "float32"), name=name)


def number(value):
    import keras

    return keras.ops.convert_to_numpy(value)


def sgd(rate=1.0):
    import keras

    return keras.optimizers.SGD(rate)


def test_golden_rolling_clip():
    from ddlf.extras.stabilisers import RollingClip

    w, optimizer = variable([0.0, 0.0]), RollingClip(sgd())
    for norm, factor in zip(NORMS, FACTORS, strict=True):
        w.assign([0.0, 0.0])
        optimizer.apply([np.float32([0.6 * norm, 0.8 * norm])], [w])
        assert -number(w) / norm == pytest.approx(factor * np.array([0.6, 0.8]), abs=1e-6)
    assert int(number(optimizer.count)) == len(NORMS)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_golden_a_batch_that_is_not_finite_does_not_change_weights(bad):
    import keras

    from ddlf.extras.stabilisers import RollingClip

    w, optimizer = variable([1.0, 2.0]), RollingClip(keras.optimizers.Adam(0.1))
    optimizer.apply([np.float32([1, 1])], [w])
    before = [number(tensor) for tensor in (w, *optimizer.variables)]
    optimizer.apply([np.float32([bad, 1])], [w])
    assert all((a == number(b)).all() for a, b in zip(before, (w, *optimizer.variables), strict=True))


def test_golden_agc():
    from ddlf.extras.stabilisers import AGC

    w, last = variable([[3.0, 0.0], [4.0, 0.0]], "a/kernel"), variable([1.0], "b/kernel")
    AGC(sgd()).apply([np.float32([[0.03, 1], [0.04, 0]]), np.float32([5.0])], [w, last])
    assert number(w) == pytest.approx(np.array([[2.97, -1e-5], [3.96, 0]]), abs=1e-6)
    assert number(last) == pytest.approx([-4.0])


def test_golden_multipliers_and_frozen_layers():
    from ddlf.extras.stabilisers import Multipliers

    weights = [variable([-0.0, 1.0], path) for path in ("a/kernel", "b/kernel", "b/bias")]
    optimizer = Multipliers(sgd(), {"a": 0, "b": 0.5, "b/bias": 2})
    optimizer.apply([np.float32([1, 1])] * 3, weights)
    assert number(weights[0]).tobytes() == np.float32([-0.0, 1.0]).tobytes()
    assert number(weights[1]) == pytest.approx([-0.5, 0.5])
    assert number(weights[2]) == pytest.approx([-2, -1])


def test_golden_rlion():
    from ddlf.extras.stabilisers import Rlion

    w, optimizer = variable(1.0), Rlion()
    weights = []
    for _ in range(2):
        optimizer.apply([np.float32(0.5)], [w])
        weights.append(float(number(w)))
    assert weights == pytest.approx([0.99982833333, 0.99964695879], abs=1e-7)


def test_golden_uncertainty():
    from ddlf.extras.stabilisers.uncertainty import weighed

    losses = np.array([0.7, 120])
    assert weighed(losses, np.zeros(2), np) == pytest.approx(60.35)
    assert weighed(losses, np.log(losses), np) == pytest.approx(3.215408, abs=1e-6)


def test_golden_uncertainty_of_a_model_is_learned_and_saved(tmp_path):
    import keras

    from ddlf.errors import ConfigError
    from ddlf.extras.stabilisers import RollingClip, Uncertain

    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    y = {"near": x[:, :1] * 0.1, "far": x[:, 1:2] * 30}
    entry = keras.Input((4,))
    inner = keras.Model(entry, {name: keras.layers.Dense(1, name=name)(entry) for name in y})
    model = Uncertain(inner)
    model.compile(RollingClip(keras.optimizers.AdamW(0.05)), "mse")
    zero = model.evaluate(x, y, verbose=0, return_dict=True)
    assert zero["loss"] == pytest.approx((zero["near_loss"] + zero["far_loss"]) / 2, rel=1e-5)
    steps = 100  # in one epoch, because the beginning and end of an epoch cost more than a step
    repeated = {name: np.tile(values, (steps, 1)) for name, values in y.items()}
    model.fit(np.tile(x, (steps, 1)), repeated, batch_size=64, shuffle=False, verbose=0)
    log_variances = dict(zip(model.output_names, number(model.log_variances), strict=True))
    assert log_variances["near"] < 0 < log_variances["far"]
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert again.evaluate(x, y, verbose=0) == model.evaluate(x, y, verbose=0)
    with pytest.raises(ConfigError, match="loss_weights has no effect"):
        model.compile("sgd", "mse", loss_weights={"near": 1.0, "far": 0.1})


def test_golden_masked_losses_are_means_over_unmasked_labels():
    import keras

    from ddlf.extras.stabilisers import Masked

    random = np.random.default_rng(0)
    p = random.dirichlet(np.ones(5), (6, 4)).astype("float32")
    y = random.integers(0, 5, (6, 4))
    y[:, 2:] = -1
    y[0] = -1
    valid = y != -1
    by_hand = -np.log(p[valid, :][np.arange(valid.sum()), y[valid]])
    loss = Masked("sparse_categorical_crossentropy")
    assert float(loss(y, p)) == pytest.approx(by_hand.mean(), rel=1e-5)
    weights = np.arange(6, dtype="float32")
    assert float(loss(y, p, weights)) == pytest.approx(
        (by_hand * np.repeat(weights[:, None], 4, 1)[valid]).sum() / valid.sum(), rel=1e-5
    )
    assert float(loss(np.full((6, 4), -1), p)) == 0
    a, b = random.normal(size=(2, 6, 3)).astype("float32")
    b[1, 1] = np.nan
    assert float(Masked("mse", ignore=float("nan"))(b, a)) == pytest.approx(np.nanmean((a - b) ** 2), rel=1e-5)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(loss))
    assert float(again(y, p)) == float(loss(y, p))


def test_golden_depths_of_a_model_with_a_skip_and_a_model_inside():
    import keras

    from ddlf.extras.stabilisers.freezing import depths, frozen_to

    dense = keras.layers.Dense
    inside = keras.Sequential([keras.Input((4,)), dense(4, name="in1"), dense(4, name="in2")], name="inside")
    x = keras.Input((4,))
    first = dense(4, name="first")(x)
    model = keras.Model(x, dense(2, name="last")(keras.layers.Add(name="add")([first, inside(first)])))
    assert depths(model) == {"first": (1, 5), "in1": (2, 4), "in2": (3, 3), "last": (5, 1)}
    # r = 1/6, 1/3, 1/2, 5/6; f = 1/3: 0, 0, sin(pi/8) = .38, sin(3 pi/8) = .92
    assert frozen_to(model, 1 / 3, sgd()).factors == {"first": 0, "in1": 0, "in2": 0.5, "last": 0.9}
