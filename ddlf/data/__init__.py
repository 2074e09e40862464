"""Data: sets that are ready, trees of arrays, and what an app has of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddlf.data.data_set import DataSet


def open(place: str | Path, decode: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None) -> DataSet:
    """Open a data set of partition files: for ``self.train_data``, or its columns as arrays, by name. A file is checked before it is used.

    Args:
        place: Folder that ``ddlf data split`` has written.
        decode: Makes of each sample, a dict of its columns, a dict of what is trained on: ``x``, ``y`` and ``w``, each an array or a tree of arrays,
            all of one shape and type for all samples. It runs where the model trains, on the thread that reads ahead.

    Raises:
        DatasetError: There is no data set.
    """
    from ddlf.data.data_set import DataSet
    from ddlf.data.trees import named

    return DataSet(place, None if decode is None else lambda sample: named(decode(sample)))


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
    """The pixels of an encoded image, shape (height, width, 1 or 3), uint8. Needs Pillow.

    Args:
        data: Its bytes, as they are in a ragged column or otherwise.
        size: Width and height that it is brought to.

    Raises:
        DatasetError: It cannot be read, is neither grey nor RGB, or has more than 100 million pixels.
    """
    from io import BytesIO

    from ddlf.data.images import Decoder

    return Decoder("" if size is None else f"{size[0]}x{size[1]}").pixels(BytesIO(bytes(data)), "an image")
