"""Models as Keras serializes them: what is in them, which names follow, where two of them differ. Runs where models are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from ddlf.extras.text.conversion.arguments import Config


def is_model(entry: Config) -> bool:
    """Whether a layer is a model of its own."""
    return isinstance(entry["config"], dict) and "layers" in entry["config"]


def names_within(config: Any) -> Iterator[str]:
    """The name of every layer of a model, and of the models within."""
    for entry in layers_within(config):
        yield str(entry["config"].get("name", entry.get("name")))


def layers_within(config: Any) -> Iterator[Config]:
    """Every layer of a model, and of the models within."""
    if isinstance(config, dict):
        yield from config["layers"] if isinstance(config.get("layers"), list) else ()
        for each in config.values():
            yield from layers_within(each)
    elif isinstance(config, list | tuple):
        for each in config:
            yield from layers_within(each)


def unfree_names(layers: list[tuple[str, str]], taken: set[str], explicit: set[str] | None = None) -> set[str]:
    """The names that ``build`` would not give of its own; layers are in the order of the text, each with its kind."""
    explicit = set(explicit or ())
    while True:
        used, wrong = {*taken, *explicit}, set()
        for name, kind in layers:
            if name in explicit:
                continue
            base = keras.src.utils.naming.to_snake_case(kind)
            free, count = base, 0
            while free in used:
                count += 1
                free = f"{base}_{count}"
            used.add(free)
            if free != name:
                wrong.add(name)
        if not wrong:
            return explicit
        explicit |= wrong


def difference(one: Any, other: Any, path: str = "") -> str:
    """Where two configs differ first."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *other]:
            if one.get(key) != other.get(key):
                at = f" of {one['name']!r}" if isinstance(one.get("name"), str) and not path.endswith(" of ") else ""
                return difference(one.get(key), other.get(key), f"{key}{at}{', ' * bool(path)}{path}")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for before, after in zip(one, other, strict=True):
            if before != after:
                return difference(before, after, path)
    return f"{path} is {str(one)[:80]}, and came back as {str(other)[:80]}"
