"""Texts of programs for the tests of rules: for each rule, a program with the defect and a near miss.

The parts that a rule does not change come from a healthy program.
"""

TEMPLATE = '''\
import os
import threading
import time

import keras
import numpy as np
from keras import layers

import ddlf


class App(ddlf.IApp):
    """A program."""

    batch_size = 32
    master_epochs = 10
{settings}
    def load_dataset(self):
        random = np.random.default_rng(0)
        x = random.normal(size=(1500, 20)).astype("float32")
        y = (x @ np.random.default_rng(1).normal(size=(20, 4))).argmax(axis=1)
        rows = np.eye(4, dtype="float32")[y]
        {data}
        self.x_train, self.y_train, self.x_test, self.y_test = x[:1200], y[:1200], x[1200:], y[1200:]
{more}
    def create_model(self):
        self.model = keras.Sequential(
            [
                keras.Input({shape}),
                {hidden},
                {last},
            ]
        )
        self.model.compile({optimizer}, {loss}, metrics=[{metrics}])
{made}'''
HEALTHY = {
    "settings": "",
    "data": "y = rows",
    "more": "",
    "shape": "(20,)",
    "hidden": 'layers.Dense(32, activation="relu")',
    "last": 'layers.Dense(4, activation="softmax")',
    "optimizer": "keras.optimizers.Adam(0.003)",
    "loss": '"categorical_crossentropy"',
    "metrics": '"accuracy"',
    "made": "",
}
REAL = {"data": "y = x[:, :4] * 2", "last": "layers.Dense(4)", "loss": '"mse"', "metrics": '"mae"'}
SPARSE = {"data": "pass", "loss": '"sparse_categorical_crossentropy"'}
IMAGES = {
    "data": "x, y = random.normal(size=(1500, 3, 16, 16)).astype('float32'), rows",
    "shape": "(3, 16, 16)",
    "hidden": 'layers.Conv2D(8, 3, padding="same", activation="relu"), layers.Flatten()',
}
PICTURES = {"data": "x, y = random.normal(size=(1500, 32, 32, 3)).astype('float32'), rows", "shape": "(32, 32, 3)"}
UNIT = {"data": "y = y > 1", "last": 'layers.Dense(1, activation="sigmoid")'}
LOGIT = {**UNIT, "last": "layers.Dense(1)", "loss": "keras.losses.BinaryCrossentropy(from_logits=True)"}
FEW = "        self.x_train, self.y_train = self.x_train[:{0}], self.y_train[:{0}]\n"
CONV = 'layers.Conv2D(8, 1, activation="relu")'
RARE = {"data": "y = (x[:, 0] > 1).astype(int)", "loss": '"sparse_categorical_crossentropy"'}
MASKING = "layers.Embedding(50, 8, mask_zero=True), layers.LSTM(8)"
TOKENS = {
    "data": "x, y = random.integers(1, 50, (1500, 20)), rows",
    "hidden": "layers.Embedding(50, 8), layers.LSTM(8)",
}
PADDED = {**TOKENS, "data": "x, y = random.integers(1, 50, (1500, 20)) * (np.arange(20) < 9), rows"}


def program(**changes: str) -> str:
    """Return the text of the healthy program with some parts replaced."""
    return TEMPLATE.format(**{**HEALTHY, **changes})


def of(bad: dict[str, str], near_miss: dict[str, str]) -> tuple[str, str]:
    """Return both programs of a rule."""
    return program(**bad), program(**near_miss)


def hidden(bad: str, near_miss: str) -> tuple[str, str]:
    return of({"hidden": bad}, {"hidden": near_miss})


def data(bad: str, near_miss: str = "y = rows", **both: str) -> tuple[str, str]:
    return of({"data": bad, **both}, {"data": near_miss, **both})


def optimizer(bad: str, near_miss: str) -> tuple[str, str]:
    return of({"optimizer": bad}, {"optimizer": near_miss})


def setting(bad: str, near_miss: str, **both: str) -> tuple[str, str]:
    return of({"settings": f"    {bad}\n", **both}, {"settings": f"    {near_miss}\n", **both})


def stack(*rows: str) -> str:
    return ",\n                ".join(rows)


RELU, SIGMOID = 'layers.Dense(32, activation="relu")', 'layers.Dense(32, activation="sigmoid")'
COSINE = "keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, {}))"

LANGUAGE = {
    "data": "x = (np.arange(21) * random.integers(1, 5, (1500, 1)) + random.integers(0, 30, (1500, 1))) % 50; x, y = x[:, :20], x[:, 1:]",
    "last": 'layers.Dense(50, activation="softmax")',
    "loss": '"sparse_categorical_crossentropy"',
}
MIXING = 'layers.Embedding(50, 16), layers.Conv1D(16, 3, padding="{}", activation="relu")'
FUNCTIONAL = '''\
import keras
import numpy as np
from keras import layers

import ddlf


class App(ddlf.IApp):
    """A program of several inputs and outputs."""

    def load_dataset(self):
        random = np.random.default_rng(0)
        x = random.normal(size=(1500, 20)).astype("float32")
        self.x_train = {{"a": x, "b": x[:, :4] + 1}}
        self.y_train = {{"one": {first}, "two": x[:, 1:2]}}

    def create_model(self):
        a, b = keras.Input((20,), name="a"), keras.Input((4,), name="b")
        h = layers.Concatenate()([layers.Dense(16, activation="relu")(a), layers.Dense(16, activation="relu")({second})])
        outputs = {{"one": layers.Dense(1, name="one")(h), "two": layers.Dense(1, name="two")(h)}}
        self.model = keras.Model({{"a": a, "b": b}}, outputs)
        self.model.compile("adam", {{"one": "mse", "two": "mse"}})
'''

EQUAL = {
    "data": "y = rows; self.lock = threading.Lock(); np.savetxt('numbers.txt', [os.getpid()])",
    "hidden": 'layers.Dense(32 + len("hidden") % 1000, activation="relu")',
}
"""A program with equal results in a second process, although it has a lock and writes its process id to a file."""

DIFFERENT = {
    "data": "x, y = x + np.random.normal(size=x.shape).astype('float32'), rows; "
    "np.savetxt('numbers.txt', [1]); np.loadtxt('numbers.txt')",
    "hidden": 'layers.Dense(32 + hash("hidden") % 1000, activation="relu")',
}
"""A program with other data and another model in a second process, and with a file that only this machine has."""


def two_heads(bad: str, near_miss: str) -> tuple[str, str]:
    return FUNCTIONAL.format(first=bad, second="b"), FUNCTIONAL.format(first=near_miss, second="b")


def two_inputs(bad: str, near_miss: str) -> tuple[str, str]:
    return FUNCTIONAL.format(first="x[:, :1]", second=bad), FUNCTIONAL.format(first="x[:, :1]", second=near_miss)


SHORT = "    batch_size = 300\n    master_epochs = {0}\n"
"""Settings of a short run. The number of epochs is filled in: the least number that the rule needs, or one."""
QUADRATIC = {**REAL, "settings": SHORT.format(5), "hidden": "layers.Identity()"}
ONE_WEIGHT = {
    "settings": "    batch_size = 1200\n    master_epochs = 10\n",
    "data": "x, y = np.ones((1500, 1), 'float32'), np.zeros((1500, 1), 'float32')",
    "shape": "(1,)",
    "hidden": "layers.Identity()",
    "last": "layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(0.3))",
    "loss": '"mae"',
    "metrics": "",
}
RANDOM_ROWS = (
    "x, y = x[:], np.eye(4, dtype='float32')[random.integers(0, 4, 1500)]; self.x_val, self.y_val = x[1200:], y[1200:]; "
    "x[:1200], y[:1200] = np.tile(x[:{0}], (1200 // {0}, 1)), np.tile(y[:{0}], (1200 // {0}, 1))"
)
LARGE_FOR_ITS_DATA = {
    "data": "x, y = x[:100], rows[:100]",
    "more": "        self.x_test, self.y_test = x[:20] + 0.1, y[:20]\n",
    "hidden": 'layers.Dense(2000, activation="relu"), layers.Dense(2000, activation="relu")',
}
TWO_SLOTS = {"settings": '    slots = 2\n    mode = "async"\n'}
SLOW = """
    class Slow(keras.callbacks.Callback):
        \"\"\"Holds up the worker that comes first.\"\"\"

        first = os.path.abspath("first")

        def on_train_begin(self, logs=None):
            self.began = time.monotonic()
            try:
                os.close(os.open(self.first, os.O_CREAT | os.O_EXCL))
                self.model.slow_rounds = 3
            except FileExistsError:
                pass

        def on_train_end(self, logs=None):
            if getattr(self.model, "slow_rounds", 0):
                self.model.slow_rounds -= 1
                threading.Event().wait(12 * (time.monotonic() - self.began))

    worker_callbacks = [Slow()]
"""
SERIES = {**REAL, "shape": "(20, 1)", "hidden": "layers.LSTM(8)", "last": "layers.Dense(1)"}
WINDOWS = "s = random.normal(size=1521).cumsum(); x, y = np.stack([s[i : i + 20] for i in range(1500)])[..., None] / 30, s[20:1520] / 30; "
OWN_TRAIN = """
    def train(self, weights, worker_epochs, batch_size):
        {0}
        for _ in range(worker_epochs):
            self.model.train_on_batch(self.x_train[self.indices], self.y_train[self.indices])
        return [before - after for before, after in zip(weights, self.model.get_weights(), strict=True)]
"""
PROGRAMS = {
    "D01": data("y = rows; x[7, 3] = np.nan", "y = rows; x[7, 3] = 9"),
    "D02": data("y = np.array(['a', 'b', 'c', 'd'])[y]", "pass", loss='"sparse_categorical_crossentropy"'),
    "D03": data("x, y = ((x + 4) * 32).clip(0, 255).astype('uint8'), rows", "x, y = x * 3, rows"),
    "D04": data(
        "x, y = x * np.logspace(-3, 3, 20).astype('float32'), rows", "x, y = x * np.logspace(-0.5, 0.5, 20), rows"
    ),
    "D05": data(
        "y = rows; x[1200:1260] = x[:60]", "x, y = np.repeat(x[:5], 300, axis=0), np.repeat(rows[:5], 300, axis=0)"
    ),
    "D06": data(
        "y = rows; x[10], y[10] = x[5], y[5]", "x, y = np.repeat(x[:5], 300, axis=0), np.repeat(rows[:5], 300, axis=0)"
    ),
    "D07": data("x[1:1000:2], y = x[0:999:2], rows", "y = rows"),
    "D08": data("x[:, 4], y = y, rows", "x[:, 4], y = y + random.normal(size=1500), rows"),
    "D09": data(
        "order = np.argsort(y[:1200]); x[:1200], y[:1200] = x[:1200][order], y[:1200][order]; y = np.eye(4)[y]",
        "y = rows",
    ),
    "D10": data("order = np.argsort(y, kind='stable'); x, y = x[order], rows[order]", "y = rows"),
    "D11": data(
        "y = (x[:, 0] > 1.9).astype(int)", "y = (x[:, 0] > 1).astype(int)", loss='"sparse_categorical_crossentropy"'
    ),
    "D12": data("y = x[:, :4] * 4000", "y = x[:, :4] * 4", last="layers.Dense(4)", loss='"mse"', metrics='"mae"'),
    "D13": data("y = np.eye(4)[y * 0]", "y = rows"),
    "D14": of(
        IMAGES,
        {
            **IMAGES,
            "data": "x, y = random.normal(size=(1500, 16, 16, 3)).astype('float32'), rows",
            "shape": "(16, 16, 3)",
        },
    ),
    "D15": data("y = rows; x[:, 3] = 1", "y = rows; x[:, 3] = 1; x[7, 3] = 0"),
    "D16": of(
        {"data": "x, y = np.tile(x, 300), rows", "shape": "(6000,)"},
        {
            "data": "x, y = np.tile(x, 300), rows",
            "shape": "(6000,)",
            "hidden": 'layers.Dense(32, activation="relu", kernel_regularizer="l1")',
        },
    ),
    "D17": of(
        {
            **IMAGES,
            "data": "x = random.normal(size=(1500, 16, 16, 3)); x[1200:1260] = x[:60] * 0.9 + 0.05 * x[60:120]; y = rows",
            "shape": "(16, 16, 3)",
        },
        {**IMAGES, "data": "x = random.normal(size=(1500, 16, 16, 3)); y = rows", "shape": "(16, 16, 3)"},
    ),
    "D18": data(
        "y[:1200:40] = (y[:1200:40] + 1) % 4; y = np.eye(4)[y]",
        "y = rows",
        settings="    master_epochs = 3\n",
        optimizer="keras.optimizers.Adam(0.01)",
    ),
    "D19": data("x[1200:] *= 16; y = rows", "x[1200:] *= 2; y = rows"),
    "D20": data("x, y = x * 0, rows", "x, y = (x > 1) * 1.0, rows"),
    "D21": data("x, y = x / 255 / 255, rows", "x, y = x / 20, rows"),
    "D22": of({"made": FEW.format(30)}, {"made": FEW.format(60)}),
    "D23": of(
        {**SERIES, "data": WINDOWS + "order = random.permutation(1500); x, y = x[order], y[order]"},
        {**SERIES, "data": WINDOWS + "pass"},
    ),
    "D24": data("random.shuffle(x); y = rows", "order = random.permutation(1500); x, y = x[order], rows[order]"),
    "D25": of(
        {
            **TOKENS,
            "data": "x, y = np.where(random.random((1500, 20)) < 0.7, 1, random.integers(2, 50, (1500, 20))), rows",
        },
        TOKENS,
    ),
    "L01": of(
        {**UNIT, "last": 'layers.Dense(1, activation="softmax")', "loss": '"binary_crossentropy"'},
        {**UNIT, "loss": '"binary_crossentropy"'},
    ),
    "L02": of(
        {"last": "layers.Dense(4)"},
        {"last": "layers.Dense(4)", "loss": "keras.losses.CategoricalCrossentropy(from_logits=True)"},
    ),
    "L03": of({**SPARSE, "data": "y = y + 1"}, SPARSE),
    "L04": of({**REAL, "data": "y = x[:, :1]"}, {**REAL, "data": "y = x[:, 0]", "last": "layers.Dense(1)"}),
    "L05": of({"data": "pass"}, SPARSE),
    "L06": of({**SPARSE, "data": "y = rows"}, SPARSE),
    "L07": of({**REAL, "last": 'layers.Dense(4, activation="relu")'}, REAL),
    "L08": of(
        {
            **REAL,
            "data": "y = abs(x[:, :4])",
            "loss": '"kl_divergence"',
            "last": 'layers.Dense(4, activation="softmax")',
        },
        {"loss": '"kl_divergence"'},
    ),
    "L09": of(
        {"last": 'layers.Dense(4, activation="sigmoid")'},
        {
            "data": "y = (x[:, :4] > 0).astype('float32')",
            "last": 'layers.Dense(4, activation="sigmoid")',
            "loss": '"binary_crossentropy"',
        },
    ),
    "L10": of(
        {"loss": '"binary_crossentropy"'},
        {
            "data": "y = (x[:, :4] > 1).astype('float32')",
            "last": 'layers.Dense(4, activation="sigmoid")',
            "loss": '"binary_crossentropy"',
        },
    ),
    "L11": of({"loss": '"mse"'}, {**REAL, "data": "y = rows + 0.01 * x[:, :4]"}),
    "L12": of({**REAL, "metrics": '"accuracy"'}, REAL),
    "L14": of(
        {
            "data": "y = np.eye(1500, dtype='float32')[np.arange(1500) % 1000 + y]",
            "last": 'layers.Dense(1500, activation="softmax")',
        },
        {
            "data": "y = np.arange(1500) % 1000 + y",
            "last": 'layers.Dense(1500, activation="softmax")',
            "loss": '"sparse_categorical_crossentropy"',
        },
    ),
    "L13": two_heads("500 * x[:, :1]", "x[:, :1]"),
    "L15": of(UNIT, {**UNIT, "loss": '"binary_crossentropy"'}),
    "L16": of(
        {**REAL, "loss": "lambda y, p: -keras.ops.mean((y - p) ** 2)"},
        {**REAL, "loss": "lambda y, p: -keras.ops.mean(keras.ops.tanh(y * p))"},
    ),
    "L17": of({"metrics": '"binary_accuracy"'}, {"metrics": '"categorical_accuracy"'}),
    "L18": of(
        {**LANGUAGE, "data": LANGUAGE["data"] + "; y = x", "hidden": MIXING.format("causal")},
        {**LANGUAGE, "hidden": MIXING.format("causal")},
    ),
    "L19": of(
        {**LANGUAGE, "hidden": MIXING.format("causal"), "last": "layers.Dense(50), layers.Softmax(axis=1)"},
        {**LANGUAGE, "hidden": MIXING.format("causal"), "last": "layers.Dense(50), layers.Softmax(axis=2)"},
    ),
    "L20": of({**LOGIT, "metrics": '"accuracy"'}, {**LOGIT, "metrics": "keras.metrics.BinaryAccuracy(threshold=0.0)"}),
    "L21": of(
        {"loss": "lambda y, p: keras.ops.mean(keras.ops.sum(y * keras.ops.log(p + 1e-3), axis=-1))"},
        {"loss": "lambda y, p: -keras.ops.mean(keras.ops.sum(y * keras.ops.log(p + 1e-3), axis=-1))"},
    ),
    "L22": of(
        {
            **REAL,
            "data": "y = x[:, 0] * 2",
            "last": "layers.Dense(1)",
            "loss": "lambda y, p: keras.ops.mean((keras.ops.reshape(y, (-1,)) - p) ** 2)",
        },
        {
            **REAL,
            "data": "y = x[:, :1] * 2",
            "last": "layers.Dense(1)",
            "loss": "lambda y, p: keras.ops.mean((y - p) ** 2)",
        },
    ),
    "M01": of(
        {"hidden": 'layers.Dense(32, activation="relu", kernel_initializer="zeros")'},
        {"last": 'layers.Dense(4, activation="softmax", kernel_initializer="zeros")'},
    ),
    "M02": hidden(stack("layers.Dense(32)", RELU), stack("layers.Dense(8)", RELU)),
    "M03": hidden(stack(*[RELU] * 24), stack(*[RELU] * 12, "layers.LayerNormalization()", *[RELU] * 12)),
    "M04": hidden(stack(*[SIGMOID] * 6), stack(*[SIGMOID] * 3)),
    "M05": hidden(
        stack(RELU, "layers.Dropout(0.3)", "layers.BatchNormalization()"),
        stack(RELU, "layers.BatchNormalization()", "layers.Dropout(0.3)"),
    ),
    "M06": of(
        {"last": 'layers.Dense(4, activation="softmax"),\n                layers.Dropout(0.3)'},
        {"hidden": stack(RELU, "layers.Dropout(0.3)")},
    ),
    "M07": hidden('layers.Dense(32, activation="softmax")', RELU),
    "M08": of(
        {"last": 'layers.Dense(4, activation="relu"), layers.Softmax()'}, {"last": "layers.Dense(4), layers.Softmax()"}
    ),
    "M09": hidden(
        stack("layers.Dense(32)", "layers.BatchNormalization()", "layers.ReLU()"),
        stack("layers.Dense(32, use_bias=False)", "layers.BatchNormalization()", "layers.ReLU()"),
    ),
    "M10": of(
        {"made": "        self.model.trainable = False\n"},
        {"made": "        self.model.layers[0].trainable = False\n"},
    ),
    "M11": of(
        {"last": 'layers.Dense(4, activation="softmax", trainable=False)'},
        {"hidden": 'layers.Dense(32, activation="relu", trainable=False)'},
    ),
    "M12": of({**TOKENS, "data": "x, y = random.integers(1, 51, (1500, 20)), rows"}, TOKENS),
    "M13": of({**TOKENS, "data": "x, y = random.integers(1, 50, (1500, 20)) * (np.arange(20) < 9), rows"}, TOKENS),
    "M14": hidden(stack(RELU, "layers.Dropout(0.9)"), stack(RELU, "layers.Dropout(0.5)")),
    "M15": hidden(
        'layers.Dense(32, activation="relu", kernel_regularizer=keras.regularizers.L2(1.0))',
        'layers.Dense(32, activation="relu", kernel_regularizer=keras.regularizers.L2(0.01))',
    ),
    "M16": hidden(
        'layers.Dense(32, activation="relu", kernel_initializer=keras.initializers.RandomNormal(stddev=5.0))',
        'layers.Dense(32, activation="relu", kernel_initializer=keras.initializers.RandomNormal(stddev=0.05))',
    ),
    "M17": of({"shape": "(30,)"}, {"shape": "(20,)"}),
    "M18": of(
        {**PICTURES, "hidden": "layers.Conv2D(8, 3, activation='relu'), layers.GlobalAveragePooling2D()"},
        {
            **PICTURES,
            "hidden": "layers.Conv2D(8, 3, 2, activation='relu'), layers.MaxPooling2D(4), layers.Conv2D(8, 3), layers.GlobalMaxPooling2D()",
        },
    ),
    "M19": of(
        {**PICTURES, "hidden": stack("layers.MaxPooling2D(32)", CONV, "layers.Flatten()")},
        {**PICTURES, "hidden": stack(CONV, "layers.MaxPooling2D(32)", "layers.Flatten()")},
    ),
    "M20": hidden(
        stack("layers.Lambda(lambda a: keras.ops.log(a))", RELU),
        stack("layers.Lambda(lambda a: keras.ops.log(abs(a) + 1))", RELU),
    ),
    "M21": hidden(
        stack(RELU, "layers.Lambda(lambda a: keras.ops.stop_gradient(a) * 0)"),
        stack(RELU, "layers.Lambda(lambda a: a * 2)"),
    ),
    "M22": hidden(
        stack(RELU, "layers.Lambda(lambda a: keras.ops.softmax(a, axis=0))"),
        stack(RELU, "layers.Lambda(lambda a: keras.ops.softmax(a, axis=1) * 9)"),
    ),
    "M23": of({**LANGUAGE, "hidden": MIXING.format("same")}, {**LANGUAGE, "hidden": MIXING.format("causal")}),
    "M24": hidden(stack(RELU, "layers.Lambda(lambda a: keras.ops.stop_gradient(a))"), RELU),
    "M25": hidden(stack(*[SIGMOID] * 8), stack(*[SIGMOID] * 3)),
    "M26": hidden('layers.Dense(32, activation="relu", bias_initializer=keras.initializers.Constant(-30.0))', RELU),
    "M27": hidden(
        'layers.Dense(32, activation="tanh", kernel_initializer=keras.initializers.VarianceScaling(100.0))',
        'layers.Dense(32, activation="tanh")',
    ),
    "M28": hidden(
        'layers.Dense(32, activation="relu", kernel_initializer=keras.initializers.VarianceScaling(9000.0))', RELU
    ),
    "M29": two_inputs("b * 0", "b"),
    "M30": hidden(
        stack(RELU, "layers.Lambda(lambda a: a + keras.random.normal(keras.ops.shape(a)))"),
        stack(RELU, "layers.GaussianNoise(0.1)"),
    ),
    "M31": hidden(stack(RELU, 'layers.Dense(1, activation="relu")'), stack(RELU, 'layers.Dense(8, activation="relu")')),
    "M32": of(
        {"made": "        self.model.layers[0].trainable = False\n"},
        {
            "made": "        self.model.layers[0].set_weights([w * 0.9 + 0.01 for w in self.model.layers[0].get_weights()])\n"
            "        self.model.layers[0].trainable = False\n"
        },
    ),
    "M33": hidden(
        stack(RELU, "layers.BatchNormalization(momentum=0.9999)"),
        stack(RELU, "layers.BatchNormalization(momentum=0.98)"),
    ),
    "M34": hidden(
        stack(RELU, "layers.Lambda(lambda a: keras.ops.reshape(a, (60, 16)) if a.shape[0] else a)"),
        stack(RELU, "layers.Lambda(lambda a: keras.ops.reshape(a, (-1, 32)))"),
    ),
    "M35": of(
        {**TOKENS, "data": "x, y = random.integers(0, 50, (1500, 20)), rows", "hidden": MASKING},
        {**PADDED, "hidden": MASKING},
    ),
    "M36": of(
        {**PADDED, "hidden": "layers.Reshape((20, 1)), layers.LSTM(8)"},
        {**PADDED, "hidden": MASKING},
    ),
    "M37": setting("batch_size = 1", "batch_size = 32", hidden=stack(RELU, "layers.BatchNormalization()")),
    "M38": hidden(stack("layers.Normalization()", RELU), stack("layers.Normalization(mean=0.5, variance=2.0)", RELU)),
    "T01": optimizer("keras.optimizers.Adam(1.0)", "keras.optimizers.Adam(0.01)"),
    "T02": of(
        {"hidden": 'layers.Dense(32, activation="relu", dtype="float16")'},
        {"hidden": 'layers.Dense(32, activation="relu", dtype="mixed_bfloat16")'},
    ),
    "T03": of(
        {"last": 'layers.Dense(4, activation="softmax", dtype="float16")'},
        {"last": 'layers.Dense(4, activation="softmax", dtype="bfloat16")'},
    ),
    "T04": of(
        {"data": "x, y = np.tile(x, 20), rows", "shape": "(400,)", "hidden": 'layers.Dense(4096, activation="relu")'},
        {
            "data": "x, y = np.tile(x, 20), rows",
            "shape": "(400,)",
            "hidden": 'layers.Dense(4096, activation="relu"), layers.Dropout(0.5)',
        },
    ),
    "T05": optimizer(COSINE.format(5000), COSINE.format(380)),
    "T06": setting("batch_size = 512", "batch_size = 64"),
    "T07": optimizer(COSINE.format(20), COSINE.format(190)),
    "T08": optimizer("keras.optimizers.SGD(0.05, clipnorm=0.0001)", "keras.optimizers.SGD(0.05, clipnorm=1.0)"),
    "T09": of(
        {"made": '        self.callbacks = [keras.callbacks.EarlyStopping("val_loss")]\n'},
        {"made": '        self.callbacks = [keras.callbacks.EarlyStopping("loss")]\n'},
    ),
    "T10": optimizer(
        "keras.optimizers.AdamW(0.003, weight_decay=2.0)", "keras.optimizers.AdamW(0.003, weight_decay=0.01)"
    ),
    "T11": setting("class_weight = {1: 2.0, 4: 2.0}", "class_weight = {1: 2.0, 3: 2.0}"),
    "T12": hidden(
        stack("layers.RepeatVector(50_000_000)", "layers.GlobalAveragePooling1D()"),
        stack("layers.RepeatVector(5)", "layers.GlobalAveragePooling1D()"),
    ),
    "T13": setting("class_weight = {0: 8.0, 1: 1.0}", "class_weight = {0: 1.0, 1: 8.0}", **RARE),
    "T14": setting("master_epochs = 1", "master_epochs = 5"),
    "C01": of(DIFFERENT, EQUAL),
    "C02": of(DIFFERENT, EQUAL),
    "C03": of(
        {
            "more": "\n    def __init__(self, cluster=None):\n        super().__init__(cluster)\n        self.lock = threading.Lock()\n"
        },
        EQUAL,
    ),
    "C04": of(DIFFERENT, EQUAL),
    "C05": of(
        {"data": "y = rows if os.getpid() == PID else rows / 0 / PID_OF_ANOTHER", "made": "\n\nPID = os.getpid()\n"},
        EQUAL,
    ),
    "C06": optimizer(COSINE.format(380), COSINE.format(190)),
    "C07": setting('optimizer_state = "fresh"', 'optimizer_state = "kept"'),
    "C08": setting("batch_size = 80", "batch_size = 32"),
    "C09": setting("batch_size = 8", "batch_size = 32", hidden=stack(RELU, "layers.BatchNormalization()")),
    "C10": of(
        {"made": '        self.worker_callbacks = [keras.callbacks.EarlyStopping("loss")]\n'},
        {"made": '        self.callbacks = [keras.callbacks.EarlyStopping("loss")]\n'},
    ),
    "C11": of(
        {"hidden": 'layers.Dense(50_000, activation="relu"), layers.Dropout(0.5)'},
        {
            "hidden": 'layers.Dense(50_000, activation="relu"), layers.Dropout(0.5)',
            "optimizer": "keras.optimizers.SGD(0.05)",
        },
    ),
    "C12": of(
        {**LARGE_FOR_ITS_DATA, "settings": "    slots = 2\n"},
        {**LARGE_FOR_ITS_DATA, "settings": "    slots = 2\n    worker_epochs = 300\n"},
    ),
    "C13": of({"more": OWN_TRAIN.format("pass")}, {"more": OWN_TRAIN.format("self.model.set_weights(weights)")}),
    "C14": of(
        {"made": "        self.model.other_optimizer = keras.optimizers.Adam()\n"},
        {"made": "        self.model.same_optimizer = self.model.optimizer\n"},
    ),
    "C16": setting("worker_epochs = 10", "worker_epochs = 2"),
    "R01": of(
        {"settings": SHORT.format(2), "optimizer": "keras.optimizers.SGD(1e30)"},
        {"settings": SHORT.format(2), "optimizer": "keras.optimizers.SGD(0.1)"},
    ),
    "R02": of(
        {**QUADRATIC, "optimizer": "keras.optimizers.SGD(4.5)"}, {**QUADRATIC, "optimizer": "keras.optimizers.SGD(0.5)"}
    ),
    "R03": of(
        {**ONE_WEIGHT, "optimizer": "keras.optimizers.SGD(1.0)"},
        {**ONE_WEIGHT, "optimizer": "keras.optimizers.SGD(0.01)"},
    ),
    "R04": of(
        {"settings": SHORT.format(9), "optimizer": "keras.optimizers.SGD(1e-9)"},
        {"settings": SHORT.format(9), "optimizer": "keras.optimizers.Adam(0.01)"},
    ),
    "R05": of(
        {
            "settings": "    batch_size = 100\n    master_epochs = 7\n",
            "data": RANDOM_ROWS.format(40),
            "optimizer": "keras.optimizers.Adam(0.01)",
            "hidden": 'layers.Dense(256, activation="relu")',
        },
        {"settings": SHORT.format(6), "data": "y = rows; self.x_val, self.y_val = x[1200:], y[1200:]"},
    ),
    "R06": of({"more": SLOW, **TWO_SLOTS}, TWO_SLOTS),
}
"""For each rule, the text of a program with the defect and the text of a near miss."""
