"""Well-known data sets as arrays. Each node reads its own copy. Runs on the master and in executors.

The sources are tried in this order: the folder ``$DDLF_DATA`` (``mnist.npz``, ``cifar10.npz``); this user's cache on
disk, checked by hash; and Keras's download, whose result goes into the cache. The npz files have Keras's form: uint8
arrays ``x_train``, ``y_train``, ``x_test``, ``y_test``. The package itself contains digits and irises.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import zipfile
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ddlf.data.arrays import read_header
from ddlf.data.trees import leaves
from ddlf.errors import DatasetError

Arrays = tuple[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]], tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]

SHAPES = {"digits": (8, 8, 1), "mnist": (28, 28, 1), "cifar10": (32, 32, 3)}
BRIGHTEST = {"digits": 16, "mnist": 255, "cifar10": 255}
CLASSES = 10
PARTS = ("x_train", "y_train", "x_test", "y_test")
MAX_UNPACKED_BYTES = 10**9
"""Limit for the four arrays together. CIFAR-10 has 184 MB."""
MAX_MEMBERS = 1000


def load_digits() -> Arrays:
    """Load 1,797 handwritten digits of 8 x 8 pixels, for examples. The package contains them.

    They are the test set of E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (UCI Machine Learning
    Repository, 1998, CC BY 4.0), the same as in scikit-learn. Every fifth digit belongs to the test set.

    Returns:
        ``(x_train, y_train), (x_test, y_test)``: x float32 in [-0.5, 0.5] of shape (1437, 8, 8, 1) and (360, 8, 8, 1),
        y one-hot float32 of shape (1437, 10) and (360, 10).
    """
    return _arrays("digits", _read(Path(__file__).with_name("digits.npz")))


def load_mnist() -> Arrays:
    """Load MNIST: 70,000 handwritten digits.

    Returns:
        ``(x_train, y_train), (x_test, y_test)``: x float32 in [-0.5, 0.5] of shape (60000, 28, 28, 1) and
        (10000, 28, 28, 1), y one-hot float32 of shape (60000, 10) and (10000, 10).

    Raises:
        DatasetError: No source has it, or the file is damaged.
    """
    return load("mnist")


def load_cifar10() -> Arrays:
    """Load CIFAR-10: 60,000 colour pictures of 10 classes.

    Returns:
        ``(x_train, y_train), (x_test, y_test)``: x float32 in [-0.5, 0.5] of shape (50000, 32, 32, 3) and
        (10000, 32, 32, 3), y one-hot float32 of shape (50000, 10) and (10000, 10).

    Raises:
        DatasetError: No source has it, or the file is damaged.
    """
    return load("cifar10")


def load_iris() -> Arrays:
    """Load 150 irises of three species, 50 each: length and width of sepal and petal in cm. The package contains them.

    The source is R. A. Fisher, The use of multiple measurements in taxonomic problems (Annals of Eugenics 7, 1936), in
    the public domain. The values are the same as in scikit-learn, where rows 35 and 38 agree with Fisher's paper. Every
    fifth iris belongs to the test set.
    Returns:
        ``(x_train, y_train), (x_test, y_test)``: x float32 of shape (120, 4) and (30, 4), y int32 of
        shape (120,) and (30,).
    """
    with np.load(Path(__file__).with_name("iris.npz")) as archive:  # in mm, as integers
        x, y = (archive["x"] / 10).astype(np.float32), archive["y"].astype(np.int32)
    test = np.arange(len(x)) % 5 == 0
    return (x[~test], y[~test]), (x[test], y[test])


def with_classes(name: str) -> Arrays:
    """Load a data set by name, also ``"iris"``, with class numbers as labels: int32 of shape (n,)."""
    if name == "iris":
        return load_iris()
    raw = _read(Path(__file__).with_name("digits.npz")) if name == "digits" else _raw(name)
    train, test = (
        (_scaled(raw[f"x_{part}"], name), raw[f"y_{part}"].reshape(-1).astype(np.int32)) for part in ("train", "test")
    )
    return train, test


def load(name: str) -> Arrays:
    """Load a data set by name: ``"mnist"`` or ``"cifar10"``."""
    return _arrays(name, _raw(name))


def _arrays(name: str, raw: dict[str, np.ndarray[Any, Any]]) -> Arrays:
    return (
        (_scaled(raw["x_train"], name), _one_hot(raw["y_train"])),
        (_scaled(raw["x_test"], name), _one_hot(raw["y_test"])),
    )


def _scaled(images: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    scaled: np.ndarray[Any, Any] = np.multiply(
        images.reshape(-1, *SHAPES[name]), np.float32(1 / BRIGHTEST[name]), dtype=np.float32
    )
    scaled -= np.float32(0.5)
    return scaled


def _one_hot(labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rows: np.ndarray[Any, Any] = np.eye(CLASSES, dtype=np.float32)[labels.reshape(-1)]
    return rows


def _raw(name: str) -> dict[str, np.ndarray[Any, Any]]:
    folder = os.environ.get("DDLF_DATA")
    if folder:
        path = Path(folder).expanduser() / f"{name}.npz"
        if path.is_file():
            return _read(path)
        if os.path.lexists(path):
            raise DatasetError(
                f"{path} is {'a link to nothing' if path.is_symlink() else 'no file'}", hint="copy it again"
            )
        if not path.parent.is_dir():
            raise DatasetError(
                f"DDLF_DATA is {folder!r}, which is not a folder", hint=f"set it to the folder of {name}.npz"
            )
    cached = _cache_dir() / f"{name}.npz"
    if _intact(cached):
        return _read(cached)
    return _download(name, cached)


def _read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        # Open the file here, because NumPy does not close a file that is not an archive.
        with open(path, "rb") as file:
            _check_archive(path, file)
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                raw = {part: archive[part] for part in PARTS}
    except KeyError as error:
        raise DatasetError(f"{path} has no array {error}", hint=f"it must hold {', '.join(PARTS)}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DatasetError(f"{path} cannot be read ({error})", hint="copy it again") from None
    shape = SHAPES[path.stem]
    for split in ("train", "test"):
        images, labels = raw[f"x_{split}"], raw[f"y_{split}"]
        for array, name in ((images, f"x_{split}"), (labels, f"y_{split}")):
            if array.dtype.kind not in "iu":
                raise DatasetError(f"{path}: {name} holds {array.dtype}, not uint8")
        if not len(images):
            raise DatasetError(f"{path}: x_{split} has no samples")
        if (*images.shape[1:], 1)[:3] != shape:
            raise DatasetError(f"{path}: x_{split} holds images of shape {images.shape[1:]}, not {shape}")
        if not 0 <= labels.min() <= labels.max() < CLASSES:
            raise DatasetError(f"{path}: y_{split} holds labels from {labels.min()} to {labels.max()}, not 0 to 9")
        if len(raw[f"x_{split}"]) != len(raw[f"y_{split}"]):
            raise DatasetError(
                f"{path}: x_{split} has {len(raw[f'x_{split}'])} rows, y_{split} {len(raw[f'y_{split}'])}"
            )
    return raw


def _check_archive(path: Path, file: BinaryIO) -> None:
    """Refuse an archive that would take more memory than its data can need.

    Raises:
        DatasetError: The archive exceeds a limit, or contradicts itself.
        KeyError: An array is missing.
    """
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if len(names) > MAX_MEMBERS:
            raise DatasetError(f"{path} has {len(names):,} members, but only {len(PARTS)} are expected")
        unpacked = 0
        for part in PARTS:
            if names.count(f"{part}.npy") > 1:
                raise DatasetError(f"{path} has {part} twice")
            if f"{part}.npy" not in names:
                raise KeyError(part)
            size = archive.getinfo(f"{part}.npy").file_size
            unpacked += size
            with archive.open(f"{part}.npy") as member:
                shape, _, dtype = read_header(member)
                claimed, actual = prod(shape) * dtype.itemsize, size - member.tell()
            # NumPy allocates the memory that the header claims before it reads.
            if claimed > actual and not dtype.hasobject:
                raise DatasetError(f"{path}: {part} claims {claimed:,} bytes, but has {actual:,}", hint="copy it again")
        if unpacked > MAX_UNPACKED_BYTES:
            raise DatasetError(
                f"{path} unpacks to {unpacked / 1e9:.2f} GB, more than the {MAX_UNPACKED_BYTES / 1e9:.2f} GB that it can need"
            )


def _download(name: str, cached: Path) -> dict[str, np.ndarray[Any, Any]]:
    import keras

    try:
        # Keras prints its progress bar to stdout, which belongs to the program's own output.
        with contextlib.redirect_stdout(sys.stderr):
            (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, name).load_data()
    except Exception as error:  # Keras raises a bare Exception when a download fails
        raise DatasetError(
            f"{name} is neither in DDLF_DATA nor in the cache, and cannot be downloaded ({error})",
            hint=f"put {name}.npz into a folder and set DDLF_DATA to it, on every machine",
        ) from None
    raw = dict(zip(PARTS, (x_train, y_train, x_test, y_test), strict=True))
    with contextlib.suppress(OSError):  # if the cache file cannot be written, the next start downloads again
        cached.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = cached.with_name(f".{name}-{os.getpid()}.npz")
        np.savez_compressed(temporary, **raw)
        _hash_file(cached).write_text(_sha256(temporary))
        temporary.replace(cached)
    return raw


def _intact(path: Path) -> bool:
    """Return whether a file in the cache exists and still has the hash that was recorded with it."""
    try:
        return _hash_file(path).read_text() == _sha256(path)
    except OSError:
        return False


def _hash_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _cache_dir() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("ddlf")) / "datasets"


def fingerprint(*data: Any) -> str:
    """Return a hash of data as 16 hex digits. Nodes compare it, to check that they have the same data. It covers the
    types,
    shapes, order and every byte of arrays, and the types of containers.

    Args:
        data: Arrays, or nested lists, tuples and dicts of arrays.

    Raises:
        DatasetError: The data contains other objects.
    """
    digest = hashlib.sha256()
    for part in data:
        _update(digest, part)
    return digest.hexdigest()[:16]


def not_finite(data: Any) -> str:
    """Return a sentence that counts the NaN and infinite values in a tree of arrays; empty if there are none."""
    bad = size = 0
    for _, array in leaves(data):
        size += array.size
        # Minimum and maximum show whether there is such a value, without a temporary array of booleans.
        if array.size and array.dtype.kind in "fc" and not np.isfinite([array.min(), array.max()]).all():
            bad += array.size - int(np.count_nonzero(np.isfinite(array)))
    return f"{bad:,} of {size:,} values" if bad else ""


def _update(digest: Any, part: Any) -> None:
    if isinstance(part, np.ndarray) and not part.dtype.hasobject:
        digest.update(f"{part.dtype.str}{part.shape}".encode())
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8))
    elif isinstance(part, list | tuple):
        kind = "[" if isinstance(part, list) else "(" if type(part) is tuple else f"{type(part).__name__}("
        digest.update(f"{len(part)}{kind}".encode())
        for item in part:
            _update(digest, item)
    elif isinstance(part, dict):
        digest.update(f"{len(part)}{{".encode())
        for key in sorted(part, key=str):
            digest.update((key if isinstance(key, str) else repr(key)).encode())
            _update(digest, part[key])
    else:
        kind = "an array of Python objects" if isinstance(part, np.ndarray) else f"a {type(part).__name__}"
        raise DatasetError(
            f"training data must be NumPy arrays of numbers, or lists or dicts of them, got {kind}",
            hint="convert it in load_dataset, for instance with numpy.asarray",
        )
