"""Defects of outputs and losses. The module ``defects`` explains their form."""

from __future__ import annotations

from benchmarks.advice.defects import MISLEADS, of

SOFTMAX, SIGMOID = 'layers.Dense(10, activation="softmax")', 'activation="sigmoid"'
SPARSE, ONE_HOT = '"sparse_categorical_crossentropy"', 'loss="categorical_crossentropy"'
BENIGN, HIDDEN = (
    'layers.Dense(1, activation="sigmoid", name="benign")',
    'layers.Dense(16, activation="relu", name="hidden")',
)


OUTPUTS = (
    of("no softmax at the end", "digits_mlp", "L02", SOFTMAX, "layers.Dense(10)"),
    of("no softmax at the end", "digits_cnn", "L02", SOFTMAX, "layers.Dense(10)"),
    of("no sigmoid at the end", "tumours", "L02", BENIGN, 'layers.Dense(1, name="benign")'),
    of(
        "logits not said to the loss",
        "letters",
        "L02",
        "SparseCategoricalCrossentropy(from_logits=True)",
        "SparseCategoricalCrossentropy()",
    ),
    of("relu at the end of a classifier", "digits_mlp", "L02", SOFTMAX, 'layers.Dense(10, activation="relu")'),
    of(
        "relu at the end of a classifier", "tumours", "L02", BENIGN, 'layers.Dense(1, activation="relu", name="benign")'
    ),
    of("tanh at the end of a classifier", "digits_cnn", "L02", SOFTMAX, 'layers.Dense(10, activation="tanh")'),
    of(
        "sigmoid at the end of a regression",
        "friedman",
        "L07",
        "outputs = layers.Dense(1)(h)",
        'outputs = layers.Dense(1, activation="sigmoid")(h)',
    ),
    of("relu at the end of a regression", "tides", "L07", "layers.Dense(1)]", 'layers.Dense(1, activation="relu")]'),
    of(
        "relu at the end of a regression",
        "friedman",
        "L07",
        "outputs = layers.Dense(1)(h)",
        'outputs = layers.Dense(1, activation="relu")(h)',
    ),
    of("softmax over one unit", "tumours", "L01", BENIGN, 'layers.Dense(1, activation="softmax", name="benign")'),
    of(
        "softmax over one unit",
        "reviews",
        "L01",
        'layers.Dense(1, activation="sigmoid")',
        'layers.Dense(1, activation="softmax")',
    ),
    of("softmax where several labels may hold", "attributes", "L08 L07 L10 L02", SIGMOID, 'activation="softmax"'),
    of("softmax of a softmax", "digits_mlp", "L02 M08", SOFTMAX, f"{SOFTMAX},\n                layers.Softmax()"),
    of(
        "activation before the softmax",
        "digits_cnn",
        "M08",
        SOFTMAX,
        'layers.Dense(10, activation="relu"))\n        model.add(layers.Softmax()',
    ),
    of(
        "one class of logits for two units",
        "halves",
        "L02",
        'layers.Dense(10, activation="softmax", name="digit")',
        'layers.Dense(10, name="digit")',
    ),
    of("dropout behind the output", "digits_mlp", "M06", SOFTMAX, f"{SOFTMAX},\n                layers.Dropout(0.5)"),
    of("too few units at the end", "digits_mlp", "L03 L04", SOFTMAX, 'layers.Dense(9, activation="softmax")'),
    of("too many units at the end", "digits_cnn", "L04", SOFTMAX, 'layers.Dense(12, activation="softmax")'),
    of("no flattening", "digits_cnn", "L04", "        model.add(layers.Flatten())\n", ""),
    of("a sequence where its end is wanted", "tides", "L04", "layers.GRU(16)", "layers.GRU(16, return_sequences=True)"),
)

LOSSES = (
    of("squared error for classes", "digits_cnn", "L11", ONE_HOT, 'loss="mse"'),
    of("absolute error for classes", "digits_cnn", "L11", ONE_HOT, 'loss="mae"'),
    of("squared error of class numbers", "digits_mlp", "L04 L07 L11", SPARSE, '"mse"'),
    of("one-hot loss for one unit", "tumours", "L15", '"binary_crossentropy"', '"categorical_crossentropy"'),
    of("one-hot loss for numbers", "digits_mlp", "L05", SPARSE, '"categorical_crossentropy"'),
    of("number loss for one-hot rows", "digits_cnn", "L06", ONE_HOT, 'loss="sparse_categorical_crossentropy"'),
    of("binary loss for class numbers", "digits_mlp", "L03 L04 L10", SPARSE, '"binary_crossentropy"'),
    of("hinge for 0 and 1", "digits_cnn", "L11 L03 L10", ONE_HOT, 'loss="hinge"'),
    of("divergence of targets that are not shares", "friedman", "L08", 'loss="mse"', 'loss="kl_divergence"'),
    of("Poisson for targets that may be negative", "friedman", "L03", 'loss="mse"', 'loss="poisson"'),
    of(
        "logits said where there are none",
        "tumours",
        "L02",
        '"binary_crossentropy"',
        "keras.losses.BinaryCrossentropy(from_logits=True)",
    ),
    of(
        "logits said where there are none",
        "digits_mlp",
        "L02",
        SPARSE,
        "keras.losses.SparseCategoricalCrossentropy(from_logits=True)",
        "keras.optimizers.Adam(0.003)",
        "keras.optimizers.SGD(0.003)",
    ),
    of(
        "a loss with the wrong sign",
        "friedman",
        "L16",
        'loss="mse"',
        "loss=lambda y, p: -keras.ops.mean((y - p) ** 2)",
    ),
    of(
        "one loss far larger than the other",
        "halves",
        "L13",
        '"ink": "mse"}',
        '"ink": "mse"}, loss_weights={"digit": 1e-4, "ink": 100.0}',
    ),
    of("accuracy of a number", "friedman", "L12", 'metrics=["mae"]', 'metrics=["accuracy"]', nature=MISLEADS),
)
