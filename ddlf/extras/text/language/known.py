"""What is known of a shape, and how two sides of one become one. Pure.

Shapes are without the batch, and so are axes. A size that is not known is None, and so is a shape of which not even the number of sizes is known.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddlf.extras.text.language.graph import Node, Shape

Known = Shape | None
Rule = Callable[[Node, dict[str, Any], list[Known], Known], tuple[list[Known], Known]]
"""Of a node, its options, the shapes that go in and the one that comes out: the same, as far as they follow from each other."""


class Misfit(Exception):
    """Two things that must be equal, and are not."""


def shown(shape: Known) -> str:
    """A shape as a text has it."""
    return "?" if shape is None else f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def unified(one: Known, other: Known) -> Known:
    """What is known of a shape from two sides.

    Raises:
        Misfit: They cannot be the same shape.
    """
    if one is None or other is None:
        return other if one is None else one
    if len(one) != len(other) or any(a != b for a, b in zip(one, other, strict=True) if None not in (a, b)):
        raise Misfit(f"the shapes {shown(one)} and {shown(other)} do not fit")
    return tuple(b if a is None else a for a, b in zip(one, other, strict=True))


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the first.

    Raises:
        Misfit: There is none.
    """
    if not -rank <= axis < rank:
        raise Misfit(f"there is no axis {axis} among {rank}")
    return axis % rank
