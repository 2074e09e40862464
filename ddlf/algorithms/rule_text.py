"""Reads rules from text, and writes them as text: ``trimmed:beta=0.2``. Runs on master and workers.

A rule is a frozen dataclass of its parameters, each with a default. People write it as text, and checkpoints store
and compare that text; a hyperparameter is part of that text, and not a separate setting.
"""

from collections.abc import Callable
from difflib import get_close_matches
from inspect import signature
from math import isfinite
from numbers import Real
from typing import Any, ClassVar, Generic, TypeVar

from ddlf.errors import ConfigError

R = TypeVar("R")
_KINDS = {int: "a whole number", float: "a number"}


class Named:
    """A rule that users can write as text, such as ``"trimmed:0.2"``. ``str(rule)`` returns this text."""

    __slots__ = ()
    family: ClassVar["Family[Any]"]
    removed: ClassVar[dict[str, str]] = {}
    """Parameters of earlier versions, each with the only value that can still be read: the value without effect."""

    def __str__(self) -> str:
        return self.family.text(self)


class Family(Generic[R]):
    """The possible values of one setting: rules that have names, such as ``mean`` and ``median``.

    Args:
        kind: Name of the family in errors, such as ``"merge"``.
        rules: The class of each rule, or a function that takes some of its fields. Each parameter has the type of its
            default.

    Example::

        MERGE = Family("merge", mean=Mean, median=Median, trimmed=TrimmedMean)
        MERGE.read("trimmed:beta=0.2") == MERGE.read("trimmed:0.2") == TrimmedMean(beta=0.2)
        str(TrimmedMean(beta=0.2)) == "trimmed:beta=0.2"
    """

    def __init__(self, kind: str, /, **rules: Callable[..., R]) -> None:
        self.kind = kind
        self._rules = rules
        self._defaults = {
            name: {field: parameter.default for field, parameter in signature(make).parameters.items()}
            for name, make in rules.items()
        }
        for make in rules.values():
            type(make()).family = self  # type: ignore[attr-defined]

    @property
    def names(self) -> list[str]:
        """The names of all rules that the setting can have, in the order of their declaration."""
        return list(self._rules)

    def suggestion(self, name: str) -> str:
        """Return the end of an error's sentence that suggests a rule with a similar name; empty if there is none."""
        return _guess(name, self._rules)

    def __str__(self) -> str:
        return ", ".join(self._spelled(name, self._defaults[name]) for name in self._rules)

    def read(self, text: str) -> R:
        """Return the rule that a text describes: ``name``, ``name:value`` or ``name:parameter=value,other=value``.

        Values without a name belong to the first parameters. Missing parameters take their defaults.

        Raises:
            ConfigError: No rule has this name, or it cannot have these parameters.
        """
        name, colon, parameters = text.partition(":")
        if name not in self._rules:
            guess = _guess(name, self.names)
            all_there_are = "" if guess else f"choose one of {', '.join(self.names)}"
            raise ConfigError(f"unknown {self.kind} {text!r}{guess}", hint=all_there_are)
        try:
            return self._rules[name](**self._parameters(name, parameters) if colon else {})
        except ConfigError as error:
            usual = self._spelled(name, self._defaults[name])
            hint = error.hint or f"write it as {usual}"
            raise ConfigError(f"{self.kind} {text!r}: {error.message}", hint=hint) from None

    def normalized(self, rule: R) -> R:
        """Return an equal rule whose parameters have their declared types, so that one rule has one text.

        Raises:
            ConfigError: A parameter has another type, such as 2.5 instead of a whole number.
        """
        text = self.text(rule)
        return rule if text == repr(rule) else self.read(text)  # repr: a class of the user's own

    def text(self, rule: R) -> str:
        """Return the text that describes a rule, with all parameters; for a user's own class, its ``repr``."""
        for name, make in self._rules.items():
            values = {field: getattr(rule, field, default) for field, default in self._defaults[name].items()}
            if type(make()) is type(rule) and make(**values) == rule:
                kinds = {field: type(default) for field, default in self._defaults[name].items()}
                return self._spelled(
                    name, {field: _as_text_has(kinds[field], value) for field, value in values.items()}
                )
        return repr(rule)

    @staticmethod
    def _spelled(name: str, values: dict[str, Any]) -> str:
        return name + ":" * bool(values) + ",".join(f"{field}={value}" for field, value in values.items())

    def _parameters(self, name: str, text: str) -> dict[str, Any]:
        defaults = self._defaults[name]
        if not defaults:
            raise ConfigError(f"{name} has no parameters")
        parameters: dict[str, Any] = {}
        for position, part in enumerate(text.split(",")):
            field, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals:
                if position >= len(defaults):
                    raise ConfigError(f"{name} has no more parameters than {', '.join(defaults)}")
                field, value = list(defaults)[position], field
            removed: dict[str, str] = getattr(self._rules[name], "removed", {})
            if field in removed:
                if value != removed[field]:
                    raise ConfigError(f"{name} has no {field} any more", hint=f"leave out {field}")
                continue
            if field not in defaults:
                raise ConfigError(f"{name} has no parameter {field!r}{_guess(field, defaults)}")
            if field in parameters:
                raise ConfigError(f"{field} is given twice")
            kind = type(defaults[field])
            try:
                parameters[field] = kind(value)
            except ValueError:
                raise ConfigError(f"{field} must be {_KINDS[kind]}, got {value!r}") from None
        return parameters


def _as_text_has(kind: type, value: Any) -> Any:
    """Return the value of a parameter in its type: 1.0 for 1 if the parameter is a float.

    So a rule has only one text.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return float(value) if kind is float and is_number else value


def _guess(name: str, names: Any) -> str:
    matches = get_close_matches(name.strip().lower(), names, 1)
    return f", did you mean {matches[0]!r}?" if matches else ""


def check_positive(**values: float) -> None:
    for name, value in values.items():
        if not (isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be finite and > 0, got {value}")


def check_size(**values: float) -> None:
    """Raise ``ConfigError`` for a parameter whose square, or quotients by it, leave the range of float32."""
    for name, value in values.items():
        if not 1e-18 <= value <= 1e18:
            raise ConfigError(f"{name} must be from 1e-18 to 1e18, got {value}")


def check_shares(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name} must be in [0, 1), got {value}")
