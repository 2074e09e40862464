"""Makes an app (``IApp``) from a model text, for ``ddlf run model.nnm``. Runs on the master and, in executors, on
workers.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from ddlf.app import IApp
from ddlf.errors import ConfigError
from ddlf.extras.text.training.block import KEYS, SETS, read_key
from ddlf.extras.text.training.data import DataSource, dataset
from ddlf.extras.text.training.notation import Notation, load_notation, not_open, take_decided


class TextApp(IApp):
    """An app that trains the model of a model text. Each text gets its own subclass, with the settings of its block
    ``train``.

    Attributes:
        takes_data: Whether the text may name the data.
        data: The name of a data set, or the path of a file. It overrides the data that the text names.
    """

    takes_data = True
    notation: Any
    data: str | None = None
    optimizer: Any = None
    learning_rate: Any = None
    loss: Any = None
    metrics: Any = None
    initial: Any = None
    scaling: Any = None
    penalty: Any = None
    clipping: Any = None
    loss_weights: Any = None
    patience: Any = None
    validation: Any = None
    ignore: Any = None

    def __init__(self, cluster: Any = None) -> None:
        super().__init__(cluster)
        self._arrays: dict[str, Any] | None = None
        self._notes: list[str] = []
        self.source: DataSource | None = None

    def settle(self) -> None:
        """Read the data, convert it for the model text, and decide the open keys, before the run starts.

        Raises:
            ConfigError: No data is named, or the named data does not exist.
            DatasetError: The data does not fit.
            NotationError: A key has an invalid value.
        """
        if self._arrays is not None:
            return
        notation: Notation = self.notation
        values = {key: value for key in KEYS if key != "data" and (value := vars(self).get(key)) is not None}
        for key, value in values.items():
            read_key(key, _spelled(value), f"-p {key}")
        notation = notation.with_values({("train", key): _spelled(value) for key, value in values.items()})
        self.source = _source(self.data, notation)
        share = getattr(notation.key_value("validation"), "value", 0.0)
        arrays, self._notes = dataset(self.source.arrays(), self.source.name, notation.parsed, notation.loss, share)
        self.notation = notation.settled(
            *(arrays["x_train"], arrays.get("y_train")),
            validation="x_val" in arrays,
            weighted="w_train" in arrays,
            fixed_settings=not_open(self),
        )
        take_decided(self, self.notation)
        self._arrays = arrays

    async def _check_written(self) -> None:
        await super()._check_written()
        await asyncio.to_thread(self.settle)

    async def load_dataset(self) -> None:
        """Set the data attributes of the app from the text's data."""
        if self._arrays is None:  # a worker has not read the data yet
            assert self.source is not None
            share = getattr(self.notation.key_value("validation"), "value", 0.0)
            arrays, _ = dataset(self.source.arrays(), self.source.name, self.notation.parsed, self.notation.loss, share)
        else:
            arrays = self._arrays
            for note in self._notes:
                self.say(f"data      {note}")
        for name, array in arrays.items():
            setattr(self, name, array)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_arrays": None, "_notes": []}

    def __reduce__(self) -> Any:
        return _restored, (type(self).__name__, type(self).notation), self.__getstate__()


def app_of(path: Path, data: str | None = None) -> type[TextApp]:
    """Return the app class that trains the model of a model text.

    Args:
        path: The path of the text.
        data: The name or path of the data; None if the text names it.

    Raises:
        NotationError: The text has mistakes.
    """
    result = _app_class(re.sub(r"\W", "_", path.stem) or "model", load_notation(path))
    result.data = data
    return result


def _app_class(name: str, notation: Notation) -> type[TextApp]:
    settings = notation.train_block.settings
    attributes = {"notation": notation, "__module__": __name__, "__doc__": f"The model of {notation.file}."}
    return type(name, (TextApp,), {**settings, **attributes})


def _restored(name: str, notation: Notation) -> TextApp:
    kind = _app_class(name, notation)
    return kind.__new__(kind)


def _source(name: str | None, notation: Notation) -> DataSource:
    if name is not None:
        return DataSource(name)
    if (source_name := notation.data) is None:
        raise ConfigError(
            f"{notation.file} does not say what data it is to learn",
            hint=f"name it: --data {'|'.join(SETS)}|FILE.npz, or train:data {SETS[0]}; in the text",
        )
    file = Path(notation.file).parent / source_name
    is_beside = source_name not in SETS and not Path(source_name).is_file() and file.is_file()
    return DataSource(str(file) if is_beside else source_name, notation.position_of("data"))


def _spelled(value: Any) -> str:
    """Return the value of an attribute in the notation of a model text."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_spelled, value))}]"
    return str(value)
