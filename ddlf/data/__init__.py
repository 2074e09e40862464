"""Data sets for training: well-known ones such as MNIST, trees of arrays, and data sets in files at a place, which is a
folder or a URL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
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
    """Open a data set by its place, for ``self.train_data`` or to read its columns as arrays.

    The place has partition files or Parquet files. Parquet files are read without conversion: each row group is read
    when a slot needs it. Data is checked before it is used.

    Args:
        place: Folder that ``ddlf data split`` has written; or a Parquet file, a folder of such files, a glob, or a list
            of files. Each may be a URL.
        decode: Turns a sample, a dict of its columns, into a dict of training data: ``x``, ``y`` and ``w``, each an
            array or a tree of arrays. Shapes and types must be equal for all samples. It runs on the node that trains,
            on the thread that reads ahead.
        x: Input columns of Parquet files: a name, a list of numeric columns that become one vector, or a dict of these
            for several inputs.
        y: Label columns, in the same form.
        w: Column with the weights of samples.
        classes: Names of classes, if the label is a text. The number of a class is its index in the list.
        image_size: Encoded images are resized to this width and height.
        storage_options: Arguments for the fsspec driver of the URL. Without them, the driver uses its environment and
            its configuration files.

    Raises:
        DatasetError: There is no data set, or a column cannot be used.
        ConfigError: An argument has no effect with these files.
    """
    from ddlf.data.data_set import DataSet
    from ddlf.data.trees import named
    from ddlf.errors import ConfigError, DatasetError

    paths = [place] if isinstance(place, str | Path) else place
    if (
        not isinstance(paths, list | tuple)
        or not paths
        or not all(isinstance(path, str | Path) and str(path).strip() for path in paths)
    ):
        raise DatasetError(
            f"ddlf.data.open got {place!r} as the place of a data set",
            hint="name a folder of partition files, a Parquet file, a folder or a glob of such files, or a list of files",
        )
    if repeated := [name for number, name in enumerate(classes) if name in classes[:number]]:
        raise DatasetError(f"classes= names {repeated[0]!r} twice", hint="leave it out once")
    decoder = None if decode is None else lambda sample: named(decode(sample))
    options: dict[str, Any] = dict(
        x=x, y=y, w=w, classes=classes, image_size=image_size, storage_options=storage_options
    )
    kind: type[DataSet] = kind_at(place)
    if kind is DataSet and any(options.values()):
        from ddlf.data.row_groups import RowGroups

        kind = RowGroups  # its error says why the place cannot be read with these options
    takes = signature(kind).parameters
    if unused := [name for name, value in options.items() if value and name not in takes]:
        raise ConfigError(f"{unused[0]}= has no effect with {place}", hint="leave it out")
    arguments: dict[str, Any] = {name: value for name, value in options.items() if name in takes}
    return kind(place, decode=decoder, **arguments)  # type: ignore[arg-type]  # a list of places is of a kind that takes it


def kind_at(location: str | Path | Sequence[str]) -> type[DataSet]:
    """Return the class that reads the data set at a place, found by the names of files. Each class has one line here.

    Args:
        location: The argument of ``open``.
    """
    from ddlf.data.data_set import DataSet
    from ddlf.data.parquet_files import is_parquet

    if is_parquet(location):
        from ddlf.data.row_groups import RowGroups

        return RowGroups
    return DataSet


def generated(
    function: Callable[[int], Iterable[Any]], samples: int | Sequence[int], *, endless: bool = False
) -> DataSet:
    """Return a data set whose samples a function generates part by part, for ``self.train_data``.

    Each node generates the parts that its slots read. Samples never travel over the network.

    Args:
        function: Takes the number of a part, from 0, and yields its batches in the form of ``fit``: ``(x,)``,
            ``(x, y)`` or ``(x, y, sample_weight)``. It may also return a ``tf.data`` pipeline or another iterable of
            batches. The batches of a part must be the same each time. A part is kept in memory while it is read.
        samples: Number of samples of each part.
        endless: Whether parts have no end, so that ``samples`` only defines the length of an epoch. The samples of an
            epoch are then unknown, so the ledger is not exact. A run that lost a worker or was resumed has other bits.

    Raises:
        DatasetError: The first part yields no usable batch.
    """
    from ddlf.data import generators

    return generators.generated(function, [samples] if isinstance(samples, int) else samples, endless=endless)


def pixels(data: Any, size: tuple[int, int] | None = None) -> Any:
    """Return the pixels of an encoded image: shape (height, width, 1 or 3), uint8, or uint16 for 16-bit grey.

    Palettes become RGB. A transparency channel is dropped if no pixel is transparent. Needs Pillow.

    Args:
        data: Bytes of the image, for example a row of a ragged column.
        size: The image is resized to this width and height.

    Raises:
        DatasetError: The image cannot be read, would lose colours or transparency, or has more than 100 million pixels.
    """
    from io import BytesIO

    from ddlf.data.images import Decoder

    return Decoder("" if size is None else f"{size[0]}x{size[1]}").pixels(BytesIO(bytes(data)), "an image")
