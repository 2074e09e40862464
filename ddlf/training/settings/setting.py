"""What there is to know about a setting. Runs everywhere; imports nothing of weight."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

MODES = {"sync": "synchronous", "async": "asynchronous", "downpour": "Downpour"}


class Use(Flag):
    """Where a setting is used besides in a run."""

    FILE = auto()
    """In ``run:`` of cluster.yaml."""
    FACT = auto()
    """In checkpoints, since the result depends on it: a run goes on only with the same."""


FILE, FACT, NOWHERE = Use.FILE, Use.FACT, Use(0)


@dataclass(frozen=True)
class Setting:
    """What there is to know about a setting besides its name, type and default.

    Args:
        check: Takes the setting's name and a value; returns the value as it is used, or raises ConfigError.
        help: What it is, for the command line, the file's schema and the reference.
        flag: What stands for the value in ``--help``, "" where that lists the choices; None if there is no such option.
        use: Where else it is used.
        only: The modes that use it, with spaces between them; None for all.
        option: Name of the option, where it is not that of the setting.
    """

    check: Callable[[str, Any], Any]
    help: str
    flag: str | None = None
    use: Use = NOWHERE
    only: str | None = None
    option: str = ""

    def used_by(self, mode: str | None) -> bool:
        """Whether training in a mode uses it."""
        return self.only is None or mode in self.only.split()
