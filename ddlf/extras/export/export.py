"""Writes a model in several formats.

Checks first that each format can be written, then writes each in its own process.
"""

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
    """A format in which to write the model, with the files to write.

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
    """The result of writing one format.

    Attributes:
        target: The format and its files.
        bytes: The size of the written files, including weights.
        refused: The package that failed to write the format, and its reason; None after success.
    """

    target: ExportTarget
    bytes: int = 0
    refused: Refused | None = None


def plan(
    source: ExportSource, formats: list[Format], folder: Path, *, backend: str | None = None, overwrite: bool = False
) -> list[ExportTarget]:
    """Return the formats to write. This function checks the formats, folder and packages, and writes nothing.

    Args:
        source: The model to export.
        formats: The formats to write.
        folder: The folder to write to.
        backend: The Keras backend that writes; None for the usual backend of each format.
        overwrite: Whether existing files may be replaced.

    Raises:
        ConfigError: A format cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", hint="name a folder with --out")
    # The folder is created with the first file.
    existing_folder = folder if folder.exists() else folder.absolute().parent
    if not existing_folder.is_dir():
        raise ConfigError(f"there is no folder {existing_folder}", hint="make it first, or name another with --out")
    if not os.access(existing_folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the folder {folder} cannot be written to", hint="name another with --out")
    result = []
    for item in formats:
        if item.name == "onnx" and source.half_precision is not None:
            layer, policy = source.half_precision
            raise ConfigError(
                f"ONNX files need models in float32, but the layer {layer!r} of {source.path} computes in {policy}",
                hint="make the model without keras.config.set_dtype_policy, and give it the same weights",
            )
        target = ExportTarget(item, writer_of(item, backend), tuple(folder / name for name in item.files(source.stem)))
        existing = [path for path in target.paths if path.exists() or path.is_symlink()]
        if existing and not overwrite:
            raise ConfigError(
                f"{existing[0]} exists", hint="write over it with --overwrite, or name another folder with --out"
            )
        result.append(target)
    if not installed_backends():
        raise ConfigError("no backend of Keras is installed", hint=to_install(["tensorflow-cpu"]))
    return result


@contextmanager
def loadable(source: ExportSource, steps: StepRunner, backend: str) -> Iterator[Path]:
    """Yield the path of a ``.keras`` file with the model.

    For a text, Keras creates the model once, so that all formats have the same initial weights.

    Args:
        source: The model to export.
        steps: The runner that creates the model of a text.
        backend: The Keras backend that draws the initial weights.

    Raises:
        ConfigError: Keras cannot create the model of the text.
    """
    if not source.is_text:
        yield source.path
        return
    target = steps.folder / f"{source.stem}.keras"
    result = steps.do("build", backend, do="build", model=str(source.path), target=str(target))
    if isinstance(result, Refused):
        raise ConfigError(f"no model can be made from {source.path}: {result}")
    yield target


def write(
    model: Path,
    targets: list[ExportTarget],
    stem: str,
    steps: StepRunner,
    tell: Callable[[Exported], None] = lambda _: None,
    batch: int | None = None,
) -> list[Exported]:
    """Write a model in each of these formats. The files of a format appear completely or not at all.

    Args:
        model: A ``.keras`` file.
        targets: The formats to write, from ``plan``.
        stem: The name of the files without a suffix.
        steps: The runner that writes each format in its own process.
        tell: Called with the result of each format as soon as it is written.
        batch: The fixed batch size of StableHLO; None for a variable one.

    Raises:
        ConfigError: The model cannot be loaded, or the folder cannot be written to.
    """
    result = []
    for item in targets:
        result.append(_write(model, item, stem, steps, batch))
        tell(result[-1])
    return result


def _write(model: Path, target: ExportTarget, stem: str, steps: StepRunner, batch: int | None) -> Exported:
    folder = target.paths[0].parent
    temporary = folder / f".{stem}.{os.getpid()}"
    try:
        folder.mkdir(exist_ok=True)
        temporary.mkdir()
        done = steps.do(
            f"write-{target.format.name}",
            target.backend,
            do="write",
            model=str(model),
            format=target.format.name,
            folder=str(temporary),
            stem=stem,
            batch=batch,
        )
        if isinstance(done, Refused):
            return Exported(target, refused=done)
        if missing := [path.name for path in target.paths if not (temporary / path.name).exists()]:
            return Exported(target, refused=Refused("Keras", f"it wrote no {missing[0]}"))
        for path in target.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.exists() and (temporary / path.name).is_dir():
                path.unlink()
            (temporary / path.name).replace(path)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(target, sum(map(size_of, target.paths)))


def size_of(path: Path) -> int:
    """Return the size in bytes of a file, or of all files in a folder."""
    return sum(item.stat().st_size for item in ([path] if path.is_file() else path.rglob("*")) if item.is_file())
