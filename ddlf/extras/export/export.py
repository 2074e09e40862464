"""Write a model in several formats: check first that all can be written, then write each in a process of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddlf.errors import ConfigError
from ddlf.extras.export.formats import Format, installed_backends, to_install, writer_of
from ddlf.extras.export.source import ExportSource
from ddlf.extras.export.steps import Refused, StepRunner


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """A format that is to be written.

    Attributes:
        format: The format.
        backend: The backend of Keras that writes it.
        paths: The files and folders of the format.
    """

    format: Format
    backend: str
    paths: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of writing a format.

    Attributes:
        target: The format, and its files.
        bytes: All that was written, weights in it.
        refused: The package that could not write it, or None.
    """

    target: ExportTarget
    bytes: int = 0
    refused: Refused | None = None


def plan(
    source: ExportSource, formats: list[Format], folder: Path, *, backend: str | None = None, overwrite: bool = False
) -> list[ExportTarget]:
    """Return the formats to write, after a check of everything that could prevent it. Nothing is written yet.

    Args:
        source: The model.
        formats: The formats.
        folder: Where to.
        backend: The backend of Keras; None for the usual one of each format.
        overwrite: Whether existing files may be replaced.

    Raises:
        ConfigError: One of them cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", hint="name a folder with --out")
    there_is = folder if folder.exists() else folder.absolute().parent  # it is made when the first file is written
    if not there_is.is_dir():
        raise ConfigError(f"there is no folder {there_is}", hint="make it first, or name another with --out")
    if not os.access(there_is, os.W_OK | os.X_OK):
        raise ConfigError(f"the folder {folder} cannot be written to", hint="name another with --out")
    result = []
    for item in formats:
        if item.name == "onnx" and source.half is not None:
            layer, policy = source.half
            raise ConfigError(
                f"ONNX is written of models in float32, and the layer {layer!r} of {source.path} computes in {policy}",
                hint="make the model without keras.config.set_dtype_policy, and give it the same weights",
            )
        wanted = ExportTarget(item, writer_of(item, backend), tuple(folder / name for name in item.files(source.stem)))
        there = [path for path in wanted.paths if path.exists() or path.is_symlink()]
        if there and not overwrite:
            raise ConfigError(
                f"{there[0]} exists", hint="write over it with --overwrite, or name another folder with --out"
            )
        result.append(wanted)
    if not installed_backends():
        raise ConfigError("Keras has no backend here", hint=to_install(["tensorflow-cpu"]))
    return result


@contextmanager
def loadable(source: ExportSource, steps: StepRunner, backend: str) -> Iterator[Path]:
    """The model as a file that Keras loads: a text is made a model first, once, so that all have the same weights.

    Args:
        source: The model.
        steps: Where it is made.
        backend: The backend of Keras that draws the first weights.

    Raises:
        ConfigError: Keras cannot make a model of the text.
    """
    if not source.is_text:
        yield source.path
        return
    target = steps.folder / f"{source.stem}.keras"
    made = steps.do("build", backend, do="build", model=str(source.path), target=str(target))
    if isinstance(made, Refused):
        raise ConfigError(f"no model can be made of {source.path}: {made}")
    yield target


def write(
    model: Path,
    wanted: list[ExportTarget],
    stem: str,
    steps: StepRunner,
    tell: Callable[[Exported], None] = lambda _: None,
    batch: int | None = None,
) -> list[Exported]:
    """Write formats, each atomically.

    Args:
        model: A ``.keras`` file.
        wanted: As planned.
        stem: The name of the files.
        steps: The runner of the steps.
        tell: Hears of each as soon as it is there.
        batch: Samples of each batch of StableHLO; None for any.

    Raises:
        ConfigError: The model cannot be loaded, or the folder cannot be written to.
    """
    result = []
    for item in wanted:
        result.append(_write(model, item, stem, steps, batch))
        tell(result[-1])
    return result


def _write(model: Path, wanted: ExportTarget, stem: str, steps: StepRunner, batch: int | None) -> Exported:
    folder = wanted.paths[0].parent
    beside = folder / f".{stem}.{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        beside.mkdir()
        done = steps.do(
            f"write-{wanted.format.name}",
            wanted.backend,
            do="write",
            model=str(model),
            format=wanted.format.name,
            folder=str(beside),
            stem=stem,
            batch=batch,
        )
        if isinstance(done, Refused):
            return Exported(wanted, refused=done)
        if lacking := [path.name for path in wanted.paths if not (beside / path.name).exists()]:
            return Exported(wanted, refused=Refused("Keras", f"it wrote no {lacking[0]}"))
        for path in wanted.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.exists() and (beside / path.name).is_dir():
                path.unlink()
            (beside / path.name).replace(path)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Exported(wanted, sum(map(size_of, wanted.paths)))


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(item.stat().st_size for item in ([path] if path.is_file() else path.rglob("*")) if item.is_file())
