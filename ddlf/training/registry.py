"""Finds strategies and exchanges by name, and makes a ``RunSpec`` from an app. Runs everywhere; imports no heavy
modules.

An app can name groups: ``mode = ddlf.Downpour(replicas=16, fetch=2)``. Or it can name each setting, like options,
``run:`` and ``-p`` do: ``mode = "downpour"; replicas = 16; n_fetch = 2``. ``spec_of`` makes a ``RunSpec`` from both.

Strategies and exchanges are found by the names of their classes. Nothing else names them, so a package from outside
brings one in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, Generic, Protocol, TypeVar

from ddlf.errors import ConfigError
from ddlf.settings.checks import OneOf
from ddlf.settings.setting import FACT, FILE, Group, Setting
from ddlf.training.spec import (
    Checkpoint,
    Data,
    Evaluation,
    ExchangeSettings,
    Local,
    Output,
    RunSpec,
    StrategySettings,
)

STRATEGIES: Mapping[str, type[StrategySettings]] = {
    "sync": resolve_name("ddlf.training.strategies.sync.settings:Sync"),
    "async": resolve_name("ddlf.training.strategies.asynchronous.settings:Async"),
    "downpour": resolve_name("ddlf.training.strategies.downpour.strategy:Downpour"),
    "lbfgs": resolve_name("ddlf.training.strategies.lbfgs.settings:LBFGS"),
}
"""The strategies of this package. Other packages register theirs in the entry point group ``ddlf.strategies``."""
EXCHANGES: Mapping[str, type[ExchangeSettings]] = {
    "star": resolve_name("ddlf.training.exchanges.star:Star"),
    "sharded": resolve_name("ddlf.training.exchanges.sharded.settings:Sharded"),
    "auto": resolve_name("ddlf.training.exchanges.sharded.auto:Auto"),
    "gradient": resolve_name("ddlf.training.exchanges.gradient.settings:Gradient"),
    "split": resolve_name("ddlf.training.exchanges.split.settings:Split"),
}
"""The exchanges of this package. Other packages register theirs in the entry point group ``ddlf.exchanges``."""

Kind = TypeVar("Kind", bound=Group)


@cache
def outside(group: str) -> Mapping[str, EntryPoint]:
    """Return the classes that other packages register in an entry point group, by name, without importing them."""
    return {entry.name: entry for entry in entry_points(group=group)}


class KindOf(Generic[Kind]):
    """The check of a setting that selects a class, such as ``mode`` and ``exchange``.

    The value may be a group of settings, its name, or a text such as ``downpour:replicas=16``. The check returns the
    name.

    Args:
        setting: The setting whose value is checked, for errors.
        entries: The entry point group in which other packages register their classes. A class of another package is
            imported only when its name is used.
        base: The class that all classes derive from.
        builtin: DDLF's own classes by name.
    """

    def __init__(self, setting: str, entries: str, base: type[Kind], builtin: Mapping[str, type[Kind]]) -> None:
        self.setting = setting
        self._entries, self._base, self._builtin = entries, base, builtin

    def __call__(self, name: str, value: Any) -> str:
        if isinstance(value, Group) and value.name:
            return value.name
        text = value.partition(":")[0] if isinstance(value, str) else value
        return text if text in self._builtin else OneOf(*self.names)(name, text)

    def kind(self, name: str) -> type[Kind]:
        """Return the strategy or exchange class with a name that the check has returned.

        Raises:
            ConfigError: The package that registers the name cannot be imported, or the class is of another kind.
        """
        if name in self._builtin:
            return self._builtin[name]
        entry = outside(self._entries)[name]
        package = entry.dist.name if entry.dist is not None else entry.value
        try:
            kind: type[Kind] = entry.load()
        except Exception as error:
            raise ConfigError(
                f"{name!r} of the package {package} cannot be imported: {type(error).__name__}: {error}",
                hint=f"repair or uninstall {package}",
            ) from error
        if isinstance(kind, type) and issubclass(kind, self._base):
            return kind
        raise ConfigError(
            f"{name!r} of the package {package} is {entry.value}, which is not a subclass of {self._base.__name__}",
            hint=f"derive it from Strategy or Exchange in ddlf.training.strategy, or uninstall {package}",
        )

    def find(self, name: Any) -> type[Kind] | None:
        """Return the class with this name, or None if there is none."""
        return self.kind(name) if name in self._builtin or name in outside(self._entries) else None

    def group(self, name: str, text: str) -> Kind | None:
        """Return the group of settings that a text describes.

        Return None if the text is only a name, and the attribute itself has the setting.
        """
        kind, colon, rest = text.partition(":")
        if colon:
            return self.kind(self(name, kind)).of_text(rest)
        return None if name == self.setting else self.kind(self(name, kind))()

    @property
    def more(self) -> tuple[str, ...]:
        """The names that other packages have registered for the setting."""
        return tuple(name for name in outside(self._entries) if name not in self._builtin)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all classes that the setting can select."""
        return (*self._builtin, *self.more)

    def about(self) -> str:
        """Return the descriptions and names of DDLF's own classes, for the help of the setting."""
        *parts, last = (f"{getattr(kind, 'about', '')} ({name})" for name, kind in self._builtin.items())
        return f"{', '.join(parts)}, or {last}"

    def __str__(self) -> str:
        return str(OneOf(*self._builtin))


MODE = KindOf("mode", "ddlf.strategies", StrategySettings, STRATEGIES)
EXCHANGE = KindOf("exchange", "ddlf.exchanges", ExchangeSettings, EXCHANGES)

_MODE: Setting[str, str] = Setting(
    "sync",
    MODE,
    f"how updates are applied: {MODE.about()}",
    "MODE",
    FILE | FACT,
    flat="mode",
)
"""The strategy that ``train_model`` and ``ddlf run`` use. Settings of the mode can follow:
``downpour:replicas=16,fetch=2``."""

_EXCHANGE: Setting[str, str] = Setting(
    "star",
    EXCHANGE,
    f"how workers exchange results: {EXCHANGE.about()}",
    "EXCHANGE",
    FILE | FACT,
    flat="exchange",
)
"""All but ``star`` are for synchronous training. A value of ``split`` selects ``split``."""

GROUPS: dict[str, type[Group]] = {
    "mode": StrategySettings,
    "data": Data,
    "local": Local,
    "exchange": ExchangeSettings,
    "train": StrategySettings,
    "evaluation": Evaluation,
    "checkpoint": Checkpoint,
    "output": Output,
}
"""The app's attributes that accept groups. ``train`` is the same as ``mode``, and also a method."""
_TEXTS: Mapping[str, KindOf[Any]] = {"mode": MODE, "exchange": EXCHANGE, "train": MODE}


KINDS_OF_GROUPS: tuple[type[Group], ...] = (
    *(RunSpec, Data, Local, ExchangeSettings),
    *STRATEGIES.values(),
    *EXCHANGES.values(),
    *(Evaluation, Checkpoint, Output),
)


def _settings() -> dict[str, Setting[Any, Any]]:
    """Return all settings by the names of the app's attributes. Also note in each which strategies or exchanges have it."""
    table: dict[str, Setting[Any, Any]] = {"mode": _MODE, "exchange": _EXCHANGE}
    shared = {declared.name for declared in ExchangeSettings.settings()}
    for kind in KINDS_OF_GROUPS:
        for declared in kind.settings():
            setting = table.setdefault(declared.name, declared)
            if issubclass(kind, StrategySettings):
                setting.strategies = (*setting.strategies, kind.name)
            if issubclass(kind, ExchangeSettings) and declared.name not in shared:
                setting.exchanges = (*setting.exchanges, kind.name)
    return table


SETTINGS: Mapping[str, Setting[Any, Any]] = _settings()
"""Each setting by the name of the app's attribute, in the order of all lists."""
DEFAULTS: Mapping[str, Any] = {name: setting.default for name, setting in SETTINGS.items()}


def titles() -> dict[str, tuple[str, ...]]:
    """Return the names of all settings in each group. A group's name is an attribute of the app or a strategy.

    A setting of several strategies is in the group of the first one. A strategy without other settings has no group.
    """
    attributes = {kind: name for name, kind in reversed(GROUPS.items())}
    table: dict[str, list[str]] = {"run": ["mode"]}
    listed = {"mode", "exchange"}
    for kind in KINDS_OF_GROUPS:
        title = attributes.get(kind) or kind.name or "run"
        names = table.setdefault(title, ["exchange"] if kind is ExchangeSettings else [])
        names += [setting.name for setting in kind.settings() if setting.name not in listed]
        listed.update(names)
    return {title: tuple(names) for title, names in table.items() if names}


def settings_with(mode: Any, exchange: Any) -> Mapping[str, Setting[Any, Any]]:
    """Return all settings by the names of the app's attributes.

    Include the settings of a strategy or exchange of another package, if the run uses it.

    Args:
        mode: The value of the setting ``mode``. An invalid one adds no settings.
        exchange: The value of the setting ``exchange``, likewise.
    """
    kind_settings: dict[str, Setting[Any, Any]] = {}
    for kinds, value in ((EXCHANGE, exchange), (MODE, mode)):
        with suppress(ConfigError):  # the check of the run raises the error
            kind_settings |= {setting.name: setting for setting in kinds.kind(kinds(kinds.setting, value)).settings()}
    return {**SETTINGS, **{name: setting for name, setting in kind_settings.items() if name not in SETTINGS}}


def option(name: str) -> str:
    """Return the command line form of a setting or another option, such as ``--batch-size``."""
    other = SETTINGS[name].option if name in SETTINGS else ""
    return f"--{(other or name).replace('_', '-')}"


def group_of(name: str, value: object) -> Group | None:
    """Return the group of settings that an app's attribute is set to; None for any other value.

    Args:
        name: The name of the attribute.
        value: A group; the class of one with default settings; or its text, for ``mode``, ``exchange`` and ``train``.

    Raises:
        ConfigError: The text cannot be read, or the group belongs to another attribute.
    """
    if name in _TEXTS and isinstance(value, str):
        return _TEXTS[name].group(name, value)
    kind = value if isinstance(value, type) else type(value)
    belongs = next((attribute for attribute, accepted in GROUPS.items() if issubclass(kind, accepted)), None)
    if belongs is None:
        return None
    if name in GROUPS and issubclass(kind, GROUPS[name]):
        return value if isinstance(value, Group) else kind()
    written = f"ddlf.{kind.__name__}" + ("(...)" if isinstance(value, Group) else "")
    raise ConfigError(f"{name} cannot be {written}", hint=f"write {belongs} = ddlf.{kind.__name__}(...)")


class View:
    """A descriptor for an app's attribute that can be read and set as a whole group of settings."""

    def __init__(self, kind: type[Group]) -> None:
        self._kind = kind

    def __get__(self, app: object, owner: type) -> Any:
        holder = owner if app is None else app
        return self._kind.of_flat(
            {setting.name: getattr(holder, setting.name, setting.default) for setting in self._kind.settings()}
        )


def spread(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Replace groups of settings by the settings that the user gave in them.

    Args:
        values: Values by the names of an app's attributes, including groups and texts of groups.
        where: The place of these values, for the error.

    Returns:
        The values, with each group replaced by its given settings.

    Raises:
        ConfigError: A group and another value contradict each other.
    """
    groups = {name: group for name, value in values.items() if (group := group_of(name, value)) is not None}
    flattened = {name: value for name, value in values.items() if name not in groups}
    for name, group in groups.items():
        group_values = group.chosen_values()
        if group.name:
            group_values["mode" if isinstance(group, StrategySettings) else "exchange"] = group.name
        settings = {**SETTINGS, **{setting.name: setting for setting in group.settings()}}
        for key, value in group_values.items():
            if key in flattened and settings[key].check(key, flattened[key]) != value:
                text = repr(value if isinstance(value, str | int | float | None) else str(value))
                raise ConfigError(
                    f"{key}={flattened[key]!r}, but {name} has {key}={text}{f' in {where}' if where else ''}",
                    hint="leave out one of the two",
                )
            flattened[key] = value
    return flattened


class Configured(Protocol):
    """An object with settings as attributes, such as an app."""

    mode: Any


def spec_of(app: Configured, mode: str | None = None, overrides: Mapping[str, Any] | None = None) -> RunSpec:
    """Return all settings of a run, as one ``RunSpec``, from an app's attributes.

    Args:
        app: Has the settings as attributes.
        mode: The name of the strategy; by default the app's ``mode``.
        overrides: Settings that override the attributes, by name; None overrides nothing.

    Raises:
        ConfigError: A value is invalid, or has no effect with the strategy.
    """
    overrides = overrides or {}
    mode = MODE("mode", mode or app.mode)
    kind = MODE.kind(mode)
    exchange = _exchange_of(app, overrides)
    if exchange.strategies and mode not in exchange.strategies:
        by = exchange.chosen_by
        chosen = overrides.get(by) or getattr(app, by, None) if by else None
        name, value = ("exchange", exchange.name) if chosen is None else (by, chosen)
        raise _unused(name, value, DEFAULTS[name], kind, exchange.strategies)
    own_settings = {setting.name: setting for setting in (*exchange.settings(), *kind.settings())}
    values: dict[str, Any] = {}
    for name, setting in {**SETTINGS, **own_settings}.items():
        chosen = overrides.get(name)
        value = getattr(app, name, setting.default) if chosen is None else chosen
        if name in OF_A_CLASS and chosen is None and _is_of_another_mode(app, name, kind):
            value = setting.default
        usual = setting.default
        if value is None and usual is None and setting.value is not None:
            value = own_settings.get(name, setting).value  # each strategy has its own default
        values[name] = setting.check(name, value)
        if not setting.used_by(mode) and value != usual and values[name] != setting.check(name, setting.value):
            raise _unused(name, value, usual, kind, setting.strategies)
        if setting.exchanges and exchange.name not in setting.exchanges and value != usual:
            exchanges = " or ".join(map(repr, setting.exchanges))
            text = value if isinstance(value, int) else repr(str(value))
            raise ConfigError(
                f"{name}={text} is for exchange={exchanges}, and exchange={exchange.name!r} does not use it",
                hint=f"leave {name} at {usual!r}, or use exchange={exchanges}",
            )
    values["mode"] = mode
    for name, rule in values.items():
        only = getattr(rule, "only", mode)
        if only != mode:
            raise ConfigError(
                f"{name}={str(rule)!r} is for {MODE.kind(only).words} training: {kind.words} training has no such setting",
                hint=f"choose another {name}, or train in mode {only!r}",
            )
        for other in getattr(rule, "ignores", ()):
            if values[other] != SETTINGS[other].check(other, SETTINGS[other].value):
                raise ConfigError(
                    f"{other}={overrides.get(other) or getattr(app, other)!r} has no effect with {name}={str(rule)!r}",
                    hint=f"leave {other} out, or choose another {name}",
                )
    if exchange.one_step and values["worker_steps"] is None:
        values["worker_steps"] = 1
    data = Data.of_flat(values)
    return RunSpec(
        train=kind.of_flat(values),
        data=data,
        exchange=exchange.of_flat(values).for_data(data),
        local=Local.of_flat(values),
        evaluation=Evaluation.of_flat(values),
        checkpoint=Checkpoint.of_flat(values),
        output=Output.of_flat(values),
        **{setting.field: values[setting.name] for setting in RunSpec.settings()},
    )


def _exchange_of(app: Configured, overrides: Mapping[str, Any]) -> type[ExchangeSettings]:
    """Return the class of a run's exchange: the one that the user named, or the one that another setting selects."""
    chosen = EXCHANGE("exchange", overrides.get("exchange") or getattr(app, "exchange", DEFAULTS["exchange"]))
    for kind in EXCHANGES.values() if chosen == DEFAULTS["exchange"] else ():
        by = kind.chosen_by
        value = (overrides.get(by) or getattr(app, by, None)) if by else None
        if value is None:
            continue
        if overrides.get("exchange") is not None or "exchange" in vars(app):
            raise ConfigError(
                f"exchange={chosen!r} does not go with {by}={str(value)!r}, which selects exchange={kind.name!r}",
                hint=f"leave out exchange or {by}",
            )
        return kind
    return EXCHANGE.kind(chosen)


OF_A_CLASS = ("worker_epochs", "batch_size")
"""Settings that nearly every class of an app has, so that another mode, which does not use them, ignores them there."""


def _is_of_another_mode(app: Configured, name: str, kind: type[StrategySettings]) -> bool:
    """Return whether an app's setting was meant for the mode of its class, but this run's mode ignores it."""
    return name in kind.unused and getattr(type(app), "mode", kind.name) != kind.name and name not in vars(app)


def _unused(name: str, value: Any, usual: Any, kind: type[StrategySettings], modes: Sequence[str]) -> ConfigError:
    words = " and ".join(STRATEGIES[mode].words for mode in modes)
    return ConfigError(
        f"{name}={value!r} is for {words} training: {kind.words} training does not use it",
        hint=f"leave {name} at {usual!r}, or train in mode {' or '.join(map(repr, modes))}",
    )


def flat(spec: RunSpec) -> dict[str, Any]:
    """Return the value of every setting by the name of the app's attribute.

    Settings of other strategies have their defaults.
    """
    values = {"mode": spec.train.name, "exchange": spec.exchange.name}
    for group in spec.groups:
        values.update(group.flat())
    return {
        name: setting.check(name, setting.value) for name, setting in SETTINGS.items() if name not in values
    } | values
