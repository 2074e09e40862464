"""What an event is: a value with facts, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import dataclass_transform


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Event:
    """Something that has happened. Each kind is a frozen dataclass, whose arguments are given by name."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
