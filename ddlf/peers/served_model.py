"""The model that a server of peers serves. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ddlf.peers.pages import NO_BROWSERS, BrowserModel
from ddlf.peers.sets import Layout
from ddlf.peers.shards import Shards


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model of a run, as the server needs it.

    Args:
        text: Its text, which peers receive.
        layout: Layout of its exact sets.
        first: The exact set to begin with.
        trainable: Per tensor, whether it is trained.
        browser: The model for browsers.
        shards: The data that the server gives to peers; None if they have own data.
    """

    text: str
    layout: Layout
    first: bytes
    trainable: tuple[bool, ...]
    browser: BrowserModel = NO_BROWSERS
    shards: Shards | None = None
