"""The base of all events: a value that contains facts only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import dataclass_transform


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event:
    """A fact about the past. Each subclass is a frozen dataclass with keyword-only arguments."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
