"""Arrays that a program gives to a model that is text: refused by name where the model cannot take them. Keras is not asked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from ddlf.errors import DatasetError, NotationError
from ddlf.extras.text.language.problems import Problems


def by_names(data: Any, names: Mapping[str, Any], what: str, file: str, texts: Collection[str] = ()) -> dict[str, Any]:
    """Arrays by the names of inputs or outputs.

    Args:
        data: A dict by these names; an array where there is one name; else a list or tuple in their order.
        names: Those that there are, in the order of the text.
        what: ``"input"`` or ``"output"``.
        file: Name of the text, for errors.
        texts: Names of inputs that take text.

    Raises:
        NotationError: A name is none of these, or one is missing.
        DatasetError: Something is no array of numbers with a row for each sample.
    """
    if isinstance(data, Mapping):
        for name in data:
            if name not in names:
                there = f"; there {'is' if len(names) == 1 else 'are'} {', '.join(names)}"
                raise NotationError(
                    f"{file} has no {what} {name!r}{Problems('', file).near(str(name), names) or there}"
                )
        if missing := [name for name in names if name not in data]:
            raise NotationError(f"{file}: nothing is given for the {what} {missing[0]!r}")
    elif len(names) == 1:
        data = dict.fromkeys(names, data)
    elif isinstance(data, list | tuple) and len(data) == len(names):
        data = dict(zip(names, data, strict=True))
    else:
        raise NotationError(f"{file} has {len(names)} {what}s", hint=f"give a dict by their names: {', '.join(names)}")
    return {name: _array(data[name], f"{file}: the {what} {name!r}", name in texts) for name in names}


def check_rows(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
    """Refuse arrays without samples, or with different numbers of them.

    Args:
        inputs: Arrays by name.
        outputs: Likewise.

    Raises:
        DatasetError: Names what differs.
    """
    rows = [(f"the input {name!r}", len(array)) for name, array in inputs.items()]
    rows += [(f"the output {name!r}", len(array)) for name, array in outputs.items()]
    first, samples = rows[0]
    if not samples:
        raise DatasetError(f"{first} has no samples", hint="give each array a row for each sample")
    for name, count in rows:
        if count != samples:
            raise DatasetError(
                f"{first} has {samples:,} samples, {name} {count:,}", hint="give each array a row for each sample"
            )


def held_out(data: Any, every: int) -> tuple[Any, Any]:
    """What stays for training, and each so many-th sample, of an array or of arrays by name."""
    if isinstance(data, dict):
        both = {name: held_out(array, every) for name, array in data.items()}
        return {name: each[0] for name, each in both.items()}, {name: each[1] for name, each in both.items()}
    numbers = np.arange(len(data))
    return data[numbers % every != 0], data[::every]


def check_shapes(arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int | None, ...]], file: str) -> None:
    """Refuse inputs whose samples have another shape than the text says.

    Args:
        arrays: Inputs by name; of other names, and of what has no shape, nothing is known.
        shapes: Of a sample of each; None for a size that may be any.
        file: Name of the text, for errors.

    Raises:
        DatasetError: Names input and shapes.
    """
    for name, array in arrays.items():
        if name not in shapes or not hasattr(array, "shape"):
            continue
        wanted, found = shapes[name], tuple(array.shape)
        if any(_fits(found[1:], one) for one in _spellings(wanted)):
            continue
        hint = "change the text's shape=, or the array"
        if _fits(found, wanted):
            hint = "give a row for each sample: of one sample x[None]"
        sizes = [size if size is not None else "none" for size in wanted]
        raise DatasetError(
            f"{file}: the input {name!r} has samples of shape [{', '.join(map(str, sizes))}], and those that are given have "
            f"{list(found[1:])}",
            hint=hint,
        )


def _spellings(wanted: tuple[int | None, ...]) -> Iterator[tuple[int | None, ...]]:
    """The shapes that Keras takes for one: a last axis of 1 may be there or not."""
    yield wanted
    yield (*wanted, 1)
    if wanted[-1:] == (1,):
        yield wanted[:-1]


def _fits(found: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(found) == len(wanted) and all(b in (None, a) for a, b in zip(found, wanted, strict=True))


def _array(data: Any, what: str, text: bool) -> Any:
    """An array as it is, and one of what can be made one."""
    if data is None:
        raise DatasetError(f"{what} is None", hint="give an array with a row for each sample")
    if not (hasattr(data, "shape") and hasattr(data, "dtype") and hasattr(data, "__len__")):
        try:
            data = np.asarray(data)
        except ValueError:
            raise DatasetError(
                f"{what} has rows of different lengths", hint="give an array with a row for each sample"
            ) from None
    kinds = "OSTU" if text else "biuf"
    if isinstance(data, np.ndarray) and data.dtype.kind not in kinds and data.dtype.name != "bfloat16":
        raise DatasetError(
            f"{what} is made of {_called(data)}, not of {'text' if text else 'numbers'}",
            hint="turn it into an array of numbers: names of classes by numpy.unique(y, return_inverse=True)[1]",
        )
    if not len(getattr(data, "shape", ())):
        raise DatasetError(f"{what} is a single number", hint="give an array with a row for each sample")
    return data


def _called(data: np.ndarray[Any, Any]) -> str:
    if data.dtype.kind == "O" and data.size:
        kind = type(data.flat[0]).__name__
        return f"Python objects ({kind})"
    return {"U": "text", "S": "bytes", "M": "dates", "m": "times", "c": "complex numbers"}.get(
        data.dtype.kind, str(data.dtype)
    )
