"""A setting of a run, and groups of settings. Runs everywhere; imports no heavy modules.

Each setting is declared once, as a field of a group in ``ddlf.training.spec``. The declaration defines the attribute of
an app with its default, the check, the option of ``ddlf run``, the key in ``run:`` of cluster.yaml and its JSON Schema,
the comparison with a checkpoint, the output of ``ddlf config show``, and docs/reference/settings.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from enum import Flag, auto
from typing import Any, ClassVar, Generic, Self, TypeVar

from ddlf.errors import ConfigError, DDLFError
from ddlf.settings.checks import Number, Whole

Out = TypeVar("Out")
In = TypeVar("In")


class Use(Flag):
    """The places where a setting is used besides a run."""

    FILE = auto()
    """``run:`` of cluster.yaml."""
    FACT = auto()
    """Checkpoints: the setting determines the result, so a run can only continue with the same value."""


FILE, FACT, NOWHERE = Use.FILE, Use.FACT, Use(0)
SYNONYMS: Mapping[str, str] = {
    "epochs": "master_epochs",
    "rounds": "master_epochs",
    "batch": "batch_size",
    "strategy": "mode",
    "compression": "codec",
    "compress": "codec",
}
"""The names of other programs for some settings."""


class Setting(Generic[Out, In]):
    """One setting: a field of a group, which checks its values.

    ``Setting[Out, In]`` accepts an ``In``, such as the text of a rule, and returns an ``Out``, such as the rule.

    Args:
        default: The value if the user gives none.
        check: Receives the setting's name and a value; returns the value as the run uses it, or raises ConfigError.
        help: One line for the command line, the file's schema and the reference.
        flag: Placeholder for the value in ``--help``; "" lists the choices instead; None if there is no such option.
        use: Other places where the setting is used.
        flat: The app's attribute for it, if its name differs from the field.
        option: The name of the option, if it differs from the attribute.
        unset: The default of the attribute, if groups have different defaults.

    Attributes:
        accepts: The argument ``check``.
        name: The name of the app's attribute for it.
        field: The name of the field in its group.
        strategies: The names of the strategies that have it; empty if every run has it.
        exchanges: The names of the exchanges that have it; empty if every exchange has it.
    """

    def __init__(
        self,
        default: In,
        check: Callable[[str, Any], Any],
        help: str,
        flag: str | None = None,
        use: Use = NOWHERE,
        *,
        flat: str = "",
        option: str = "",
        unset: Any = ...,
    ) -> None:
        self.value, self.accepts, self.help, self.flag, self.use, self.option = default, check, help, flag, use, option
        self.default = default if unset is ... else unset
        self.name = flat
        self.field = ""
        self.strategies: tuple[str, ...] = ()
        self.exchanges: tuple[str, ...] = ()

    def __set_name__(self, owner: type, name: str) -> None:
        self.field = name
        self.name = self.name or name

    def __get__(self, group: object, owner: type) -> Out:
        if group is None:  # ``dataclass`` reads the default
            return self.value  # type: ignore[return-value]
        value: Out = vars(group)[self.field]
        return value

    def __set__(self, group: object, value: In) -> None:
        vars(group)[self.field] = self.check(self.field, value)

    def check(self, name: str, value: Any) -> Any:
        """Return a value of the setting in the form that the run uses, or raise an error.

        Args:
            name: The name of the setting, for the error.
            value: A value that the user gave.

        Raises:
            ConfigError: The value is wrong. It replaces other errors in checks of other packages.
        """
        try:
            return self.accepts(name, value)
        except (TypeError, ValueError) as error:
            if isinstance(error, DDLFError):
                raise
            raise ConfigError(f"{name} cannot be {value!r}: {error}") from error

    def used_by(self, mode: str | None) -> bool:
        """Return whether training in a mode (such as ``"sync"``) has this setting."""
        return not self.strategies or mode in self.strategies

    def read(self, text: str) -> Any:
        """Return the value that a piece of a group's text gives this setting. The check runs later."""
        if text in ("none", "None") and isinstance(self.accepts, Whole):
            return None
        try:
            return (
                int(text)
                if isinstance(self.accepts, Whole)
                else float(text)
                if isinstance(self.accepts, Number)
                else text
            )
        except ValueError:
            return text  # the check will raise the error


class Group:
    """A frozen dataclass of related ``Setting`` fields. It remembers which of them the user gave.

    Attributes:
        name: Its name in texts; "" if no text can name it.
    """

    name: ClassVar[str] = ""
    _chosen_fields: frozenset[str]

    def __new__(cls, *values: Any, **named: Any) -> Self:
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        for name in named.keys() - set(names):
            raise cls._unknown(name, names)
        group = super().__new__(cls)
        vars(group)["_chosen_fields"] = frozenset((*names[: len(values)], *named))
        return group

    @classmethod
    def _unknown(cls, name: str, fields: Iterable[str]) -> ConfigError:
        # The flat name of a field may be written, such as n_fetch for fetch.
        flat = next((setting.field for setting in cls.settings() if setting.name == name), "")
        matches = [flat] if flat else get_close_matches(name, fields, 1)
        guess = f"; did you mean {matches[0]!r}?" if matches else ""
        return ConfigError(
            f"{cls.name or cls.__name__} has no setting {name!r}{guess}", hint=f"it has {', '.join(fields)}"
        )

    @classmethod
    @functools.cache  # a run asks for the settings of each group dozens of times
    def settings(cls) -> tuple[Setting[Any, Any], ...]:
        """Return the settings of the group, in the order of the fields."""
        return tuple(
            declarations[0]
            for field in fields(cls)  # type: ignore[arg-type]
            if (
                declarations := [
                    vars(part)[field.name] for part in cls.__mro__ if isinstance(vars(part).get(field.name), Setting)
                ]
            )
        )

    def chosen_values(self) -> dict[str, Any]:
        """Return the values of the settings that the user gave, by the names of the app's attributes."""
        return {
            setting.name: getattr(self, setting.field)
            for setting in self.settings()
            if setting.field in self._chosen_fields
        }

    def flat(self) -> dict[str, Any]:
        """Return the value of each setting of the group, by the name of the app's attribute."""
        return {setting.name: getattr(self, setting.field) for setting in self.settings()}

    @classmethod
    def of_flat(cls, values: Mapping[str, Any]) -> Self:
        """Return a group whose settings have these values, given by the names of the app's attributes."""
        return cls(**{setting.field: values[setting.name] for setting in cls.settings()})

    @classmethod
    def of_text(cls, text: str) -> Self:
        """Return the group that a text of the form ``field=value,field=value`` describes.

        Values without a field's name belong to the first fields, in order. A value may contain commas:
        ``outer=diloco:lr=0.7,momentum=0.9``.

        Raises:
            ConfigError: The group has no such field, or a value is invalid.
        """
        settings = {setting.field: setting for setting in cls.settings()}
        values: dict[str, str] = {}
        last = ""
        if not text.strip():
            raise ConfigError(f"{cls.name}: has no setting after the colon", hint="leave out the colon")
        if not all(part.strip() for part in text.split(",")):
            raise ConfigError(f"{cls.name}:{text} has nothing between two commas", hint="leave out a comma")
        for position, part in enumerate(text.split(",")):
            field, equals, value = (piece.strip() for piece in part.partition("="))
            if equals and field in settings:
                if field in values:
                    raise ConfigError(f"{cls.name}: {field} is given twice", hint="leave out one of both")
                values[field], last = value, field
            elif ":" in values.get(last, ""):
                values[last] += f",{part}"  # a parameter of the previous rule
            elif not equals and position < len(settings) and not values.keys() - list(settings)[:position]:
                last = list(settings)[position]
                values[last] = field
            else:
                raise cls._unknown(field, settings)
        return cls(**{field: settings[field].read(value) for field, value in values.items()})
