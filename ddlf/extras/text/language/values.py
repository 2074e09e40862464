"""Defines the syntax tree of a model text: numbers, words, lists, calls and statements, each with its position. Pure.

Positions do not count when two values are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Number:
    """A number in the notation of the model text."""

    written: str
    at: int = field(compare=False)

    @property
    def value(self) -> int | float:
        """Return the number's value, infinite if it is too large."""
        try:
            return int(self.written)
        except ValueError:
            return float(self.written)


@dataclass(frozen=True, slots=True)
class Word:
    """A word in a model text: a name or a keyword."""

    name: str
    at: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class String:
    """A string in quotes in a model text."""

    value: str
    at: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Items:
    """A list of values in brackets in a model text."""

    values: tuple[Value, ...]
    at: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Arg:
    """An argument of a layer. With a key it is an option, without one an operand."""

    key: str
    value: Value
    at: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Call:
    """A layer with its arguments, such as ``relu()``."""

    name: str
    args: tuple[Arg, ...]
    at: int = field(compare=False)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a layer reads, by its number among the layer's inputs. It is a word until the graph is built."""

    name: str
    index: int
    at: int = field(compare=False)


Value: TypeAlias = Number | Word | String | Items | Call | Tensor


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement: ``block:property`` and its items. Commas separate the items, which have one or more arguments.

    Attributes:
        comments_above: The comments in the lines before or inside the statement.
        comment_beside: The comment at the end of its line.
        gap: Whether an empty line precedes it.
    """

    block: Word
    property: Word
    items: tuple[tuple[Arg, ...], ...]
    at: int = field(compare=False)
    comments_above: tuple[str, ...] = field(default=(), compare=False)
    comment_beside: str = field(default="", compare=False)
    gap: bool = field(default=False, compare=False)


def walk(value: Value | Arg) -> Iterator[Value]:
    """Yield a value and every value inside it, outer ones first."""
    if isinstance(value, Arg):
        value = value.value
    yield value
    inner = value.values if isinstance(value, Items) else value.args if isinstance(value, Call) else ()
    for item in inner:
        yield from walk(item)
