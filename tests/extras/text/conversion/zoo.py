"""Models of Keras of all kinds; a function creates each one.

``APPLICATIONS`` are the models of ``keras.applications``, with random weights.
"""

import contextlib
import importlib

import numpy as np

from tests.later import Later

keras, layers, ops = Later("keras"), Later("keras.layers"), Later("keras.ops")

APPLICATIONS = {
    "MobileNet": (32, 32, 3),
    "MobileNetV2": (32, 32, 3),
    "MobileNetV3Small": (32, 32, 3),
    "ResNet50": (32, 32, 3),
    "ResNet50V2": (32, 32, 3),
    "DenseNet121": (32, 32, 3),
    "EfficientNetB0": (32, 32, 3),
    "EfficientNetV2B0": (32, 32, 3),
    "InceptionV3": (75, 75, 3),
    "Xception": (71, 71, 3),
    "NASNetMobile": (32, 32, 3),
    "VGG16": (32, 32, 3),
    "ConvNeXtTiny": (32, 32, 3),
}
SHORT = ("MobileNetV3Small", "EfficientNetB0", "ConvNeXtTiny")
"""A few fast applications. With the small models they have almost all kinds of layers that the applications have.
``python -m tests.trials.applications`` tests all applications."""
APPS = {
    "digits_cnn": "apps.digits_cnn.DigitsCNN",
    "mnist_cnn": "apps.mnist_cnn.MNISTCNN",
    "cifar10_cnn": "apps.cifar10_cnn.CIFAR10CNN",
    "xor": "apps.xor.Xor",
}


def application(name):
    shape = APPLICATIONS[name]
    return getattr(keras.applications, name)(weights=None, input_shape=shape, classes=10)


def app(name):
    module, _, kind = APPS[name].rpartition(".")
    instance = getattr(importlib.import_module(module), kind)()
    run = instance.create_model()
    if hasattr(run, "send"):
        with contextlib.suppress(StopIteration):
            run.send(None)
    return instance.model


def shared():
    """Return a model with one embedding and one tower for two inputs, and a layer that reads its own output."""
    left, right = keras.Input((6,), dtype="int32", name="left"), keras.Input((6,), dtype="int32", name="right")
    embed, dense = layers.Embedding(20, 4), layers.Dense(5, activation="relu")
    a, b = (dense(layers.GlobalAveragePooling1D()(embed(tokens))) for tokens in (left, right))
    again = layers.Dense(5)
    similarity = layers.Dot(-1, normalize=True)([again(again(a)), again(b)])
    return keras.Model([left, right], similarity, name="siamese")


def nested():
    """Return a model with a Sequential and a functional model as nested layers, called twice."""
    tower = keras.Sequential(
        [keras.Input((8,)), layers.Dense(4, name="inner"), layers.BatchNormalization()], name="Tower"
    )
    x = keras.Input((8,), name="x")
    inner = keras.Model(x, [tower(x), layers.Dense(4, name="inner")(x)], name="two-ways")
    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    half, side = inner(a)
    last = layers.Concatenate()([half, side, tower(b), inner(b)[1]])
    return keras.Model({"a": a, "b": b}, {"main": layers.Dense(2)(last), "side": side}, name="nested")


def several():
    """Return a model with inputs of several types, a list of outputs, one tensor used twice, and attention with named arguments."""
    text = keras.Input((None,), dtype="int64", name="text")
    image = keras.Input((8, 8, 3), name="image", batch_size=2)
    mask = keras.Input((None,), dtype="bool", name="the mask")
    words = layers.Embedding(50, 8)(text)
    patches = layers.Reshape((64, 3))(image)
    patches = layers.Dense(8)(patches)
    mixed, scores = layers.MultiHeadAttention(2, 4, dropout=0.1)(
        words, patches, return_attention_scores=True, query_mask=mask
    )
    pooled = layers.GlobalMaxPooling1D()(mixed)
    return keras.Model([text, image, mask], [layers.Dense(3, activation="softmax")(pooled), pooled, pooled, scores])


def recurrent():
    """Return an encoder and decoder connected by states, with a wrapper layer and masks."""
    source, target = keras.Input((None,), name="source"), keras.Input((None, 5), name="target")
    words = layers.Embedding(30, 6, mask_zero=True)(source)
    both = layers.Bidirectional(layers.GRU(4, return_sequences=True))(words)
    _, hidden, cell = layers.LSTM(7, return_state=True)(both)
    out = layers.LSTM(7, return_sequences=True, dropout=0.1, seed=3)(target, initial_state=[hidden, cell])
    tower = keras.Sequential([keras.Input((7,)), layers.Dense(3, "tanh"), layers.Dense(2)])
    return keras.Model([source, target], layers.TimeDistributed(tower)(out))


def operations():
    """Return a model with arithmetic operators and ``keras.ops``."""
    x = keras.Input((6, 4))
    y = x[:, 1:5:2, ...] * 2.0 + x[:, :2]
    y = ops.concatenate([y, ops.relu(x[:, 3:])], axis=1)
    y = ops.mean(y - ops.max(x, axis=1, keepdims=True), axis=-1) @ np.ones((5, 3), "float32")
    return keras.Model(x, ops.where(y > 0, y, 0.5 * y))


def customised():
    """Return a model with a registered layer and function, objects as arguments, and settings of single layers."""
    from tests.extras.text.conversion.registered import Scaled, swish

    x = keras.Input((8,))
    y = Scaled(2.5, more={"depth": 2, "kinds": ["a", "b c"]})(x)
    y = layers.Dense(
        6,
        activation=swish,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.2, seed=4),
        kernel_regularizer=keras.regularizers.L1L2(1e-4, 1e-3),
        kernel_constraint="max_norm",
        name="a name with spaces",
    )(y)
    y = layers.Dense(4, dtype="mixed_float16", trainable=False)(y)
    y = layers.ReLU(max_value=6)(y)
    return keras.Model(x, layers.Activation("softmax", dtype="float32")(y), name="Own")


def images():
    """Return a stack with augmentation, paddings and windows of two sizes."""
    return keras.Sequential(
        [
            keras.Input((16, 16, 3), dtype="uint8"),
            layers.Rescaling(1 / 127.5, offset=-1),
            layers.RandomFlip("horizontal", seed=1),
            layers.ZeroPadding2D(((1, 0), (0, 1))),
            layers.Conv2D(8, (3, 1), strides=(2, 1), padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.SeparableConv2D(8, 3, dilation_rate=2),
            layers.MaxPooling2D((2, 3), strides=1),
            layers.AveragePooling2D(2, strides=1, padding="same"),
            layers.Conv2DTranspose(4, 3, strides=2),
            layers.UpSampling2D(2, interpolation="bilinear"),
            layers.Flatten(),
            layers.SpectralNormalization(layers.Dense(5)),
            layers.Dropout(0.5, seed=7),
        ]
    )


def unet():
    """Return a model with skip connections around its inner layers."""
    x = first = keras.Input((16, 16, 2))
    ways = []
    for size in (4, 8):
        x = layers.Conv2D(size, 3, padding="same", activation="relu")(x)
        ways.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(16, 3, padding="same")(x)
    for size, way in ((8, ways[1]), (4, ways[0])):
        x = layers.Concatenate()([way, layers.Conv2DTranspose(size, 2, strides=2)(x)])
    return keras.Model(first, layers.Conv2D(1, 1)(x), name="unet")


SMALL_MODELS = {
    make.__name__: make for make in (shared, nested, several, recurrent, operations, customised, images, unet)
}


def model_named(name):
    """Return the model with this name."""
    if name in APPLICATIONS:
        return application(name)
    return app(name) if name in APPS else SMALL_MODELS[name]()


def inputs(model, seed=0):
    """Return random inputs for a model, in the structure that it accepts."""
    random = np.random.default_rng(seed)

    def values(tensor):
        shape = [2 if size is None and not at else size or 7 for at, size in enumerate(tensor.shape)]
        if tensor.dtype == "bool":
            return random.random(shape) < 0.5
        if "int" in tensor.dtype or "source" in tensor.name:
            return random.integers(0, 20, shape).astype(tensor.dtype)
        return random.normal(size=shape).astype(tensor.dtype)

    first = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return keras.tree.map_structure(values, first)
