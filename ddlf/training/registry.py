"""Finds strategies and exchanges by name, and makes a ``RunSpec`` from an app. Runs everywhere; imports no heavy
modules.

An app can name groups: ``mode = ddlf.Downpour(replicas=16, fetch=2)``. Or it can name each setting, like options,
``run:`` and ``-p`` do: ``mode = "downpour"; replicas = 16; n_fetch = 2``. ``spec_of`` makes a ``RunSpec`` from both.

Strategies and exchanges are found by the names of their classes. Nothing else names them, so a package from outside
brings one in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
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
}
"""The strategies of this package. Other packages register theirs in the entry point group ``ddlf.strategies``."""
EXCHANGES: Mapping[str, type[ExchangeSettings]] = {
    "star": resolve_name("ddlf.training.exchanges.star.settings:Star"),
    "sharded": resolve_name("ddlf.training.exchanges.sharded.settings:Sharded"),
    "auto": resolve_name("ddlf.training.exchanges.auto.settings:Auto"),
    "gradient": resolve_name("ddlf.training.exchanges.gradient.settings:Gradient"),
}
"""The exchanges of this package. Other packages register theirs in the entry point group ``ddlf.exchanges``."""

Kind = TypeVar("Kind", bound=Group)


def _installed(group: str, own: Mapping[str, type[Kind]]) -> Mapping[str, type[Kind]]:
    return {**{entry.name: entry.load() for entry in entry_points(group=group)}, **own}


@cache
def strategies() -> Mapping[str, type[StrategySettings]]:
    """Return the strategies of this package and of other installed packages, by name."""
    return _installed("ddlf.strategies", STRATEGIES)


@cache
def exchanges() -> Mapping[str, type[ExchangeSettings]]:
    """Return the exchanges of this package and of other installed packages, by name."""
    return _installed("ddlf.exchanges", EXCHANGES)


class KindOf(Generic[Kind]):
    """A check for a group, its name, or a text such as ``downpour:replicas=16``; it returns the name."""

    def __init__(self, kinds: Callable[[], Mapping[str, type[Kind]]], own: Mapping[str, type[Kind]]) -> None:
        self._kinds, self._own = kinds, own

    def __call__(self, name: str, value: Any) -> str:
        if isinstance(value, Group) and value.name:
            return value.name
        text = value.partition(":")[0] if isinstance(value, str) else value
        return text if text in self._own else OneOf(*self._kinds())(name, text)

    def kind(self, name: str) -> type[Kind]:
        """Return the class of a name that the check has returned. Other packages are loaded only for their names."""
        return self._own[name] if name in self._own else self._kinds()[name]

    def group(self, name: str, text: str) -> Kind | None:
        """Return the group in a text with settings; None if the text is only a name."""
        kind, colon, rest = text.partition(":")
        return self.kind(self(name, kind)).of_text(rest) if colon else None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kinds of this package."""
        return tuple(self._own)

    def __str__(self) -> str:
        return str(OneOf(*self._own))


MODE = KindOf(strategies, STRATEGIES)
EXCHANGE = KindOf(exchanges, EXCHANGES)

_MODE: Setting[str, str] = Setting(
    "sync",
    MODE,
    "how updates are applied: once per round (sync), on arrival (async), or as gradients pushed to servers on the workers (downpour)",
    "MODE",
    FILE | FACT,
    flat="mode",
)
"""What ``train_model`` and ``ddlf run`` do. Settings of the mode can follow: ``downpour:replicas=16,fetch=2``."""

_EXCHANGE: Setting[str, str] = Setting(
    "star",
    EXCHANGE,
    "how workers exchange results: updates through the master (star), updates merged in slices on the workers (sharded), "
    "the faster of these two (auto), or one gradient per batch (gradient)",
    "EXCHANGE",
    FILE | FACT,
    flat="exchange",
)
"""With ``sharded`` each worker merges one slice of all updates and sends it to the other workers. The result has the
same bits as with ``star``, but no data of the size of the model passes through the master in a round; the master
receives the model for checkpoints and after the last round. ``auto`` chooses one of the two by the amount of data
that a round moves, and says why. With ``gradient`` the master averages the gradients over the samples and takes one
step with the model's own optimizer, as one process with K times the batch size would. Each step costs an exchange,
which local training avoids."""
_EXCHANGE.strategies = ("sync",)

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
_TEXTS: Mapping[str, KindOf[Any]] = {"mode": MODE, "exchange": EXCHANGE}


KINDS_OF_GROUPS: tuple[type[Group], ...] = (
    *(RunSpec, Data, Local, ExchangeSettings),
    *STRATEGIES.values(),
    *(Evaluation, Checkpoint, Output),
)


def _settings() -> dict[str, Setting[Any, Any]]:
    """Return every setting by the name of the app's attribute, and note which strategies have it."""
    table: dict[str, Setting[Any, Any]] = {"mode": _MODE, "exchange": _EXCHANGE}
    for kind in KINDS_OF_GROUPS:
        for one in kind.settings():
            known = table.setdefault(one.name, one)
            if issubclass(kind, StrategySettings):
                known.strategies = (*known.strategies, kind.name)
    return table


SETTINGS: Mapping[str, Setting[Any, Any]] = _settings()
"""Each setting by the name of the app's attribute, in the order of all lists."""
DEFAULTS: Mapping[str, Any] = {name: one.default for name, one in SETTINGS.items()}


def option(name: str) -> str:
    """Return the command line form of a setting or another option."""
    other = SETTINGS[name].option if name in SETTINGS else ""
    return f"--{(other or name).replace('_', '-')}"


def group_of(name: str, value: object) -> Group | None:
    """Return the group that an app's attribute is set to; None for any other value.

    Args:
        name: The name of the attribute.
        value: A group; or its text, for ``mode`` and ``exchange``.

    Raises:
        ConfigError: The text cannot be read, or the group belongs to another attribute.
    """
    if name in _TEXTS and isinstance(value, str):
        return _TEXTS[name].group(name, value)
    kind = value if isinstance(value, type) else type(value)
    belongs = next((attribute for attribute, accepted in GROUPS.items() if issubclass(kind, accepted)), None)
    if belongs is None:
        return None
    if isinstance(value, Group) and name in GROUPS and isinstance(value, GROUPS[name]):
        return value
    given = f"ddlf.{kind.__name__}" + ("(...)" if isinstance(value, Group) else "")
    raise ConfigError(f"{name} cannot be {given}", hint=f"write {belongs} = ddlf.{kind.__name__}(...)")


class View:
    """A descriptor: an app's attribute that returns a group with the app's settings, and accepts one."""

    def __init__(self, kind: type[Group]) -> None:
        self._kind = kind

    def __get__(self, app: object, owner: type) -> Any:
        where = owner if app is None else app
        return self._kind.of_flat({one.name: getattr(where, one.name, one.default) for one in self._kind.settings()})


def spread(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Replace groups by the settings that the user gave in them.

    Args:
        values: Values by the names of an app's attributes, including groups and texts of groups.
        where: The place of these values, for the error.

    Returns:
        The values, with each group replaced by its given settings.

    Raises:
        ConfigError: A group and another value contradict each other.
    """
    groups = {name: group for name, value in values.items() if (group := group_of(name, value)) is not None}
    found = {name: value for name, value in values.items() if name not in groups}
    for name, group in groups.items():
        said = group.given()
        if group.name:
            said["mode" if isinstance(group, StrategySettings) else "exchange"] = group.name
        for key, value in said.items():
            if key in found and (SETTINGS[key].check(key, found[key]) if key in SETTINGS else found[key]) != value:
                raise ConfigError(
                    f"{key}={found[key]!r} and {name}={group} contradict each other{f' in {where}' if where else ''}",
                    hint=f"leave {key} out of one of them",
                )
            found[key] = value
    return found


class Configured(Protocol):
    """An object with settings as attributes: an app."""

    mode: Any


def spec_of(app: Configured, mode: str | None = None, given: Mapping[str, Any] | None = None) -> RunSpec:
    """Return the spec of a run from an app's settings.

    Args:
        app: Has the settings as attributes.
        mode: The name of the strategy; by default the app's ``mode``.
        given: Settings that override the attributes, by name; None overrides nothing.

    Raises:
        ConfigError: A value is invalid, or has no effect with the strategy.
    """
    given = given or {}
    mode = MODE("mode", mode or app.mode)
    kind = MODE.kind(mode)
    chosen_exchange = given.get("exchange") or getattr(app, "exchange", EXCHANGE.names[0])
    exchange = EXCHANGE.kind(EXCHANGE("exchange", chosen_exchange))
    own = {one.name: one for one in (*exchange.settings(), *kind.settings())}
    values: dict[str, Any] = {}
    for name, setting in {**SETTINGS, **own}.items():
        chosen = given.get(name)
        value = getattr(app, name, setting.default) if chosen is None else chosen
        if name == "worker_epochs" and chosen is None and _rounds_are_of_another_mode(app, kind):
            value = setting.default
        usual = setting.default
        if value is None and usual is None and setting.value is not None:
            value = own.get(name, setting).value  # each strategy has its own default
        values[name] = setting.check(name, value)
        if not setting.used_by(mode) and value != usual and values[name] != setting.check(name, setting.value):
            raise _unused(name, value, usual, kind, setting.strategies)
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
                    f"{other}={given.get(other) or getattr(app, other)!r} has no effect with {name}={str(rule)!r}",
                    hint=f"leave {other} out, or choose another {name}",
                )
    if exchange.one_step and values["worker_steps"] is None:
        values["worker_steps"] = 1
    return RunSpec(
        train=kind.of_flat(values),
        data=Data.of_flat(values),
        exchange=exchange.of_flat(values),
        local=Local.of_flat(values),
        evaluation=Evaluation.of_flat(values),
        checkpoint=Checkpoint.of_flat(values),
        output=Output.of_flat(values),
        **{one.field: values[one.name] for one in RunSpec.settings()},
    )


def _rounds_are_of_another_mode(app: Configured, kind: type[StrategySettings]) -> bool:
    """Return whether a class set ``worker_epochs`` for its usual mode, and now trains in a mode that ignores it."""
    return (
        "worker_epochs" in kind.unused
        and getattr(type(app), "mode", kind.name) != kind.name
        and "worker_epochs" not in vars(app)
    )


def _unused(name: str, value: Any, usual: Any, kind: type[StrategySettings], others: Sequence[str]) -> ConfigError:
    words = " and ".join(STRATEGIES[other].words for other in others)
    return ConfigError(
        f"{name}={value!r} is for {words} training: {kind.words} training does not use it",
        hint=f"leave {name} at {usual!r}, or train in mode {' or '.join(map(repr, others))}",
    )


def flat(spec: RunSpec) -> dict[str, Any]:
    """Return every setting by the name of the app's attribute, with defaults for settings of other strategies."""
    values = {"mode": spec.train.name, "exchange": spec.exchange.name}
    for group in spec.groups:
        values.update(group.flat())
    return {name: one.check(name, one.value) for name, one in SETTINGS.items() if name not in values} | values
