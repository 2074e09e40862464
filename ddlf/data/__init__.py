"""Data: sets that are ready, trees of arrays, and what an app has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddlf.data.data_set import DataSet
    from ddlf.data.row_groups import Columns


def open(
    place: str | Path | Sequence[str],
    decode: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    *,
    x: Columns | None = None,
    y: Columns | None = None,
    w: Columns | None = None,
    classes: Sequence[str] = (),
    image_size: tuple[int, int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> DataSet:
    """Open a data set for ``self.train_data``, or for its columns as arrays, by name: partition files, or Parquet files where they are.

    What is read is checked before it is used. Parquet files are not converted: each row group is read when a slot needs it.

    Args:
        place: Folder that ``ddlf data split`` has written; or a Parquet file, a folder of such files, a glob, or a list of files. Each may be a URL.
        decode: Makes of each sample, a dict of its columns, a dict of what is trained on: ``x``, ``y`` and ``w``, each an array or a tree of arrays,
            all of one shape and type for all samples. It runs where the model trains, on the thread that reads ahead.
        x: Columns of the Parquet files that are the input: a name, names of numbers that are put side by side, or a dict of these for several inputs.
        y: Columns that are labels, likewise.
        w: Column that has the weights of samples.
        classes: Names of classes, where the label is a text. The number of each is its place here.
        image_size: Width and height that encoded images are brought to.
        storage_options: What the driver of fsspec for the URL is made with. Without it the driver looks into its environment and its files.

    Raises:
        DatasetError: There is no data set, or a column cannot be used.
        ConfigError: An argument has no effect with what is there.
    """
    from ddlf.data.data_set import DataSet
    from ddlf.data.parquet_files import is_parquet
    from ddlf.data.trees import named

    made = None if decode is None else lambda sample: named(decode(sample))
    given: dict[str, Any] = dict(x=x, y=y, w=w, classes=classes, image_size=image_size, storage_options=storage_options)
    if any(given.values()) or is_parquet(place):
        from ddlf.data.row_groups import RowGroups

        return RowGroups(place, decode=made, **given)
    assert isinstance(place, str | Path)
    return DataSet(place, made)


def generated(
    function: Callable[[int], Iterable[Any]], samples: int | Sequence[int], *, endless: bool = False
) -> DataSet:
    """Data that a function generates part by part: for ``self.train_data``. Each node generates what its slots read; samples never travel.

    Args:
        function: Takes the number of a part, from 0, and yields its batches as ``fit`` takes them: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``.
            It may return a ``tf.data`` pipeline or anything else that gives them, the same each time. A part is in memory while it is read.
        samples: Samples of each part.
        endless: Whether each part goes on without end, and ``samples`` says how many of it are an epoch. Nobody knows then which those were: the
            ledger is not exact, and a run that lost a worker, or was resumed, has other bits.

    Raises:
        DatasetError: The first part yields nothing that can be used.
    """
    from ddlf.data import generators

    return generators.generated(function, [samples] if isinstance(samples, int) else samples, endless=endless)


def pixels(data: Any, size: tuple[int, int] | None = None) -> Any:
    """The pixels of an encoded image, shape (height, width, 1 or 3), uint8; uint16 where it is grey with 16 bits. Needs Pillow.

    Palettes become RGB. A channel of transparency is left out if nothing is transparent.

    Args:
        data: Its bytes, as they are in a ragged column or otherwise.
        size: Width and height that it is brought to.

    Raises:
        DatasetError: It cannot be read, would lose colours or transparency, or has more than 100 million pixels.
    """
    from io import BytesIO

    from ddlf.data.images import Decoder

    return Decoder("" if size is None else f"{size[0]}x{size[1]}").pixels(BytesIO(bytes(data)), "an image")
