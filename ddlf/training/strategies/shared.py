"""Settings that several strategies have. Runs everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddlf.settings.checks import OUTER as OUTER_CHECK
from ddlf.settings.checks import Whole
from ddlf.settings.setting import FACT, Setting

if TYPE_CHECKING:
    from ddlf.algorithms.outer import OuterOptimizer

OUTER: Setting[OuterOptimizer, OuterOptimizer | str | None] = Setting(
    None,
    OUTER_CHECK,
    "optimizer that applies the merged update to the weights (default: subtract)",
    "RULE",
    FACT,
)
"""An optimizer on the master that treats the merged update as a gradient."""

STALENESS_HELP = "weight of an update that is based on old weights"
MAX_STALENESS: Setting[int | None, int | None] = Setting(
    None,
    Whole(0, none="no limit"),
    "maximum number of rounds a slot may be ahead of the slowest slot before it waits (default: no limit)",
    "N",
    FACT,
)
"""With 0 all slots start each round together with the same weights, as in synchronous training, but updates are added
as they arrive."""
