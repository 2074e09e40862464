"""Facts for the tests of rules: for each rule, facts with the defect and a near miss without it."""

from dataclasses import replace

from ddlf.events.record import RoundRecord
from ddlf.extras.advice.facts import (
    AppFacts,
    ArrayFacts,
    LabelFacts,
    LayerFacts,
    OptimizerFacts,
    OutputFacts,
    SampleFacts,
    Shared,
)

SETTINGS = {
    "batch_size": 32,
    "master_epochs": 10,
    "slots": None,
    "optimizer_state": "kept",
    "class_weight": None,
    "callbacks": (),
}
ROUNDS = {
    "settings": {
        **SETTINGS,
        "mode": "sync",
        "exchange": "star",
        "codec": "Float32",
        "worker_epochs": 1,
        "worker_steps": None,
    }
}
X = ArrayFacts(name="x_train", shape=(1000, 20))
ONE_HOT = LabelFacts(kind="one_hot", counts={0: 250, 1: 250, 2: 250, 3: 250}, sums=(1.0, 1.0))
NUMBERS = LabelFacts(kind="numbers", counts={0: 250, 1: 250, 2: 250, 3: 250})
Y = ArrayFacts(name="y_train", letter="y", shape=(1000, 4), low=0, high=1, is_whole=True, labels=ONE_HOT)
CLASSES = ArrayFacts(name="y_train", letter="y", shape=(1000,), low=0, high=3, is_whole=True, labels=NUMBERS)
REAL = ArrayFacts(name="y_train", letter="y", shape=(1000, 4), low=-3, high=3, labels=LabelFacts(sums=(-4.0, 4.0)))
TEST_X = ArrayFacts(name="x_test", part="test", shape=(200, 20))
HIDDEN = LayerFacts(
    name="hidden", kind="Dense", reads=("input",), config={"units": 32}, activation="relu", input_shape=(20,), shape=(32,),
    parameters=672, trained=672, fan_in=20, initializer="GlorotUniform",
)  # fmt: skip
LAST = replace(
    HIDDEN,
    name="output",
    reads=("hidden",),
    config={"units": 4},
    activation="softmax",
    input_shape=(32,),
    shape=(4,),
    fan_in=32,
)
HEAD = OutputFacts(shape=(4,), activation="softmax", loss="cce", metrics=("accuracy",), target="y_train")
FACTS = AppFacts(
    arrays=(X, Y), rows=SampleFacts(examined=1000, distinct=1000), layers=(HIDDEN, LAST), inputs=(("input", (20,), "float32"),), heads=(HEAD,),
    optimizer=OptimizerFacts(), settings=SETTINGS,
)  # fmt: skip


def data(*arrays, **more):
    return replace(FACTS, arrays=arrays, **more)


def x(**changes):
    return data(replace(X, **changes), Y)


def y(array=Y, **changes):
    return data(X, replace(array, **changes))


def head(array=Y, **changes):
    return data(X, array, heads=(replace(HEAD, **changes),))


def layers(*rows, **more):
    """Return the facts of a model with these layers, one after another, between an input and the output."""
    chain, before = [], "input"
    for number, row in enumerate(rows):
        row = replace(row, name=f"{row.kind.lower()}_{number}", reads=(before,))
        before = row.name
        chain.append(row)
    return replace(FACTS, layers=(*chain, replace(LAST, reads=(before,))), **more)


def hidden(**changes):
    return replace(FACTS, layers=(replace(HIDDEN, **changes), LAST))


def dense(activation="relu", width=32, before=32, **more):
    return replace(HIDDEN, activation=activation, shape=(width,), input_shape=(before,), **more)


def layer(kind, **more):
    return LayerFacts(name="", kind=kind, **more)


def optimizer(**changes):
    return replace(FACTS, optimizer=replace(OptimizerFacts(), **changes))


def settings(**changes):
    return replace(FACTS, settings={**SETTINGS, **changes})


def rows(**changes):
    return replace(FACTS, rows=replace(FACTS.rows, **changes), arrays=(X, Y, TEST_X))


def observed(**values):
    return replace(FACTS, observations=values)


def record(number, loss, **more):
    zeros = dict.fromkeys(("epochs", "samples", "bytes_out", "bytes_back"), 0)
    metrics = {"loss": loss} | {name: more.pop(name) for name in ("val_loss",) if name in more}
    return RoundRecord(
        **zeros,
        **more,
        round=number,
        rounds=20,
        version=number,
        seconds=1.0,
        compute_s=1.0,
        transfer_s=0.0,
        merge_s=0.0,
        metrics=metrics,
    )


def records(*losses):
    return AppFacts(records=[record(number, loss) for number, loss in enumerate(losses, 1)])


def validated(*pairs):
    return AppFacts(records=[record(number, loss, val_loss=val) for number, (loss, val) in enumerate(pairs, 1)])


def stale(*ages):
    rows = [record(number, 1 / number, slot=number % 2 + 1, staleness=age) for number, age in enumerate(ages, 1)]
    return AppFacts(records=rows)


NORM = layer("BatchNormalization", trained=64, config={"axis": -1})
DROP = layer("Dropout", config={"rate": 0.3})
DEEP = [dense() for _ in range(24)]
HALF = replace(FACTS, layers=(replace(HIDDEN, precision="float16"), LAST))
IMAGE = replace(X, shape=(1000, 3, 32, 32))
CONV = layer(
    "Conv2D",
    input_shape=(3, 32, 32),
    shape=(1, 30, 8),
    activation="relu",
    config={"data_format": "channels_last"},
    trained=9,
)


def pictures(*convolutions):
    """Return the facts of a model for 64 x 64 pixels with some convolutions and a global pooling layer."""
    rows = [replace(CONV, config=config, input_shape=(9, 9, 8)) for config in convolutions]
    pooled = layer("GlobalAveragePooling2D", input_shape=(9, 9, 8))
    return replace(layers(*rows, pooled), inputs=(("input", (64, 64, 3), "float32"),))


def softmax_over(axis):
    """Return the facts of an output with 6 positions of 4 classes each."""
    last = replace(layer("Softmax", config={"axis": axis}, shape=(6, 4), activation="softmax"), name="output")
    return replace(head(shape=(6, 4), metrics=()), layers=(HIDDEN, last))


def momentum(value):
    return replace(NORM, config={"axis": -1, "momentum": value})


POOL = layer("MaxPooling2D", input_shape=(8, 8, 8))
UNEVEN = replace(ONE_HOT, counts={0: 900, 1: 100})
TOKENS = replace(X, shape=(1000, 20), is_whole=True, low=0, high=999, dtype="int32")
EMBEDDING = layer("Embedding", input_shape=(20,), config={"input_dim": 1000, "mask_zero": False})
MASKING = replace(EMBEDDING, config={"input_dim": 1000, "mask_zero": True})
SCHEDULE = {"schedule": "CosineDecay"}  # the run makes 320 steps in one process

ROUNDED = replace(FACTS, **ROUNDS)

CASES = {
    "D01": (x(non_finite=3, non_finite_rows=(7,)), FACTS),
    "D02": (x(dtype="object"), x(dtype="uint8")),
    "D03": (x(low=0, high=255, loudest=120.0, is_whole=True), x(loudest=9.0)),
    "D04": (x(scales=(0.01, 400.0), loudest=500.0), x(scales=(0.5, 4.0))),
    "D05": (rows(shared=(Shared(part="test", count=80, of=200),)), rows(shared=(Shared(part="test", count=80, of=200),), distinct=4)),
    "D06": (rows(doubled=((3, 8),), distinct=999), rows(doubled=((3, 8),), distinct=4)),
    "D07": (rows(contradicting=90, pairs=((3, 8),)), rows(contradicting=1, pairs=((3, 8),))),
    "D08": (rows(leaks=(("x_train", 4),)), FACTS),
    "D09": (y(labels=replace(ONE_HOT, is_sorted=True)), FACTS),
    "D10": (
        data(X, Y, replace(Y, name="y_test", part="test", labels=replace(ONE_HOT, counts={0: 100, 1: 100, 2: 0, 3: 0}))),
        data(X, Y, replace(Y, name="y_test", part="test")),
    ),
    "D11": (y(labels=replace(ONE_HOT, counts={0: 970, 1: 10, 2: 10, 3: 10})), y(labels=replace(ONE_HOT, counts={0: 700, 1: 300}))),
    "D12": (head(replace(REAL, std=2000.0), loss="mse", activation="linear"), head(REAL, loss="mse", activation="linear")),
    "D13": (y(labels=replace(ONE_HOT, counts={0: 1000, 1: 0})), FACTS),
    "D14": (
        data(IMAGE, Y, layers=(CONV,)),
        data(replace(X, shape=(1000, 32, 32, 3)), Y, layers=(replace(CONV, input_shape=(32, 32, 3)),)),
    ),
    "D15": (x(constant=(0, 4)), FACTS),
    "D16": (
        data(replace(X, shape=(500, 9000)), Y, layers=(replace(HIDDEN, input_shape=(9000,)),)),
        data(replace(X, shape=(500, 9000)), Y, layers=(replace(HIDDEN, input_shape=(9000,), penalty=0.01),)),
    ),
    "D17": (observed(near={"count": 40, "of": 200, "pairs": ((3, 8),)}), observed(near={"count": 1, "of": 200, "pairs": ((3, 8),)})),
    "D18": (
        observed(doubted={"count": 30, "of": 1000, "samples": (7,), "pairs": ((7, 3, 8),)}),
        observed(doubted={"count": 2, "of": 1000, "samples": (7,), "pairs": ((7, 3, 8),)}),
    ),
    "D19": (
        data(replace(X, loudest=1.0), replace(TEST_X, loudest=16.0), Y),
        data(replace(X, loudest=1.0), replace(TEST_X, loudest=2.0), Y),
    ),
    "D20": (x(low=0, high=0), x(low=0, high=1)),
    "D21": (x(low=0, high=0.004, loudest=0.003), x(loudest=0.05)),
    "D22": (replace(y(labels=replace(ONE_HOT, counts={0: 8, 1: 8, 2: 7, 3: 7})), samples=30), replace(y(), samples=120)),
    "D23": (rows(overlapping=(("test", 150, 200),)), rows(overlapping=(("test", 12, 200),))),
    "D24": (observed(related={"train": (1.2, 600)}), observed(related={"train": (21.0, 600), "test": (9.0, 200)})),
    "D25": (
        data(replace(TOKENS, commonest=(1, 0.7)), Y, layers=(EMBEDDING,)),
        data(replace(TOKENS, commonest=(1, 0.2)), Y, layers=(EMBEDDING,)),
    ),
    "L01": (head(shape=(1,)), head(shape=(1,), activation="sigmoid", loss="bce")),
    "L02": (head(activation="linear"), head(activation="linear", logits=True)),
    "L03": (head(replace(CLASSES, low=1, high=4), loss="sce"), head(CLASSES, loss="sce")),
    "L04": (head(replace(REAL, shape=(1000, 1)), loss="mse"), head(replace(REAL, shape=(1000,)), loss="mse", shape=(1,))),
    "L05": (head(CLASSES), head(CLASSES, loss="sce")),
    "L06": (head(loss="sce"), FACTS),
    "L07": (head(REAL, loss="mse", activation="sigmoid"), head(REAL, loss="mse", activation="linear")),
    "L08": (
        head(replace(REAL, low=0, labels=LabelFacts(sums=(0.5, 7.0))), loss="kld"),
        head(replace(REAL, low=0, labels=LabelFacts(kind="shares", sums=(1.0, 1.0))), loss="kld"),
    ),
    "L09": (head(activation="sigmoid"), head(activation="sigmoid", loss="bce", metrics=())),
    "L10": (
        head(activation="softmax", loss="bce"),
        head(replace(Y, labels=LabelFacts(kind="many_hot", sums=(0.0, 3.0))), activation="sigmoid", loss="bce"),
    ),
    "L11": (head(loss="mse"), head(REAL, loss="mse", activation="linear", metrics=())),
    "L12": (head(REAL, loss="mse", activation="linear"), head(REAL, loss="mse", activation="linear", metrics=("mae",))),
    "L13": (observed(losses={"a": 120.0, "b": 0.7}), observed(losses={"a": 1.2, "b": 0.7})),
    "L14": (head(replace(Y, shape=(1000, 5000)), shape=(5000,)), FACTS),
    "L15": (
        head(replace(CLASSES, high=1), shape=(1,), activation="sigmoid"),
        head(replace(CLASSES, high=1), shape=(1,), activation="sigmoid", loss="bce"),
    ),
    "L16": (observed(first=-1.0, least=-5000.0), observed(first=-1.0, least=-40.0)),
    "L17": (head(metrics=("binary_accuracy",)), head(metrics=("categorical_accuracy",))),
    "L18": (
        replace(head(replace(CLASSES, shape=(1000, 20)), loss="sce", shape=(20, 4)), rows=replace(FACTS.rows, copied=True)),
        replace(head(REAL, loss="mse", activation="linear", metrics=()), rows=replace(FACTS.rows, copied=True)),
    ),
    "L19": (softmax_over(1), softmax_over(-1)),
    "L20": (
        head(shape=(1,), activation="linear", loss="bce", logits=True, cuts=(("accuracy", 0.5),)),
        head(shape=(1,), activation="linear", loss="bce", logits=True, cuts=(("BinaryAccuracy", 0.0),)),
    ),
    "L21": (
        replace(head(loss="own"), observations=dict(first=-0.2, least=-3.0, agrees=-0.9)),
        replace(head(loss="own"), observations=dict(first=1.4, least=0.2, agrees=0.9)),
    ),
    "L22": (observed(unlinked=True), observed(unlinked=False)),
    "M01": (hidden(equal=0.0), replace(FACTS, layers=(HIDDEN, replace(LAST, equal=0.0)))),
    "M02": (layers(dense("linear"), dense("relu")), layers(dense("linear", width=8), dense("relu", before=8))),
    "M03": (layers(*DEEP), layers(*DEEP[:12], NORM, *DEEP[12:])),
    "M04": (layers(*[dense("sigmoid")] * 6), layers(*[dense("sigmoid")] * 3)),
    "M05": (layers(dense(), DROP, NORM), layers(dense(), NORM, DROP, dense("linear"), NORM, DROP)),
    "M06": (replace(layers(dense()), layers=(*layers(dense()).layers, replace(DROP, name="drop", reads=("output",)))), layers(dense(), DROP)),
    "M07": (layers(dense("softmax")), FACTS),
    "M08": (
        replace(FACTS, layers=(HIDDEN, replace(LAST, activation="relu"), layer("Softmax", reads=("output",), activation="softmax"))),
        replace(FACTS, layers=(HIDDEN, replace(LAST, activation="linear"), layer("Softmax", reads=("output",), activation="softmax"))),
    ),
    "M09": (
        layers(dense("linear", config={"use_bias": True}), NORM, dense()),
        layers(dense("linear", config={"use_bias": False}), NORM, dense()),
    ),
    "M10": (replace(FACTS, layers=(replace(HIDDEN, trained=0), replace(LAST, trained=0))), hidden(trained=0)),
    "M11": (replace(FACTS, layers=(HIDDEN, replace(LAST, trained=0))), hidden(trained=0)),
    "M12": (
        data(replace(TOKENS, high=1000), Y, layers=(replace(EMBEDDING, name="embedding", reads=("input",)),)),
        data(TOKENS, Y, layers=(replace(EMBEDDING, name="embedding", reads=("input",)),)),
    ),
    "M13": (
        replace(layers(EMBEDDING, layer("LSTM")), arrays=(replace(TOKENS, padded=0.8), Y)),
        replace(layers(EMBEDDING, layer("LSTM")), arrays=(TOKENS, Y)),
    ),
    "M14": (layers(dense(), layer("Dropout", config={"rate": 0.9})), layers(dense(), DROP)),
    "M15": (hidden(penalty=1.0), hidden(penalty=0.01)),
    "M16": (hidden(spread=5.0, initializer="RandomNormal"), hidden(spread=0.05, initializer="RandomNormal")),
    "M17": (replace(FACTS, inputs=(("input", (28, 28, 1), "float32"),)), replace(FACTS, inputs=(("input", (20, 1), "float32"),))),
    "M18": (
        pictures({"kernel_size": (3, 3)}, {"kernel_size": (3, 3), "strides": (2, 2)}, {"kernel_size": (3, 3)}),
        pictures({"kernel_size": 7, "strides": 4}, {"kernel_size": 3, "strides": 2}, {"kernel_size": 3}, {"kernel_size": 3}),
    ),
    "M19": (
        layers(replace(POOL, shape=(1, 1, 8)), replace(CONV, input_shape=(1, 1, 8))),
        layers(replace(POOL, shape=(2, 2, 8)), replace(CONV, input_shape=(2, 2, 8))),
    ),
    "M20": (observed(nan="hidden"), observed(nan="")),
    "M21": (observed(first=1.4, least=1.3), observed(first=1.4, least=0.4)),
    "M22": (observed(mixed=0.2), observed(mixed=1e-6)),
    "M23": (observed(future=0.2), observed(future=0.0)),
    "M24": (observed(first=1.4, least=0.2, still=["hidden/kernel"]), observed(first=1.4, least=0.2, still=[])),
    "M25": (observed(gradients={"a": 1e-9, "b": 1e-3, "c": 1.0}), observed(gradients={"a": 0.1, "b": 0.2, "c": 1.0})),
    "M26": (observed(dead={"hidden": 0.7}), observed(dead={"hidden": 0.1})),
    "M27": (observed(saturated={"hidden": 0.7}), observed(saturated={"hidden": 0.1})),
    "M28": (observed(loss=30.0), observed(loss=1.5)),
    "M29": (observed(ignored=["x_train['b']"]), observed(ignored=[])),
    "M30": (observed(random=True), observed(random=False)),
    "M31": (layers(dense(width=1)), layers(dense(width=2))),
    "M32": (hidden(untouched=True, trained=0), hidden(trained=0)),
    "M33": (layers(dense(), momentum(0.9999)), layers(dense(), momentum(0.98))),
    "M34": (observed(fails="ValueError: 3 is no 4"), FACTS),
    "M35": (
        replace(layers(MASKING), arrays=(replace(TOKENS, pierced=0.9), Y)),
        replace(layers(EMBEDDING), arrays=(replace(TOKENS, pierced=0.9), Y)),
    ),
    "M36": (
        replace(layers(layer("Reshape", input_shape=(20,)), layer("GRU")), arrays=(replace(TOKENS, padded=0.8), Y)),
        replace(layers(EMBEDDING, layer("GRU")), arrays=(replace(TOKENS, padded=0.8), Y)),
    ),
    "M37": (replace(layers(dense(), NORM), settings={**SETTINGS, "batch_size": 1}), layers(dense(), NORM)),
    "M38": (layers(replace(layer("Normalization"), untouched=True)), layers(layer("Normalization"))),
    "T01": (optimizer(rate=3.0), optimizer(rate=0.01)),
    "T02": (HALF, replace(HALF, optimizer=replace(OptimizerFacts(), scales_loss=True))),
    "T03": (replace(FACTS, layers=(HIDDEN, replace(LAST, precision="float16"))), HALF),
    "T04": (replace(hidden(trained=90_000_000), samples=1000), replace(layers(dense(trained=90_000_000), DROP), samples=1000)),
    "T05": (optimizer(steps=5000, **SCHEDULE), optimizer(steps=320, **SCHEDULE)),
    "T06": (settings(batch_size=512), settings(batch_size=64)),
    "T07": (optimizer(steps=20, **SCHEDULE), optimizer(steps=160, **SCHEDULE)),
    "T08": (optimizer(kind="SGD", rate=0.01, clip=0.0001), optimizer(kind="SGD", rate=0.01, clip=1.0)),
    "T09": (replace(FACTS, callbacks=("EarlyStopping looks at val_loss, but there is no x_val",)), FACTS),
    "T10": (optimizer(kind="AdamW", decay=1.0), optimizer(kind="AdamW", decay=0.01)),
    "T11": (settings(class_weight={4: 2.0}), settings(class_weight={3: 2.0})),
    "T12": (replace(hidden(shape=(10**9,)), memory=24 * 10**9), replace(hidden(shape=(10**6,)), memory=24 * 10**9)),
    "T13": (
        replace(settings(class_weight={0: 8.0, 1: 1.0}), arrays=(X, replace(Y, labels=UNEVEN))),
        replace(settings(class_weight={0: 1.0, 1: 8.0}), arrays=(X, replace(Y, labels=UNEVEN))),
    ),
    "T14": (settings(master_epochs=1), settings(master_epochs=5)),
    "C01": (replace(FACTS, observations={"data": ("x_train has other values in a second process",)}), FACTS),
    "C02": (replace(FACTS, observations={"model": ("dense/kernel has other shapes in a second process",)}), FACTS),
    "C03": (replace(FACTS, observations={"travel": ("it holds a lock",)}), FACTS),
    "C04": (replace(FACTS, observations={"files": ("load_dataset and create_model read /home/me/x.npz",)}), FACTS),
    "C05": (replace(FACTS, observations={"failed": ("create_model raised NameError",)}), FACTS),
    "C06": (replace(optimizer(steps=320, **SCHEDULE), workers=2), replace(optimizer(steps=160, **SCHEDULE), workers=2)),
    "C07": (
        replace(settings(optimizer_state="fresh"), optimizer=OptimizerFacts(kind="Adam", rate=0.001, keeps=2)),
        replace(settings(optimizer_state="kept"), optimizer=OptimizerFacts(kind="Adam", rate=0.001, keeps=2)),
    ),
    "C08": (replace(settings(batch_size=128), workers=2), replace(settings(batch_size=32), workers=2)),
    "C09": (replace(layers(dense(), NORM), settings={**SETTINGS, "batch_size": 8}), layers(dense(), NORM)),
    "C10": (replace(FACTS, worker_callbacks=("EarlyStopping sees one worker's part only",)), FACTS),
    "C11": (hidden(parameters=9_000_000), replace(hidden(parameters=9_000_000), optimizer=OptimizerFacts(kind="SGD", rate=0.01, keeps=1))),
    "C12": (
        replace(hidden(trained=30_000_000), **ROUNDS, workers=2, observations={"step_s": 0.05}),
        replace(hidden(trained=3_000_000), **ROUNDS, workers=2, observations={"step_s": 0.05}),
    ),
    "C13": (observed(own_train="train continues from other weights"), observed(own_train="")),
    "C14": (replace(FACTS, left_behind=("the weight 'steps' is of type int32",)), FACTS),
    "C16": (
        replace(ROUNDED, settings={**ROUNDED.settings, "worker_epochs": 10}),
        replace(ROUNDED, settings={**ROUNDED.settings, "worker_epochs": 2}),
    ),
    "R01": (records(1.0, 0.8, float("nan")), records(1.0, 0.8, 0.7)),
    "R02": (records(1.0, 0.5, 0.9, 1.4, 2.0), records(1.0, 0.5, 0.55, 0.6, 0.65)),
    "R03": (records(*[1.0, 2.0] * 6), records(*[1.0, 1.01] * 6)),
    "R04": (records(*[2.3, 2.299, 2.301] * 4), records(2.3, 2.2, 2.1, 2.0, 1.9, 1.8, 1.7, 1.6)),
    "R05": (validated((1.0, 1.0), (0.8, 0.9), (0.6, 0.95), (0.4, 1.0), (0.3, 1.1), (0.2, 1.2)), validated(*[(1 / n, 1.1 / n) for n in range(1, 9)])),
    "R06": (stale(5, 6, 7, 5, 6, 7, 8, 5, 6), stale(1, 1, 2, 1, 1, 1, 2, 1, 1)),
}  # fmt: skip
"""For each rule, facts with the defect and a near miss."""
