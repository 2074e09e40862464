"""Makes peers: from a file with data and the server's model text, or from the owner's own app. Runs on the peer."""

from __future__ import annotations

import asyncio
import importlib
import zipfile
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

import numpy as np

from ddlf.errors import AppError, ConnectError, DatasetError, ProtocolError
from ddlf.events.facts import from_data
from ddlf.peers.entries import NO_SHARD
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


def peer_of_shard(link: str, *, name: str = "", seed: int = 0, say: Callable[[str], None] = print) -> Peer:
    """Return a peer that trains on a shard of the server's own data. No code of the server runs.

    Args:
        link: The link of a server with ``--shards``.
        name: Name for people.
        seed: Seed of the order of samples.
        say: Prints a line.
    """
    importlib.import_module("keras")  # as in ``peer_of_data``
    return _ShardPeer(link, name, seed, say)


class _ShardPeer(Peer):
    """A peer without own data. It trains only while it is connected, since its shard may be with another peer later."""

    _meanwhile = "training waits"

    def __init__(self, link: str, name: str, seed: int, say: Callable[[str], None]) -> None:
        super().__init__(link, self._made, samples=0, name=name, say=say)
        self._seed = seed
        self._shard = NO_SHARD

    def _made(self, welcome: Welcome) -> Trained:
        arrays = self._given(welcome)
        return trained_from_text(welcome.model, arrays, f"shard {self._shard}", self._say, self._seed)

    def _about(self, welcome: Welcome) -> str:
        return f"it trains {self.trained.samples:,} samples of the server, shard {self._shard} of {self.plan.shards}"

    def _may_train(self) -> bool:
        if not self._connection.is_open:
            return False
        welcome = self._connection.welcome
        if welcome.shard != self._shard:  # it was away for longer than its lease
            try:
                self.trained.take(self._given(welcome))
            except ConnectError:  # lost again: the next welcome says which shard it has
                self._shard = NO_SHARD
                return False
            self._say(f"shard     {self._about(welcome)}")
        return True

    def _given(self, welcome: Welcome) -> dict[str, Any]:
        content = self._connection.shard()
        self._shard = welcome.shard
        try:
            with np.load(BytesIO(content), allow_pickle=False) as archive:
                found = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ProtocolError(f"the server's shard {welcome.shard} cannot be read: {error}") from None
        if not {"x_train", "y_train"} <= found.keys():
            raise ProtocolError(f"the server's shard {welcome.shard} has no x_train and y_train")
        return found


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
