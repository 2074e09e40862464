"""Checks of the values of settings. Runs everywhere; imports no heavy modules.

A check is called with a setting's name and a value. It returns the value in the form that the run uses, or raises
ConfigError. Its ``str`` describes the valid values. Its ``names``, if it has them, are the names of the valid values.
"""

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite, nan
from numbers import Integral, Real
from pathlib import Path
from pkgutil import resolve_name
from types import NoneType
from typing import Any

from ddlf.errors import ConfigError


def with_names(text: str, names: Sequence[str]) -> str:
    """Return a description of a setting's valid values in which each valid name occurs."""
    missing = [name for name in names if name not in text]
    joined = ", ".join(missing)
    return text if not missing else f"{text}: {joined}" if len(missing) == len(names) else f"{text}; also {joined}"


@dataclass(frozen=True)
class Whole:
    """A check that accepts integers in a range, including NumPy integers.

    Args:
        low: The smallest value.
        high: The largest value; None for no limit.
        none: The meaning of None; "" refuses None.
    """

    low: int
    high: int | None = None
    none: str = ""

    def __call__(self, name: str, value: Any) -> int | None:
        if value is None and self.none:
            return None
        try:
            number = self.low - 1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = self.low - 1
        if number < self.low or (self.high is not None and number > self.high):
            raise ConfigError(f"{name} must be {self}, got {value!r}")
        return number

    def __str__(self) -> str:
        limits = f"of {self.low} or more" if self.high is None else f"from {self.low} to {self.high}"
        return f"a whole number {limits}{f', or None for {self.none}' if self.none else ''}"


@dataclass(frozen=True)
class Number:
    """A check that accepts finite numbers in a range, including NumPy numbers. It returns a ``float``.

    Args:
        low: The smallest value.
        high: The largest value; None for no limit.
        below: Values must be smaller than this; None for no such limit. Give at most one of ``high`` and ``below``.
        unit: The unit in the plural, such as ``seconds``; "" for a number without a unit.
    """

    low: float
    high: float | None = None
    below: float | None = None
    unit: str = ""

    def __call__(self, name: str, value: Any) -> float:
        try:
            number = nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        except OverflowError:  # an integer beyond the range of float
            number = nan
        if (
            not (isfinite(number) and number >= self.low)
            or (self.high is not None and number > self.high)
            or (self.below is not None and number >= self.below)
        ):
            raise ConfigError(f"{name} must be {self}, got {value!r}")
        return number

    def __str__(self) -> str:
        limit = (
            f"{self.high:g}" if self.high is not None else f"less than {self.below:g}" if self.below is not None else ""
        )
        limits = f" from {self.low:g} to {limit}" if limit else f", {self.low:g} or more"
        return f"a number{f' of {self.unit}' if self.unit else ''}{limits}"


@dataclass(frozen=True)
class Above:
    """A check that accepts finite numbers above a limit, including NumPy numbers, or None. It returns a ``float``.

    Args:
        limit: Values must be larger than this.
        none: The meaning of None.
        below: Values must be smaller than this; None for no such limit.
    """

    limit: float
    none: str
    below: float | None = None

    def __call__(self, name: str, value: Any) -> float | None:
        if value is None:
            return None
        try:
            number = nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        except OverflowError:  # an integer beyond the range of float
            number = nan
        if not (isfinite(number) and number > self.limit) or (self.below is not None and number >= self.below):
            raise ConfigError(f"{name} must be {self}, got {value!r}")
        return number

    def __str__(self) -> str:
        below = "" if self.below is None else f" and below {self.below:g}"
        return f"a finite number above {self.limit:g}{below}, or None for {self.none}"


class OneOf:
    """A check that accepts one of the given names."""

    def __init__(self, *choices: str, hint: str = "") -> None:
        self.names, self._hint = choices, hint

    def __call__(self, name: str, value: Any) -> str:
        if isinstance(value, str) and value in self.names:
            return value
        matches = get_close_matches(str(value).lower(), self.names, 1)
        hint = f"did you mean {matches[0]!r}?" if matches else self._hint
        raise ConfigError(f"{name} must be {self}, got {value!r}", hint=hint)

    def __str__(self) -> str:  # two choices read best with "or"
        return " or ".join(map(repr, self.names)) if len(self.names) == 2 else f"one of {', '.join(self.names)}"


class Several:
    """A check that accepts any number of the given names, as a list or as a text with commas."""

    def __init__(self, *choices: str, hint: str) -> None:
        self._check = OneOf(*choices, hint=hint)
        self.names = choices

    def __call__(self, name: str, value: Any) -> tuple[str, ...]:
        names = value.split(",") if isinstance(value, str) else value
        if not isinstance(names, list | tuple):
            raise ConfigError(f"{name} must be {self}, got {value!r}")
        return tuple(
            dict.fromkeys(self._check(name, part.strip() if isinstance(part, str) else part) for part in names if part)
        )

    def __str__(self) -> str:
        return f"any of {', '.join(self.names)}"


@dataclass(frozen=True)
class OfType:
    """A check that accepts values of some types. It has a description of them for people."""

    types: tuple[type, ...]
    description: str

    def __call__(self, name: str, value: Any) -> Any:
        if not isinstance(value, self.types):
            raise ConfigError(f"{name} must be {self.description}, got {value!r}")
        return value

    def __str__(self) -> str:
        return self.description


@dataclass(frozen=True)
class LinkOrNone:
    """A check that accepts a link of a server of peers, or None. No error shows the code of the link."""

    def __call__(self, name: str, value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be a link, got {type(value).__name__}")
        from pkgutil import resolve_name

        link = resolve_name("ddlf.peers.sessions:read_link")(value)
        if not link.code:
            raise ConfigError("the link has no code behind its #", hint="copy the whole link")
        return value

    def __str__(self) -> str:
        return "a link that ddlf peers serve or ddlf peers invite has printed"


@dataclass(frozen=True)
class RuleOf:
    """A check that accepts a rule, such as a merge rule, or the text of one.

    Args:
        home: Module and name of the family of rules, which is imported when a text is read.
        description: Description of the valid texts, if they are more than the family's names.
    """

    home: str
    description: str = ""

    def __call__(self, name: str, value: Any) -> Any:
        family: Any = resolve_name(self.home)
        if isinstance(value, str):
            return family.read(value)
        if _is_of(family, value):
            if isinstance(value, type):
                raise ConfigError(
                    f"{name} must be an object, got the class {value.__name__}", hint=f"write {value.__name__}()"
                )
            return family.normalized(value)
        raise ConfigError(f"{name} must be a name, got {value!r}")

    @property
    def names(self) -> Sequence[str]:
        """The names of the rules that the setting can have."""
        names: Sequence[str] = getattr(resolve_name(self.home), "names", ())
        return names

    def __str__(self) -> str:
        return self.description or f"one of {resolve_name(self.home)}"


class OuterOf(RuleOf):
    """A check for an outer optimizer: a rule or its text, or any object with ``init`` and ``update``.

    None means ``subtract``.
    """

    def __call__(self, name: str, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return super().__call__(name, "subtract" if value is None else value)
        if isinstance(value, type) and hasattr(value, "update"):
            raise ConfigError(
                f"{name} must be an object, got the class {value.__name__}", hint=f"write {value.__name__}()"
            )
        if not (callable(getattr(value, "init", None)) and callable(getattr(value, "update", None))):
            raise ConfigError(
                f"{name} must be an outer optimizer or the name of one, got {value!r}",
                hint="for example ddlf.algorithms.outer.Nesterov(), or 'nesterov'",
            )
        family: Any = resolve_name(self.home)
        return family.normalized(value) if _is_of(family, value) else value

    def __str__(self) -> str:
        return f"{super().__str__()}, or your own object"


class CodecOf(RuleOf):
    """A check for a codec or its text. The error for ``delta:`` says which setting accepts that."""

    def __call__(self, name: str, value: Any) -> Any:
        if isinstance(value, str) and value.startswith("delta:"):
            raise ConfigError(
                f"{name}={value!r}: an update is a difference already",
                hint=f"{name}={value.removeprefix('delta:')!r} for updates, weights_codec={value!r} for weights",
            )
        return super().__call__(name, value)


class RuleOrNone(RuleOf):
    """A check that accepts a rule, its text, or None for the default of the mode."""

    def __call__(self, name: str, value: Any) -> Any:
        return None if value is None else super().__call__(name, value)


class RuleOrNothing(RuleOf):
    """A check that accepts a rule, its text, or None for no rule, which users can write as ``none``."""

    def __call__(self, name: str, value: Any) -> Any:
        return None if value is None or value == "none" else super().__call__(name, value)


class OutwardOf(RuleOf):
    """A check for the encoding of weights on their way to workers: a codec, a difference, or the text of one."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the codecs that can encode whole weights, and the form of the text for a difference."""
        codecs = resolve_name("ddlf.algorithms.codec:CODEC")
        return [*(name for name in codecs.names if not codecs.read(name).biased), "delta:CODEC"]

    def __call__(self, name: str, value: Any) -> Any:
        codec = resolve_name("ddlf.algorithms.codec:Codec")
        return super().__call__(name, str(value) if isinstance(value, codec | resolve_name(self.home)) else value)


def _is_of(family: Any, value: Any) -> bool:
    return getattr(value, "family", None) is family


UNITS = {"": 1} | {
    f"{unit}{i}": (1024 if i else 1000) ** (power + 1) for power, unit in enumerate("KMGT") for i in ("", "I")
}


def exact_size(count: int) -> str:
    """Return a number of bytes with the largest unit that divides it, as a user writes it: ``8GB``, ``512MiB``."""
    factor, unit = max((factor, unit) for unit, factor in UNITS.items() if count % factor == 0)
    return f"{count // factor}{'k' if unit == 'K' else unit.replace('I', 'i')}B"


def count_of_bytes(name: str, value: Any) -> int | None:
    """a size such as `512MiB` or `2GB`, a number of bytes, or None"""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", str(value).strip().upper())
    if isinstance(value, bool) or not match or not (count := int(float(match[1]) * UNITS[match[2] or ""])):
        raise ConfigError(f"{name} must be {count_of_bytes.__doc__}, got {value!r}")
    return count


def switch(name: str, value: Any) -> bool:
    """True or False"""
    if not (isinstance(value, int) and value in (0, 1)):
        raise ConfigError(f"{name} must be {switch.__doc__}, got {value!r}")
    return bool(value)


def class_weights(name: str, value: Any) -> Mapping[int, float] | None:
    """a dict of a weight of 0 or more for each class's number, or None"""
    pairs = value.items() if isinstance(value, Mapping) else [] if value is None else [(None, None)]
    for number, weight in pairs:
        if not (isinstance(number, Integral) and isinstance(weight, Real) and isfinite(weight) and float(weight) >= 0):
            raise ConfigError(f"{name} must be {class_weights.__doc__}, got {value!r}")
    weights: Mapping[int, float] | None = value
    return weights


def page(name: str, value: Any) -> int | None:
    """True, False, a port, or None"""
    if value is not None and not (isinstance(value, int) and 0 <= value <= 65535):
        raise ConfigError(f"{name} must be {page.__doc__}, got {value!r}")
    return value


CODEC = CodecOf("ddlf.algorithms.codec:CODEC")
SHUFFLE = RuleOrNone("ddlf.algorithms.reading_order:SHUFFLE")
LOCAL_RULE = RuleOf("ddlf.algorithms.local_rules:LOCAL")
OUTWARD = OutwardOf("ddlf.algorithms.codec:Outward", "a codec that is not biased, or any after `delta:`")
MERGE = RuleOf("ddlf.algorithms.merge:MERGE")
PUSHED = RuleOf("ddlf.algorithms.push_rules:PUSHED")
ARRIVAL = RuleOf("ddlf.algorithms.arrival:ARRIVAL")
CONVERGE = RuleOf("ddlf.algorithms.convergence:CONVERGE")
RATE_DECAY = RuleOf("ddlf.algorithms.rate_decay:RATE_DECAY")
STALENESS = RuleOrNone("ddlf.algorithms.staleness:STALENESS")
SCHEDULE = RuleOrNothing(
    "ddlf.algorithms.schedules:SCHEDULE", "a course such as `cosine`, also behind `warmup:0.05`, or None"
)
CLIP = RuleOrNothing("ddlf.algorithms.clipping:CLIP")
MULTIPLIERS = RuleOrNothing(
    "ddlf.algorithms.multipliers:MULTIPLIERS",
    "`freeze:0.75`, also several shares, or factors by name: `head=2,body/bias=0`, or None",
)
PARTITION = RuleOf("ddlf.algorithms.partitioners:PARTITION")
OUTER = OuterOf("ddlf.algorithms.outer:OUTER")
FOLDER = OfType((str, Path, NoneType), "a folder or None")
NAME = OfType((str, NoneType), "a name or None")
PEER = LinkOrNone()
TRACKERS = Several("tensorboard", "mlflow", hint="metrics.csv is in the folder of every run")
CALLBACKS = OfType((list, tuple), "a list of Keras callbacks")
