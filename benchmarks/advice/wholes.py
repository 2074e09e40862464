"""Healthy programs without any defect: the apps, model texts, fifteen models of ``keras.applications``, and others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.advice.trial import app_of, ask_adviser, found_in, inside, written

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NOT_HERE = ("big_images", "cifar10_cnn", "converted_keras", "digits_keras", "cancer_keras", "arithmetic_keras")
"""Apps whose data is not available here, and programs in plain Keras."""
TEXTS = {"digits": "digits", "digits_cnn": "digits", "iris": "iris", "mnist_cnn": "mnist", "xor": "xor"} | {
    name: f"{name}.npz" for name in ("autoencoder", "unet", "lm")
}
"""Model texts and their data."""
APPLICATIONS = {
    "MobileNet": 32,
    "MobileNetV2": 32,
    "MobileNetV3Small": 32,
    "MobileNetV3Large": 32,
    "EfficientNetB0": 32,
    "EfficientNetV2B0": 32,
    "DenseNet121": 32,
    "ResNet50": 32,
    "ResNet50V2": 32,
    "NASNetMobile": 32,
    "Xception": 71,
    "InceptionV3": 75,
    "VGG16": 32,
    "VGG19": 32,
    "ConvNeXtTiny": 32,
}
"""Models, and the side of their pictures in pixels."""
APPLICATION = '''\
"""A model of keras.applications on digits."""

import keras
import numpy as np
from sklearn.datasets import load_digits

import ddlf

SIDE = {side}


class App(ddlf.IApp):
    """Ten classes of pictures."""

    def load_dataset(self):
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))[:600]
        scale = -(-SIDE // 8)
        x = np.kron(x[order].reshape(-1, 8, 8, 1) / 16, np.ones((1, scale, scale, 3)))[:, :SIDE, :SIDE]
        self.x_train, self.y_train = x[:500].astype("float32"), y[order][:500]
        self.x_test, self.y_test = x[500:].astype("float32"), y[order][500:]

    def create_model(self):
        self.model = keras.applications.{name}(weights=None, input_shape=(SIDE, SIDE, 3), classes=10)
        self.model.compile(keras.optimizers.Adam(0.0003), "sparse_categorical_crossentropy", metrics=["accuracy"])
'''


def programs(folder: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield kind, name and file of each program.

    Args:
        folder: The folder for generated programs.
    """
    for folder_name in ("programs", "healthy"):
        yield from (("own", path.stem, path) for path in sorted((HERE / folder_name).glob("*.py")))
    for path in sorted((ROOT / "apps").rglob("*.py")):
        if path.stem not in NOT_HERE and "IApp)" in path.read_text("utf-8"):
            yield "app", path.relative_to(ROOT / "apps").as_posix(), path
    for name in TEXTS:
        yield "text", f"{name}.nnm", ROOT / "apps" / "models" / f"{name}.nnm"
    for name, side in APPLICATIONS.items():
        yield "application", name, written(folder, name, APPLICATION.format(name=name, side=side))


def of_whole(kind: str, name: str, path: Path, folder: Path) -> dict[str, Any]:
    """Return the findings of the default level in a healthy program."""
    import keras

    keras.backend.clear_session()
    with inside(folder):
        begin = time.monotonic()
        findings = found_in(ask_adviser(_text_app(path, folder) if kind == "text" else app_of(path), "batch"))
        return {"whole": name, "what": kind, "found": findings, "seconds": time.monotonic() - begin}


def _text_app(path: Path, folder: Path) -> Any:
    from ddlf.extras.text.text_app import app_of as app_of_text

    data = TEXTS[path.stem]
    if data.endswith(".npz"):
        np.savez(folder / data, **_arrays(path.stem))
    elif path.stem == "xor":
        return app_of_text(path, None)()
    return app_of_text(path, str(folder / data) if data.endswith(".npz") else data)()


def _arrays(name: str) -> dict[str, Any]:
    """Return data that a model text can learn."""
    from sklearn.datasets import load_digits

    from benchmarks.advice.programs.letters import text
    from benchmarks.advice.programs.outlines import discs

    if name == "autoencoder":
        x = (load_digits().data / 16).astype("float32")
        return {"x": x, "y": x}
    if name == "unet":
        x, y = discs(400)
        return {"x": np.kron(x, np.ones((1, 2, 2, 1), "float32")), "y": np.kron(y, np.ones((1, 2, 2, 1), "float32"))}
    letters = text(1500)
    rows = letters[: len(letters) // 97 * 97].reshape(-1, 97)
    return {"x": rows[:, :-1].astype("int32"), "y": rows[:, 1:].astype("int32")}
