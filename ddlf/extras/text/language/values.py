"""The syntax tree of a text: numbers, words, lists, calls and statements, each with its place. Pure.

Two of them are equal if they say the same, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Number:
    """A number, as it is written."""

    written: str
    at: int = field(compare=False)

    @property
    def value(self) -> int | float:
        """Infinite if it is too large."""
        try:
            return int(self.written)
        except ValueError:
            return float(self.written)


@dataclass(frozen=True, slots=True)
class Word:
    """A name."""

    name: str
    at: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class String:
    """What stands in quotes."""

    value: str
    at: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    values: tuple[Value, ...]
    at: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Arg:
    """An argument of a layer: an operand, or with a key an option."""

    key: str
    value: Value
    at: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Call:
    """A layer."""

    name: str
    args: tuple[Arg, ...]
    at: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a layer reads, by its number among all of them; a word until the graph is made."""

    name: str
    index: int
    at: int = field(compare=False)


Value: TypeAlias = Number | Word | String | Items | Call | Tensor


@dataclass(frozen=True, slots=True)
class Statement:
    """``block:property`` and its values: between commas some arguments each.

    Attributes:
        above: Comments in the lines before it or inside of it.
        beside: The comment behind it.
        gap: Whether an empty line stands before it.
    """

    block: Word
    property: Word
    items: tuple[tuple[Arg, ...], ...]
    at: int = field(compare=False)
    above: tuple[str, ...] = field(default=(), compare=False)
    beside: str = field(default="", compare=False)
    gap: bool = field(default=False, compare=False)


def walk(value: Value | Arg) -> Iterator[Value]:
    """Yield a value and every value inside it, outer ones first."""
    if isinstance(value, Arg):
        value = value.value
    yield value
    inner = value.values if isinstance(value, Items) else value.args if isinstance(value, Call) else ()
    for item in inner:
        yield from walk(item)
