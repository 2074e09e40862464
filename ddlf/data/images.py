"""A source of samples that are images in folders: one folder for each class, named like the class. Needs Pillow."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from ddlf.data.manifest import Column
from ddlf.data.rows import Rows, check_ragged, row_type, set_cell
from ddlf.errors import ConfigError, DatasetError
from ddlf.worker.machine import cores

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MAGIC = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
MAX_PIXELS = 100_000_000
AHEAD = 16
"""Number of images for each core that are decoded ahead."""
T = TypeVar("T")
Made = TypeVar("Made")
PLAIN = ("L", "RGB", "I;16")
CONVERTED = {"1": "L", "P": "RGB"}
"""Pillow modes that are converted to another mode without changing any colour."""
OPAQUE = {"LA": "L", "RGBA": "RGB"}
"""Pillow modes with transparency, and the same modes without it."""


class Images:
    """A source of samples that are images in folders. Its columns are ``x``, the image, and ``y``, the class.

    ``x`` has the pixels (height, width, 1 or 3), or a file's bytes. ``y`` has the number of the class, in the order of
    names. An empty folder is a class without samples, so that classes have the same numbers in all parts of the data. A
    folder that only contains other files or folders is refused, because its samples would be missing.

    Args:
        path: Folder of the classes.
        image_size: The option of ``open_source``.
        ragged: The option of ``open_source``.

    Raises:
        DatasetError: There are no images, or Pillow is missing.
        ConfigError: ``image_size`` is invalid.
    """

    def __init__(self, path: Path, image_size: str = "", ragged: str = "") -> None:
        self._decoder = Decoder(image_size)
        self._make = self._decoder.checked if check_ragged(ragged, ("x",), path) else self._decoder.pixels
        folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        files = [
            [file for file in sorted(folder.iterdir()) if file.suffix.lower() in ENDINGS and file.is_file()]
            for folder in folders
        ]
        for folder, images in zip(folders, files, strict=True):
            inside = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
            if not images and inside and any(files):
                content = "folders" if any(entry.is_dir() for entry in inside) else f"{len(inside):,} other files"
                raise DatasetError(
                    f"{folder} has {content}, but no images, so it is not a class",
                    hint=f"name a folder that has one folder of images for each class; images are {', '.join(ENDINGS)}",
                )
        self.classes: Sequence[str] = [folder.name for folder in folders]
        self._files = [(file, label) for label, group in enumerate(files) for file in group]
        if not self._files:
            raise DatasetError(
                f"in {path} is neither a .npy file nor a folder of images", hint="make a folder for each class"
            )
        first = self._make(self._files[0][0], str(self._files[0][0]))
        self.samples = len(self._files)
        self.columns = {"x": Column(first.dtype.name, first.shape), "y": Column("int64", ())}
        if ragged:
            if image_size:
                raise ConfigError("--image-size has no effect with --ragged x, which keeps files", hint="leave it out")
            most = max(file.stat().st_size for file, _ in self._files)
            self.columns["x"] = Column("uint8", (most,), ragged=True)

    def rows(self, at_once: int, first: int = 0) -> Iterator[Rows]:
        """Yield the samples in order, from number ``first``, in pieces of at most ``at_once``."""
        for start in range(first, self.samples, at_once):
            files = self._files[start : start + at_once]
            rows = np.empty(len(files), row_type(self.columns))
            decoded = on_all_cores(lambda entry: self._make(entry[0], str(entry[0])), files)
            for row, ((file, label), pixels) in enumerate(zip(files, decoded, strict=True)):
                column = self.columns["x"]
                if not column.ragged and (pixels.shape, pixels.dtype.name) != (column.shape, column.dtype):
                    raise DatasetError(
                        f"{file} is {_image_kind(pixels.shape, pixels.dtype.name)}, "
                        f"but {self._files[0][0]} is {_image_kind(column.shape, column.dtype)}",
                        hint="give all images one size with --image-size 64x64, and one mode beforehand",
                    )
                set_cell(rows, "x", row, pixels)
                rows["y"][row] = label
            yield rows


def on_all_cores(make: Callable[[T], Made], items: Sequence[T]) -> Iterator[Made]:
    """Yield the result of ``make`` for each item, in order. Compute a few items ahead, on one thread for each core.

    Threads help because decoders release Python's global lock.
    """
    threads = cores()
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(items), AHEAD * threads):
            yield from pool.map(make, items[start : start + AHEAD * threads])


class Decoder:
    """Decodes images to pixels.

    Args:
        image_size: The option of ``open_source``.

    Raises:
        ConfigError: ``image_size`` is invalid.
    """

    def __init__(self, image_size: str = "") -> None:
        self._size = None
        if image_size:
            match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", image_size)
            if not match:
                raise ConfigError(f"--image-size must be width x height, got {image_size!r}", hint="for instance 64x64")
            self._size = int(match[1]), int(match[2])

    def pixels(self, file: Path | BinaryIO, where: str) -> np.ndarray[Any, Any]:
        """Return the pixels of an image, shape (height, width, 1 or 3), as uint8, or as uint16 for 16-bit grey.

        Palettes become RGB. A transparency channel is dropped if no pixel is transparent.

        Args:
            file: A path, or a binary file with the image.
            where: Name of the image, for errors.

        Raises:
            DatasetError: The image cannot be read or used, or Pillow is missing.
        """
        try:
            import PIL.Image
        except ImportError:
            raise DatasetError(
                "images need Pillow, which is not installed", hint="install it: pip install 'ddlf[images]'"
            ) from None
        try:
            with PIL.Image.open(file) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise DatasetError(
                        f"{where} has {width * height:,} pixels", hint="make the image smaller beforehand"
                    )
                plain = _plain(image, where)
                resized = plain.resize(self._size) if self._size and plain.size != self._size else plain
                pixels = np.asarray(resized, np.uint16 if plain.mode == "I;16" else np.uint8)
        except DatasetError:
            raise
        except Exception as error:  # Pillow raises many kinds of errors for damaged files
            reason = "of a format that Pillow does not know" if isinstance(error, PIL.UnidentifiedImageError) else error
            raise DatasetError(f"{where} is not a readable image ({reason})", hint="copy it again") from None
        return pixels.reshape(*pixels.shape[:2], -1)

    def checked(self, file: Path | BinaryIO, where: str) -> np.ndarray[Any, Any]:
        """Return the bytes of an image file, after checking that ``pixels`` can decode it."""
        data = file.read_bytes() if isinstance(file, Path) else file.read()
        self.pixels(io.BytesIO(data), where)
        return np.frombuffer(data, np.uint8)


def _plain(image: Any, where: str) -> Any:
    """Convert an image to a mode of Pillow whose pixels are the values of colours, such as RGB, not numbers in a
    palette.

    Raises:
        DatasetError: The conversion would lose transparency, or bits that Pillow does not read.
    """
    if image.mode in ("RGB", "RGBA") and "16" in str(image.tile):
        raise DatasetError(
            f"{where} has 16 bits for each of {len(image.mode)} channels, but Pillow reads only 8",
            hint="convert it to 8 bits, or save its pixels as an array (.npy)",
        )
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    if image.mode in OPAQUE:
        if image.getchannel("A").getextrema()[0] < 255:
            raise DatasetError(
                f"{where} has transparent pixels, and their background colour is unknown",
                hint="put it on a background beforehand, for example with Image.alpha_composite of Pillow",
            )
        return image.convert(OPAQUE[image.mode])
    if image.mode in ("I;16B", "I;16L") or (image.mode == "I" and _has_16_bits(image)):
        import PIL.Image

        return PIL.Image.fromarray(np.asarray(image).astype(np.uint16))
    if image.mode in CONVERTED:
        return image.convert(CONVERTED[image.mode])
    if image.mode not in PLAIN:
        raise DatasetError(f"{where} is of mode {image.mode}, not grey (L) or RGB", hint="convert it, or leave it out")
    return image


def _has_16_bits(image: Any) -> bool:
    low, high = image.getextrema()
    return bool(low >= 0 and high < 2**16)


def is_image(data: bytes) -> bool:
    """Return whether bytes begin like a PNG, JPEG, GIF, WebP, BMP or TIFF file."""
    return data.startswith(MAGIC) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def _image_kind(shape: tuple[int, ...], dtype: str) -> str:
    return f"{shape[1]}x{shape[0]} {'RGB' if shape[2] == 3 else 'grey'}{' of 16 bits' * (dtype == 'uint16')}"
