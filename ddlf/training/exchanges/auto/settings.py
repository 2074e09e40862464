"""``exchange="auto"``. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddlf.training.exchanges.sharded.settings import Sharded
from ddlf.training.spec import RunSpec
from ddlf.training.strategy import Exchange

if TYPE_CHECKING:
    from ddlf.training.context import App
    from ddlf.training.crew.crew import Crew


@dataclass(frozen=True)
class Auto(Exchange):
    """``Star`` or ``Sharded``, whichever is likely to be faster."""

    name: ClassVar[str] = "auto"
    strategies: ClassVar[tuple[str, ...]] = ("sync",)
    about: ClassVar[str] = "the faster of these two"
    role: ClassVar[str] = Sharded.role
    same_bits_as: ClassVar[str] = Sharded.same_bits_as

    async def chosen(self, app: App, crew: Crew, spec: RunSpec) -> tuple[Exchange, str]:
        """Return the faster exchange, if the workers can reach each other, and the reason."""
        from ddlf.training.exchanges.auto.choice import chosen

        return await chosen(app, crew, spec)
