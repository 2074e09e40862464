"""Makes peers: from a file with data and the server's model text, or from the owner's own app. Runs on the peer."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from ddlf.errors import AppError, DatasetError
from ddlf.events.facts import from_data
from ddlf.peers.frames import Welcome
from ddlf.peers.model import Trained, arrays_of, trained_from_text
from ddlf.peers.peer import Peer
from ddlf.peers.plan import Plan


def peer_of_data(
    link: str, data: str | Mapping[str, Any], *, name: str = "", seed: int = 0, say: Callable[[str], None] = print
) -> Peer:
    """Return a peer that trains the server's model on private data. No code of the server runs.

    Args:
        link: The server's link.
        data: A ``.npz`` file or a built-in data set by name, or the arrays themselves: ``x`` and ``y``, or ``x_train``,
            ``y_train``, ``x_test`` and ``y_test``.
        name: Name for people.
        seed: Seed of the order of samples.
        say: Prints a line.

    Raises:
        ConfigError: There is no such file.
        DatasetError: The file cannot be read, or has no samples.
    """
    arrays = arrays_of(data) if isinstance(data, str) else data
    source = data if isinstance(data, str) else "the data"
    samples = next((len(arrays[key]) for key in ("x_train", "x", "data") if key in arrays), 0)
    if not samples:
        samples = max((len(one) for one in arrays.values()), default=0)
    if not samples:
        raise DatasetError(f"{source} has no samples", hint="save arrays x and y with numpy.savez")

    importlib.import_module("keras")  # it takes seconds, in which a peer that has connected would seem to be slow

    def make(welcome: Welcome) -> Trained:
        classes = from_data(Plan, welcome.plan).classes
        return trained_from_text(welcome.model, arrays, source, say, seed, classes)

    return Peer(link, make, samples=samples, name=name, say=say)


def peer_of_app(
    link: str, app: type[Any], *, name: str = "", seed: int = 0, say: Callable[[str], None] = print
) -> Peer:
    """Return a peer that trains with its owner's own code.

    Args:
        link: The server's link.
        app: A subclass of ``ddlf.IApp`` whose ``load_dataset`` sets ``x_train`` and ``y_train``, and whose
            ``create_model`` sets a compiled Keras model with the weights of the server's model.
        name: Name for people.
        seed: Seed of the order of samples.
        say: Prints a line.

    Raises:
        AppError: The app has no data or no compiled model.
    """
    made = app()
    asyncio.run(_load(made))
    data = {part: one for part in PARTS if (one := getattr(made, part, None)) is not None}
    if not {"x_train", "y_train"} <= data.keys():
        raise AppError(f"{app.__name__}.load_dataset sets no x_train and y_train", hint="set both, as arrays")
    if not getattr(made.model, "compiled", False):
        raise AppError(f"{app.__name__}.create_model sets no compiled model", hint="set self.model and compile it")
    return Peer(link, lambda welcome: Trained(made.model, data, seed), samples=len(data["x_train"]), name=name, say=say)


PARTS = ("x_train", "y_train", "x_test", "y_test")


async def _load(app: Any) -> None:
    await app.load_dataset()
    await app.create_model()
