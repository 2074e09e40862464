"""The settings of a run as they are used: what is given wins over what the app has; what would have no effect is refused. Runs everywhere."""

from collections.abc import Mapping
from typing import Any

from ddlf.errors import ConfigError
from ddlf.training.settings.checks import LOCAL, check_gradient
from ddlf.training.settings.setting import MODES
from ddlf.training.settings.settings import SETTINGS, Settings


def read(app: Settings, mode: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return every setting as it is used.

    Args:
        app: Has them as attributes.
        mode: ``"sync"`` or ``"async"``.
        given: Those that win over the attributes, by name; None for one that does not.

    Raises:
        ConfigError: A value cannot be, or the mode has no use for what was set.
    """
    values = {}
    for name, setting in SETTINGS.items():
        value = getattr(app, name) if given.get(name) is None else given[name]
        if name == "worker_epochs" and mode == "downpour" and _is_of_another_mode(app) and given.get(name) is None:
            value = Settings.worker_epochs  # how long rounds are changes nothing where nobody waits for their end
        usual = getattr(Settings, name)
        if name == "staleness":
            usual = "inverse" if mode == "downpour" else "constant"
            value = usual if value is None else value
        values[name] = setting.check(name, value)
        if not setting.used_by(mode) and values[name] != setting.check(name, usual):
            others = (setting.only or "").split()
            raise ConfigError(
                f"{name}={value!r} is for {' and '.join(MODES[one] for one in others)} training: {MODES[mode]} training has no use for it",
                hint=f"leave {name} at {usual!r}, or train in mode {' or '.join(map(repr, others))}",
            )
    for name, rule in values.items():
        if getattr(rule, "only", mode) != mode:
            raise ConfigError(
                f"{name}={str(rule)!r} is for {MODES[rule.only]} training: {MODES[mode]} training has nothing like it",
                hint=f"choose another {name}, or train in mode {rule.only!r}",
            )
        for other in getattr(rule, "ignores", ()):
            usual = "constant" if other == "staleness" else getattr(Settings, other)
            if values[other] != SETTINGS[other].check(other, usual):
                raise ConfigError(
                    f"{other}={given.get(other) or getattr(app, other)!r} has no effect with {name}={str(rule)!r}",
                    hint=f"leave {other} out, or choose another {name}",
                )
    if values["exchange"] == "gradient":
        usual = {name: getattr(Settings, name) for name in LOCAL}
        check_gradient(values, {name: (value, SETTINGS[name].check(name, value)) for name, value in usual.items()})
        values["worker_steps"] = 1
    if values["round_samples"] is not None:
        for name in ("worker_epochs", "worker_steps"):
            if values[name] != getattr(Settings, name):
                raise ConfigError(
                    f"round_samples={values['round_samples']} and {name}={values[name]} both say how long a round is",
                    hint=f"leave out one of the two: round_samples=None, or {name}={getattr(Settings, name)}",
                )
    if values["worker_steps"] is not None and values["worker_epochs"] != Settings.worker_epochs:
        raise ConfigError(
            f"worker_steps={values['worker_steps']} and worker_epochs={values['worker_epochs']} both say how long a round is",
            hint=f"leave out one of the two: worker_steps=None, or worker_epochs={Settings.worker_epochs}",
        )
    return {**values, "mode": mode}


def _is_of_another_mode(app: Settings) -> bool:
    """Whether the length of an app's rounds is that of its class, which was written for another mode than it is trained in."""
    return type(app).mode != "downpour" and "worker_epochs" not in vars(app)
