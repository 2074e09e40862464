"""The setting ``split``: how a model is cut. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from ddlf.errors import ConfigError
from ddlf.settings.checks import count_of_bytes

ROWS, FILTERS = "rows", "filters"
"""How a convolution is cut: by rows of its images, or by filters."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How a model is cut. Exactly one of the first three fields has a value.

    Args:
        parts: The number of stages; 0 if another field decides it.
        nbytes: The memory of each part in bytes.
        layers: Names of the first layers of the second and later stages.
        within: The number of workers of each stage, between which its layers are cut.
        images: How convolutions are cut between these: ``ROWS``, ``FILTERS``, or "" for the way with fewer bytes.
        text: The text of the setting.
    """

    parts: int = 0
    nbytes: int = 0
    layers: tuple[str, ...] = ()
    within: int = 1
    images: str = ""
    text: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def least(self) -> int:
        """The smallest number of parts, and so of workers, that is known without the model.

        Names of layers are compared with the model first.
        """
        return (self.parts or 1) * self.within


class CutOf:
    """The check of the setting ``split``. None means that the model is not cut."""

    def __call__(self, name: str, value: Any) -> Cut | None:
        if value is None or isinstance(value, Cut):
            return value
        kind, colon, arguments = value.partition(":") if isinstance(value, str) else ("", "", "")
        if not colon:
            raise ConfigError(f"{name} must be {self}, got {value!r}")
        if kind == "stages":
            return self._stages(name, value, arguments)
        if kind == "memory":
            return Cut(nbytes=self._nbytes(name, value, arguments), text=value)
        if kind == "layers":
            return self._layers(name, value, arguments)
        if kind == "within":
            return self._within(name, value, arguments, 1)
        raise ConfigError(f"{name} must be {self}, got {value!r}")

    def _stages(self, name: str, value: str, arguments: str) -> Cut:
        stages, comma, suffix = arguments.partition(",")
        parts = self._number(name, value, stages, "stages stages:2")
        if not comma:
            return Cut(parts=parts, text=f"stages:{parts}")
        kind, _, workers = suffix.strip().partition(":")
        if kind == "images":
            raise ConfigError(
                f"{name}={value!r} says how workers cut convolutions, but without within they cut no layers",
                hint=f"write stages:{parts},within:2,{suffix.strip()}, or leave out {suffix.strip()}",
            )
        if kind != "within":
            raise ConfigError(f"{name} must be {self}, got {value!r}")
        return self._within(name, value, workers, parts)

    def _within(self, name: str, value: str, arguments: str, parts: int) -> Cut:
        number, comma, suffix = arguments.partition(",")
        within = self._number(name, value, number, f"workers {'stages:2,' * (parts > 1)}within:3")
        kind, _, images = suffix.strip().partition(":")
        if comma and (kind != "images" or images not in (ROWS, FILTERS)):
            raise ConfigError(
                f"{name}={value!r} has an unknown end {suffix.strip()!r}",
                hint=f"write images:{ROWS} or images:{FILTERS}, which say how convolutions are cut, or leave it out",
            )
        text = f"{f'stages:{parts},' * (parts > 1)}within:{within}" + f",images:{images}" * bool(comma)
        return Cut(parts=parts, within=within, images=images, text=text)

    def _number(self, name: str, value: str, text: str, words: str) -> int:
        """Return a number of 1 or more. ``words`` is the name of the counted things, and an example."""
        counted, example = words.split()
        if not text.isdecimal() or int(text) < 1:
            raise ConfigError(f"{name}={value!r} needs a number of {counted} of 1 or more", hint=f"write {example}")
        return int(text)

    def _nbytes(self, name: str, value: str, text: str) -> int:
        """Return a size in bytes."""
        with contextlib.suppress(ConfigError):  # its sentence says that the whole setting is a size
            if nbytes := count_of_bytes(name, text):
                return nbytes
        raise ConfigError(f"{name}={value!r} needs the memory of a part", hint="write memory:2GB")

    def _layers(self, name: str, value: str, arguments: str) -> Cut:
        layers = tuple(layer.strip() for layer in arguments.split(","))
        if not all(layers):
            raise ConfigError(f"{name}={value!r} names no layer", hint="write layers:NAME,NAME")
        if repeated := [layer for layer in layers if layers.count(layer) > 1]:
            raise ConfigError(f"{name}={value!r} names the layer {repeated[0]!r} twice", hint="name it once")
        return Cut(layers=layers, text=f"layers:{','.join(layers)}")

    def __str__(self) -> str:
        return "`stages:2`, `within:2`, `stages:2,within:2`, `within:2,images:rows`, `memory:2GB`, `layers:NAME,NAME`, or None"


CUT = CutOf()
