"""A model for each layer, loss, metric, optimizer and learning rate that browsers train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.peers.browser.cases import Case as Case
from tests.peers.browser.cases import unpacked as unpacked

BATCH = 5
SEQUENCE, IMAGE, VOLUME, VECTOR = (6, 3), (7, 6, 2), (5, 4, 6, 2), (8,)


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    """Return inputs for a layer; some numbers are equal, and some are 0."""
    return np.round(rng.normal(size=shape), 2).astype("float32") * (rng.random(shape) > 0.2)


def of_layer(name: str, shape: tuple[int, ...], *stack: Callable[[Any], Any], inputs: int = 1, steps: int = 1) -> Case:
    """Return a case with weights before and after a layer, so that the test covers the gradients of the layer."""
    rng = np.random.default_rng(len(name))
    keras.utils.set_random_seed(3)
    entries = [keras.Input(shape) for _ in range(inputs)]
    moved = [layers.Dense(shape[-1], activation="tanh")(entry) for entry in entries]
    x: Any = moved if inputs > 1 else moved[0]
    for layer in stack:
        x = layer(x)
    x = x[0] if isinstance(x, list | tuple) else x
    if len(x.shape) > 2:
        x = layers.Flatten()(x)
    model = keras.Model(entries if inputs > 1 else entries[0], layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    for weight in model.weights:
        weight.assign(weight + np.abs(numbers(rng, *weight.shape)) / 20)
    data = [[numbers(rng, BATCH, *shape) for _ in entries] for _ in range(steps)]
    return Case(name, model, [(inputs_, [numbers(rng, BATCH, 3)]) for inputs_ in data])


def layer_cases() -> Iterator[Case]:
    """Yield at least one case of each listed layer."""
    regular = keras.regularizers.L1L2(0.01, 0.02)
    yield of_layer("Dense", VECTOR, layers.Dense(4, activation="relu", kernel_regularizer=regular), steps=2)
    yield of_layer("Dense without bias", SEQUENCE, layers.Dense(4, use_bias=False, activation="softmax"))
    yield of_layer("Dense frozen", VECTOR, layers.Dense(4, trainable=False))
    yield of_layer("Identity", VECTOR, layers.Identity())
    yield of_layer("Activation", VECTOR, layers.Activation("gelu"))
    yield of_layer("ReLU", VECTOR, layers.ReLU(max_value=0.5, negative_slope=0.1, threshold=0.05))
    yield of_layer("LeakyReLU", VECTOR, layers.LeakyReLU(0.2))
    yield of_layer("ELU", VECTOR, layers.ELU(0.7))
    yield of_layer("PReLU", IMAGE, layers.PReLU(shared_axes=[1, 2]))
    yield of_layer("Softmax", SEQUENCE, layers.Softmax(axis=1))
    yield of_layer("Rescaling", VECTOR, layers.Rescaling(0.5, offset=0.1))
    yield of_layer("Conv1D", SEQUENCE, layers.Conv1D(4, 3, strides=2, activation="relu"))
    yield of_layer("Conv1D causal", SEQUENCE, layers.Conv1D(4, 3, padding="causal", dilation_rate=2))
    yield of_layer("Conv2D", IMAGE, layers.Conv2D(4, (3, 2), activation="relu"))
    yield of_layer("Conv2D same", IMAGE, layers.Conv2D(4, 3, strides=2, padding="same", groups=2))
    yield of_layer("Conv2D dilated", IMAGE, layers.Conv2D(4, 2, dilation_rate=2, use_bias=False))
    yield of_layer("Conv3D", VOLUME, layers.Conv3D(3, 2, strides=(1, 2, 1), padding="same"))
    yield of_layer("DepthwiseConv1D", SEQUENCE, layers.DepthwiseConv1D(2, depth_multiplier=2))
    yield of_layer("DepthwiseConv2D", IMAGE, layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same", strides=2))
    yield of_layer("SeparableConv1D", SEQUENCE, layers.SeparableConv1D(4, 2))
    yield of_layer("SeparableConv2D", IMAGE, layers.SeparableConv2D(4, 3, depth_multiplier=2, padding="same"))
    yield of_layer("Conv1DTranspose", SEQUENCE, layers.Conv1DTranspose(4, 3, strides=2))
    for size, stride, padding in ((3, 2, "same"), (2, 3, "valid"), (4, 2, "valid"), (2, 3, "same"), (3, 1, "same")):
        layer = layers.Conv2DTranspose(3, size, strides=stride, padding=padding)
        yield of_layer(f"Conv2DTranspose {size} {stride} {padding}", IMAGE, layer)
    for kind in ("MaxPooling", "AveragePooling"):
        for rank, shape in enumerate((SEQUENCE, IMAGE, VOLUME), 1):
            yield of_layer(f"{kind}{rank}D", shape, getattr(layers, f"{kind}{rank}D")(2))
            layer = getattr(layers, f"{kind}{rank}D")(3, strides=2, padding="same")
            yield of_layer(f"{kind}{rank}D same", shape, layers.ReLU(), layer)
    for kind in ("GlobalMaxPooling", "GlobalAveragePooling"):
        for rank, shape in enumerate((SEQUENCE, IMAGE, VOLUME), 1):
            yield of_layer(f"{kind}{rank}D", shape, getattr(layers, f"{kind}{rank}D")(keepdims=rank == 2))
    for kind in ("Add", "Subtract", "Multiply", "Average", "Maximum", "Minimum", "Concatenate"):
        yield of_layer(kind, VECTOR, getattr(layers, kind)(), inputs=2)
    yield of_layer("Dot", SEQUENCE, layers.Dot(axes=(1, 1)), inputs=2)
    yield of_layer("Dot normalized", VECTOR, layers.Dot(axes=1, normalize=True), inputs=2)
    yield of_layer("Flatten", IMAGE, layers.Flatten())
    yield of_layer("Reshape", VECTOR, layers.Reshape((2, -1)))
    yield of_layer("Permute", IMAGE, layers.Permute((3, 1, 2)), layers.Dense(2))
    yield of_layer("RepeatVector", VECTOR, layers.RepeatVector(3), layers.Dense(2))
    yield of_layer("ZeroPadding1D", SEQUENCE, layers.ZeroPadding1D((1, 2)))
    yield of_layer("ZeroPadding2D", IMAGE, layers.ZeroPadding2D(((1, 0), (2, 1))))
    yield of_layer("ZeroPadding3D", VOLUME, layers.ZeroPadding3D(1))
    yield of_layer("Cropping1D", SEQUENCE, layers.Cropping1D((1, 2)))
    yield of_layer("Cropping2D", IMAGE, layers.Cropping2D(((1, 0), (2, 1))))
    yield of_layer("Cropping3D", VOLUME, layers.Cropping3D(1))
    yield of_layer("UpSampling1D", SEQUENCE, layers.UpSampling1D(2))
    yield of_layer("UpSampling2D", IMAGE, layers.UpSampling2D((2, 1)))
    yield of_layer("UpSampling3D", VOLUME, layers.UpSampling3D(2))
    yield of_layer("BatchNormalization", IMAGE, layers.BatchNormalization(), steps=2)
    yield of_layer("BatchNormalization axis", SEQUENCE, layers.BatchNormalization(axis=1, scale=False), steps=2)
    yield of_layer("BatchNormalization frozen", VECTOR, layers.BatchNormalization(trainable=False))
    yield of_layer("LayerNormalization", SEQUENCE, layers.LayerNormalization(axis=[1, 2]))
    yield of_layer("GroupNormalization", (4, 5, 6), layers.GroupNormalization(3))
    yield of_layer("RMSNormalization", SEQUENCE, layers.RMSNormalization())
    yield of_layer("UnitNormalization", SEQUENCE, layers.UnitNormalization())
    for kind in ("Dropout", "SpatialDropout1D"):
        yield of_layer(kind, SEQUENCE, getattr(layers, kind)(0.0))
    yield of_layer("SpatialDropout2D", IMAGE, layers.SpatialDropout2D(0.0))
    yield of_layer("SpatialDropout3D", VOLUME, layers.SpatialDropout3D(0.0))
    for kind in ("SimpleRNN", "LSTM", "GRU"):
        yield of_layer(kind, SEQUENCE, getattr(layers, kind)(4))
        yield of_layer(f"{kind} steps", SEQUENCE, getattr(layers, kind)(4, return_sequences=True, go_backwards=True))
        yield of_layer(f"{kind} state", SEQUENCE, getattr(layers, kind)(4, return_state=True))
    yield of_layer("GRU before", SEQUENCE, layers.GRU(4, reset_after=False, recurrent_activation="hard_sigmoid"))
    yield of_layer("Bidirectional", SEQUENCE, layers.Bidirectional(layers.GRU(3, return_sequences=True)))
    yield of_layer("Bidirectional sum", SEQUENCE, layers.Bidirectional(layers.LSTM(3), merge_mode="sum"))
    attention = layers.MultiHeadAttention(2, 3, value_dim=2, output_shape=5)
    yield of_layer("MultiHeadAttention", SEQUENCE, lambda x: attention(x[0], x[1]), inputs=2)
    other = layers.MultiHeadAttention(2, 3, use_bias=False)
    yield of_layer("MultiHeadAttention causal", SEQUENCE, lambda x: other(x, x, key=x, use_causal_mask=True))
    yield embedding()


def embedding() -> Case:
    rng = np.random.default_rng(1)
    model = keras.Sequential(
        [keras.Input((4,), dtype="int32"), layers.Embedding(6, 3), layers.Flatten(), layers.Dense(2)]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    tokens = rng.integers(0, 6, (BATCH, 4)).astype("int32")
    return Case("Embedding", model, [([tokens], [numbers(rng, BATCH, 2)])])


def activation_cases() -> Iterator[Case]:
    """Yield a case of each activation, at numbers that include 0."""
    from ddlf.peers.browser.supported import ACTIVATIONS

    for name in ACTIVATIONS:
        yield of_layer(f"activation {name}", (12,), layers.Activation(name))


def compiled(
    name: str, loss: Any, labels: Any, *, last: str | None = None, width: int = 3, steps: int = 1, **rest: Any
) -> Case:
    """Return a case of a small model with one loss, optimizer or metric."""
    rng = np.random.default_rng(7)
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [keras.Input(VECTOR), layers.Dense(6, activation="tanh"), layers.Dense(width, activation=last)]
    )
    rest.setdefault("optimizer", keras.optimizers.SGD(0.1))
    model.compile(loss=loss, run_eagerly=True, **rest)
    batches = [([numbers(rng, BATCH, *VECTOR)], [labels(rng) if callable(labels) else labels]) for _ in range(steps)]
    return Case(name, model, batches)


def one_hot(rng: np.random.Generator, width: int = 3) -> np.ndarray[Any, Any]:
    return np.eye(width, dtype="float32")[rng.integers(0, width, BATCH)]


def classes(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    return rng.integers(0, 3, BATCH).astype("float32")


def binary(rng: np.random.Generator) -> np.ndarray[Any, Any]:
    return rng.integers(0, 2, (BATCH, 1)).astype("float32")


def loss_cases() -> Iterator[Case]:
    """Yield a case of each listed loss, in its usual forms."""
    real: Callable[[Any], Any] = lambda rng: numbers(rng, BATCH, 3)  # noqa: E731
    positive: Callable[[Any], Any] = lambda rng: np.abs(numbers(rng, BATCH, 3)) + 0.1  # noqa: E731
    for kind in ("mse", "mae", "mean_absolute_percentage_error", "huber", "log_cosh", "cosine_similarity"):
        yield compiled(f"loss {kind}", kind, real if kind != "mean_absolute_percentage_error" else positive)
    yield compiled("loss Huber", keras.losses.Huber(0.3), real)
    yield compiled("loss sum", keras.losses.MeanSquaredError(reduction="sum"), real)
    for kind in ("mean_squared_logarithmic_error", "poisson", "kl_divergence"):
        yield compiled(f"loss {kind}", kind, positive, last="softplus")
    for kind in ("hinge", "squared_hinge", "categorical_hinge"):
        yield compiled(f"loss {kind}", kind, one_hot)
    yield compiled("loss hinge of others", "hinge", real)
    kinds = keras.losses
    for last in ("softmax", None):
        logits = last is None
        yield compiled(
            f"loss categorical {last}",
            kinds.CategoricalCrossentropy(from_logits=logits, label_smoothing=0.1),
            one_hot,
            last=last,
        )
        yield compiled(
            f"loss sparse {last}", kinds.SparseCategoricalCrossentropy(from_logits=logits), classes, last=last
        )
    for last in ("sigmoid", None):
        smooth = kinds.BinaryCrossentropy(from_logits=last is None, label_smoothing=0.1)
        yield compiled(f"loss binary {last}", smooth, binary, last=last, width=1)
    yield compiled("loss categorical of others", "categorical_crossentropy", one_hot, last="softplus")
    yield compiled("loss sparse of others", "sparse_categorical_crossentropy", classes, last="softplus")
    yield compiled("loss binary of others", "binary_crossentropy", binary, last="hard_sigmoid", width=1)


def metric_cases() -> Iterator[Case]:
    """Yield cases with all listed metrics."""
    kinds = keras.metrics
    many = ["mse", "mae", "mape", "msle", kinds.RootMeanSquaredError(), kinds.LogCoshError(), kinds.CosineSimilarity()]
    yield compiled(
        "metrics of numbers", "mse", lambda rng: np.abs(numbers(rng, BATCH, 3)) + 0.1, last="softplus", metrics=many
    )
    kind = [
        "accuracy",
        kinds.CategoricalAccuracy(),
        kinds.CategoricalCrossentropy(),
        kinds.KLDivergence(),
        kinds.CategoricalHinge(),
    ]
    yield compiled("metrics of classes", "categorical_crossentropy", one_hot, last="softmax", metrics=kind)
    sparse = ["acc", kinds.SparseCategoricalAccuracy(), kinds.SparseCategoricalCrossentropy()]
    yield compiled(
        "metrics of numbered classes", "sparse_categorical_crossentropy", classes, last="softmax", metrics=sparse
    )
    two = [
        "accuracy",
        kinds.BinaryAccuracy(threshold=0.4),
        kinds.BinaryCrossentropy(),
        kinds.Hinge(),
        kinds.SquaredHinge(),
    ]
    yield compiled("metrics of two classes", "binary_crossentropy", binary, last="sigmoid", width=1, metrics=two)
    yield compiled(
        "metrics of counts", "poisson", binary, last="relu", width=1, metrics=[kinds.Accuracy(), kinds.Poisson()]
    )


def optimizer_cases() -> Iterator[Case]:
    """Yield a case of each listed optimizer and learning rate, over three steps."""
    kinds, rates = keras.optimizers, keras.optimizers.schedules
    some = (
        *(kinds.SGD(0.1), kinds.SGD(0.1, momentum=0.9), kinds.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01)),
        *(kinds.RMSprop(0.01), kinds.RMSprop(0.01, momentum=0.5, centered=True, clipvalue=0.01)),
        *(kinds.Adam(0.01), kinds.Adam(0.01, amsgrad=True, clipnorm=0.05), kinds.AdamW(0.01, weight_decay=0.1)),
        *(kinds.Adagrad(0.1), kinds.Adadelta(1.0, global_clipnorm=0.05), kinds.Adamax(0.01), kinds.Nadam(0.01)),
        kinds.Lion(0.01),
        *(
            kinds.SGD(rates.ExponentialDecay(0.1, 2, 0.5)),
            kinds.Adam(rates.ExponentialDecay(0.1, 2, 0.5, staircase=True)),
        ),
        *(
            kinds.SGD(rates.InverseTimeDecay(0.1, 2, 0.5)),
            kinds.SGD(rates.PiecewiseConstantDecay([0, 1], [0.1, 0.2, 0.3])),
        ),
        *(
            kinds.SGD(rates.PolynomialDecay(0.1, 2, 0.01, 2)),
            kinds.SGD(rates.PolynomialDecay(0.1, 2, 0.01, cycle=True)),
        ),
        *(
            kinds.SGD(rates.CosineDecay(0.1, 2, 0.1)),
            kinds.SGD(rates.CosineDecay(0.1, 4, warmup_target=0.2, warmup_steps=2)),
        ),
    )
    for number, optimizer in enumerate(some):
        name = f"optimizer {number} {type(optimizer).__name__}"
        yield compiled(name, "mse", lambda rng: numbers(rng, BATCH, 3), optimizer=optimizer, steps=3)


def graph_cases() -> Iterator[Case]:
    """Yield models with several inputs, several outputs, shared layers and models inside models."""
    rng = np.random.default_rng(2)
    keras.utils.set_random_seed(2)
    left, right = keras.Input(VECTOR, name="left"), keras.Input((3,), name="right")
    shared = layers.Dense(5, activation="relu", name="shared")
    inner = keras.Sequential(
        [keras.Input((5,)), layers.Dense(4, activation="elu"), layers.BatchNormalization()], name="inner"
    )
    a, b = shared(left), shared(layers.Dense(8)(right))
    joined = layers.Concatenate()([inner(a), inner(b), a])
    outputs = [layers.Dense(2, activation="softmax", name="kind")(joined), layers.Dense(1, name="size")(b)]
    model = keras.Model([left, right], outputs)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        loss={"kind": "categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.3},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
        run_eagerly=True,
    )
    batches = [
        ([numbers(rng, BATCH, 8), numbers(rng, BATCH, 3)], [one_hot(rng, 2), numbers(rng, BATCH, 1)]) for _ in range(2)
    ]
    yield Case("graph of all kinds", model, batches)


def dropout_model(rate: float) -> Case:
    """Return a case for dropout: after one step, the kernel is 0 for dropped entries, and a scaled 2 for the remaining ones."""
    entry = keras.Input((4000,))
    model = keras.Model(entry, layers.Dense(1, use_bias=False, name="dense")(layers.Dropout(rate)(entry)))
    model.compile(keras.optimizers.SGD(1.0), "mse", run_eagerly=True)
    model.layers[-1].kernel.assign(np.zeros((4000, 1), "float32"))
    return Case("dropout", model, [([np.ones((1, 4000), "float32")], [np.ones((1, 1), "float32")])])


def webnn(rate: float = 0.05) -> Any:
    """Return the model of the WebNN paper: 5,994 parameters."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(8, 5, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.SGD(rate), "categorical_crossentropy", metrics=["accuracy"])
    return model


def mnist_case(steps: int = 20, batch: int = 64) -> Case:
    """Return steps of the WebNN paper's model on MNIST."""
    from ddlf.data.datasets import load_mnist

    (images, labels), _ = load_mnist()
    images = images[: steps * batch] + np.float32(0.5)  # black is 0, so that windows have ties
    parts = [slice(n * batch, (n + 1) * batch) for n in range(steps)]
    return Case("WebNN on MNIST", webnn(), [([images[part]], [labels[part]]) for part in parts])


def all_cases() -> Iterator[Case]:
    yield from layer_cases()
    yield from activation_cases()
    yield from loss_cases()
    yield from metric_cases()
    yield from optimizer_cases()
    yield from graph_cases()
