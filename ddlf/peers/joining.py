"""Makes peers: from a file with data and the server's model text, or from the owner's own app. Runs on the peer."""

from __future__ import annotations

import asyncio
import importlib
import os
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from typing import Any

import numpy as np

from ddlf.errors import AppError, ConfigError, ConnectError, DatasetError, ProtocolError
from ddlf.peers.entries import NO_SHARD
from ddlf.peers.frames import Welcome
from ddlf.peers.model import Trained, arrays_of, samples_of, trained_from_text
from ddlf.peers.peer import Peer, check_link
from ddlf.peers.plan import Offer
from ddlf.peers.sample_peer import SampleNoiseSettings, SamplePeer
from ddlf.rpc.iworker import awaited


def peer_of_data(
    link: str,
    data: str | os.PathLike[str] | Mapping[str, Any],
    *,
    name: str = "",
    seed: int = 0,
    say: Callable[[str], None] = print,
    secure_aggregation: bool = False,
    sample_noise: SampleNoiseSettings | None = None,
) -> Peer:
    """Return a peer that trains the server's model on private data. No code of the server runs.

    Args:
        link: The server's link.
        data: A ``.npz`` file or a built-in data set by name, or the arrays themselves: ``x`` and ``y``, or ``x_train``,
            ``y_train``, ``x_test`` and ``y_test``.
        name: Name for people.
        seed: Seed of the order of samples.
        say: Prints a line.
        secure_aggregation: Whether to refuse a server that sees single updates.
        sample_noise: How its steps hide single samples; None if they do not.

    Raises:
        ConfigError: There is no such file.
        DatasetError: The file cannot be read, or has no samples.
    """
    source = os.fspath(data) if isinstance(data, str | os.PathLike) else "the data"
    arrays = _as_arrays(data) if isinstance(data, Mapping) else arrays_of(source)
    samples = samples_of(arrays)
    if samples < (1 if any("test" in name for name in arrays) else 2):  # before the link is used
        raise DatasetError(
            f"{source} has {'one sample' if samples else 'no samples'}, and training needs more",
            hint="save arrays x and y with numpy.savez",
        )

    check_link(link)

    def make(offer: Offer) -> Trained:
        _start_keras(say)
        trained = trained_from_text(offer.model, arrays, source, say, seed, offer.plan.classes)
        if trained.other_scale:
            say(f"scale     your data go {trained.other_scale}, and all peers should agree")
        return trained

    return _peer(sample_noise, link, make, name=name, say=say, secure_aggregation=secure_aggregation)


def _peer(sample_noise: SampleNoiseSettings | None, *args: Any, **keywords: Any) -> Peer:
    return Peer(*args, **keywords) if sample_noise is None else SamplePeer(*args, how=sample_noise, **keywords)


def _as_arrays(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the data of a program as arrays: it may have lists.

    Raises:
        DatasetError: Names the part that is not an array.
    """
    arrays = {}
    for name, value in data.items():
        try:
            arrays[name] = np.asarray(value)
        except ValueError:  # rows of several lengths
            raise DatasetError(
                f"the data has {name}, which is not an array", hint="give all samples one shape"
            ) from None
    return arrays


def peer_of_shard(link: str, *, name: str = "", seed: int = 0, say: Callable[[str], None] = print) -> Peer:
    """Return a peer that trains on a shard of the server's own data. No code of the server runs.

    Args:
        link: The link of a server with ``--shards``.
        name: Name for people.
        seed: Seed of the order of samples.
        say: Prints a line.
    """
    return _ShardPeer(link, name, seed, say)


def _start_keras(say: Callable[[str], None]) -> None:
    """Import Keras, which takes seconds: a peer that has connected before would seem to be slow."""
    say("model     Keras starts, which takes some seconds")
    importlib.import_module("keras")


class _ShardPeer(Peer):
    """A peer without own data. It trains only while it is connected, since its shard may be with another peer later."""

    _meanwhile = "training waits"

    def __init__(self, link: str, name: str, seed: int, say: Callable[[str], None]) -> None:
        super().__init__(link, self._model_for, name=name, say=say)
        self._seed = seed
        self._shard = NO_SHARD
        self._offer: Offer

    @property
    def _reported_samples(self) -> int:
        return 0  # this asks for a shard

    def _prepare(self, offer: Offer) -> None:
        if not offer.plan.shards:
            raise ConfigError("the server has no data for peers", hint="name yours with --data")
        _start_keras(self._say)
        self.plan, self._offer = offer.plan, offer

    def _begin(self, welcome: Welcome) -> None:
        self._shard = welcome.shard
        self._take_model(self._make(self._offer), self._offer)
        super()._begin(welcome)

    def _model_for(self, offer: Offer) -> Trained:
        arrays = self._fetch_shard(self._connection.welcome)
        return trained_from_text(offer.model, arrays, f"shard {self._shard}", self._say, self._seed)

    def _facts_for_people(self, welcome: Welcome) -> str:
        return f"it trains {self.trained.samples:,} samples of the server, shard {self._shard} of {self.plan.shards}"

    def _may_train(self) -> bool:
        if not self._connection.is_open:
            return False
        welcome = self._connection.welcome
        if welcome.shard != self._shard:  # it was away for longer than its lease
            try:
                self.trained.take(self._fetch_shard(welcome))
            except ConnectError:  # lost again: the next welcome says which shard it has
                self._shard = NO_SHARD
                return False
            self._say(f"shard     {self._facts_for_people(welcome)}")
        return True

    def _fetch_shard(self, welcome: Welcome) -> dict[str, Any]:
        content = self._connection.shard(welcome.shard)
        self._shard = welcome.shard
        try:
            with np.load(BytesIO(content), allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ProtocolError(f"the server's shard {welcome.shard} cannot be read: {error}") from None
        if not {"x_train", "y_train"} <= arrays.keys():
            raise ProtocolError(f"the server's shard {welcome.shard} has no x_train and y_train")
        return arrays


def peer_of_app(
    link: str,
    app: type[Any],
    *,
    name: str = "",
    seed: int = 0,
    say: Callable[[str], None] = print,
    secure_aggregation: bool = False,
    sample_noise: SampleNoiseSettings | None = None,
) -> Peer:
    """Return a peer that trains with its owner's own code.

    Args:
        link: The server's link.
        app: A subclass of ``ddlf.IApp`` whose ``load_dataset`` sets ``x_train`` and ``y_train``, and whose
            ``create_model`` sets a compiled Keras model with the weights of the server's model.
        name: Name for people.
        seed: Seed of the order of samples.
        say: Prints a line.
        secure_aggregation: Whether to refuse a server that sees single updates.
        sample_noise: How its steps hide single samples; None if they do not.

    Raises:
        AppError: The app has no data or no compiled model.
    """
    created = app()
    if _is_in_loop():  # as in a notebook
        with ThreadPoolExecutor(1, "ddlf-peer-load") as thread:
            thread.submit(asyncio.run, _load(created)).result()
    else:
        asyncio.run(_load(created))
    data = {part: value for part in PARTS if (value := getattr(created, part, None)) is not None}
    if not {"x_train", "y_train"} <= data.keys():
        raise AppError(f"{app.__name__}.load_dataset sets no x_train and y_train", hint="set both, as arrays")
    if not getattr(created.model, "compiled", False):
        raise AppError(f"{app.__name__}.create_model sets no compiled model", hint="set self.model and compile it")
    return _peer(
        sample_noise,
        link,
        lambda offer: Trained(created.model, data, seed),
        name=name,
        say=say,
        secure_aggregation=secure_aggregation,
    )


PARTS = ("x_train", "y_train", "x_test", "y_test")


def _is_in_loop() -> bool:
    """Return whether an event loop runs on this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def _load(app: Any) -> None:
    await awaited(app.load_dataset())
    await awaited(app.create_model())
