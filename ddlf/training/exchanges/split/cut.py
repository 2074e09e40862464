"""The setting ``split``: how a model is cut. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ddlf.errors import ConfigError
from ddlf.settings.checks import count_of_bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model is cut. Exactly one of the first three fields has a value.

    Args:
        parts: The number of parts; 0 if another field decides it.
        nbytes: The memory of each part in bytes.
        layers: Names of the first layers of the second and later parts.
        text: The text of the setting.
    """

    parts: int = 0
    nbytes: int = 0
    layers: tuple[str, ...] = ()
    text: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def least(self) -> int:
        """The smallest number of parts, and so of workers, that is known without the model.

        Names of layers are compared with the model first.
        """
        return self.parts or 1


class CutOf:
    """The check of the setting ``split``. None means that the model is not cut."""

    def __call__(self, name: str, value: Any) -> Cut | None:
        if value is None or isinstance(value, Cut):
            return value
        kind, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
        if not colon:
            raise ConfigError(f"{name} must be {self}, got {value!r}")
        if kind == "stages":
            return self._stages(name, value, rest)
        if kind == "memory":
            return Cut(nbytes=count_of_bytes(name, rest) or 0, text=value)
        if kind == "layers":
            return self._layers(name, value, rest)
        if kind == "within":
            raise ConfigError(
                f"{name}={value!r} would cut layers themselves, which DDLF cannot do yet",
                hint="use stages:N, which cuts between layers",
            )
        raise ConfigError(f"{name} must be {self}, got {value!r}")

    def _stages(self, name: str, value: str, rest: str) -> Cut:
        if "within" in rest:
            raise ConfigError(
                f"{name}={value!r} would cut layers themselves, which DDLF cannot do yet",
                hint="use stages:N, which cuts between layers",
            )
        if not rest.isdecimal() or int(rest) < 1:
            raise ConfigError(f"{name}={value!r} needs a number of stages of 1 or more", hint="write stages:2")
        return Cut(parts=int(rest), text=f"stages:{int(rest)}")

    def _layers(self, name: str, value: str, rest: str) -> Cut:
        layers = tuple(one.strip() for one in rest.split(","))
        if not all(layers):
            raise ConfigError(f"{name}={value!r} names no layer", hint="write layers:NAME,NAME")
        if twice := [one for one in layers if layers.count(one) > 1]:
            raise ConfigError(f"{name}={value!r} names the layer {twice[0]!r} twice", hint="name it once")
        return Cut(layers=layers, text=f"layers:{','.join(layers)}")

    def __str__(self) -> str:
        return "`stages:2`, `memory:2GB`, `layers:NAME,NAME`, or None"


CUT = CutOf()
