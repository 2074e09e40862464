"""The star exchange. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddlf.training.spec import Data, ExchangeSettings
from ddlf.training.strategy import Exchange


@dataclass(frozen=True)
class Star(Exchange):
    """Updates of local training go to the master, and weights come from it."""

    name: ClassVar[str] = "star"
    about: ClassVar[str] = "updates through the master"

    def for_data(self, data: Data) -> ExchangeSettings:
        """Return the exchange for these data: with ``secure_aggregation``, updates go to the master under masks."""
        if not data.secure_aggregation:
            return self
        from ddlf.training.exchanges.masked.settings import Masked

        return Masked.of(self, data)
