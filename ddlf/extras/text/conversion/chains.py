"""Layers of a functional model's config as chains: each reads the one before, and is cut where something else reads it, too. Pure.

A tensor is known by its layer, the number of the layer's call, and its own number among those that the call gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, int, int]


@dataclass(slots=True)
class Unit:
    """A call of a layer, an input, or one of several tensors that a call gives.

    Attributes:
        key: What it gives.
        entry: The layer's config.
        args: What the call is given by position.
        kwargs: What it is given by name.
        reads: The tensors among those, in their order.
    """

    key: Key
    entry: dict[str, Any]
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    reads: list[Key] = field(default_factory=list)

    @property
    def layer(self) -> str:
        return self.key[0]

    @property
    def call(self) -> int:
        return self.key[1]

    @property
    def tensor(self) -> int:
        return self.key[2]

    @property
    def is_input(self) -> bool:
        return not self.reads


def key_of(value: Any, entries: dict[str, Any] | None = None) -> Key | None:
    """The tensor that a value of a config is; None if it is none.

    Args:
        value: In arguments of calls a serialized tensor; among a model's inputs and outputs a list of layer, call and number.
        entries: The layers, for the latter.
    """
    if entries is not None:
        if not (isinstance(value, list) and len(value) == 3 and isinstance(value[0], str)):
            return None
        name, call, tensor = value
        counts_itself = "input_layers" in (
            entries[name]["config"] or {}
        )  # Keras counts a functional model's making as a call there
        return name, call - counts_itself, tensor
    if isinstance(value, dict) and value.get("class_name") == "__keras_tensor__":
        name, call, tensor = value["config"]["keras_history"]
        return name, call, tensor
    return None


def leaves(structure: Any, tensors: Any, entries: dict[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Each output of a model with its tensor."""
    key = key_of(structure, entries)
    if key is not None:
        yield key, tensors
    elif isinstance(structure, dict):
        for name, each in structure.items():
            yield from leaves(each, tensors[name], entries)
    else:
        for each, tensor in zip(structure, tensors, strict=True):
            yield from leaves(each, tensor, entries)


def units_of(entries: dict[str, Any]) -> dict[Key, Unit]:
    """Everything that gives a tensor."""
    units: dict[Key, Unit] = {}
    for name, entry in entries.items():
        calls = entry["inbound_nodes"] or [{"args": [], "kwargs": {}}]
        for number, call in enumerate(calls):
            unit = Unit((name, number, 0), entry, list(call["args"]), dict(call["kwargs"]))
            unit.reads = [*_tensors(unit.args), *_tensors(unit.kwargs)]
            units[unit.key] = unit
    for unit in [*units.values()]:
        for key in unit.reads:
            if key[2]:
                units.setdefault(key, Unit(key, entries[key[0]], reads=[(*key[:2], 0)]))
    return units


def _tensors(value: Any) -> Iterator[Key]:
    key = key_of(value)
    if key is not None:
        yield key
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


class Chains(list[list[Unit]]):
    """The chains in an order in which each stands behind what it reads, and calls of a layer in their own order.

    Args:
        units: Everything that gives a tensor; those that only an output needs are added.
        outputs: The tensors that are a model's outputs.

    Attributes:
        end: The last tensor of the chain that has one.
    """

    def __init__(self, units: dict[Key, Unit], outputs: Any) -> None:
        for key in outputs:
            if key[2]:
                units.setdefault(key, Unit(key, units[*key[:2], 0].entry, reads=[(*key[:2], 0)]))
        orders = (order for cut in range(3) if (order := self._ordered(units, [*outputs], cut)) is not None)
        super().__init__(next(orders))
        self.end = {unit.key: chain[-1].key for chain in self for unit in chain}

    def _ordered(self, units: dict[Key, Unit], outputs: list[Key], cut: int) -> list[list[Unit]] | None:
        """The chains in order; None if calls of one layer in several chains have none.

        Args:
            units: Everything that gives a tensor.
            outputs: The tensors that are outputs.
            cut: Where chains are cut that need not be: nowhere, where several come together, and around layers that are called again. The
                last has an order always, that of the calls as they were made.
        """
        uses = Counter(key for unit in units.values() for key in unit.reads)
        uses.update(outputs)
        again = {key[0] for key in units if key[1]}
        follows: dict[Key, Key] = {}
        for unit in units.values():
            before = unit.reads[0] if unit.reads else None
            if before is None or uses[before] > 1 or before in outputs:
                continue
            if (cut and len({*unit.reads}) > 1) or (cut > 1 and {unit.layer, before[0]} & again):
                continue
            follows[before] = unit.key
        inside = set(follows.values())
        chains: dict[Key, list[Unit]] = {}
        where: dict[Key, Key] = {}
        for key in units:
            if key in inside:
                continue
            chain = [units[key]]
            while chain[-1].key in follows:
                chain.append(units[follows[chain[-1].key]])
            chains[key] = chain
            where.update({unit.key: key for unit in chain})
        needs = {key: self._needs(key, chain, units, where) for key, chain in chains.items()}
        order = _sorted(needs, [where[key] for key in outputs])
        return None if order is None else [chains[key] for key in order]

    def _needs(self, key: Key, chain: list[Unit], units: dict[Key, Unit], where: dict[Key, Key]) -> list[Key]:
        needs: dict[Key, None] = {}
        for unit in chain:
            if unit.call and not unit.tensor:
                needs[where[unit.layer, unit.call - 1, 0]] = None
            needs.update(dict.fromkeys(where[each] for each in unit.reads))
        needs.pop(key, None)
        return [*needs]


def _sorted(needs: dict[Key, list[Key]], ends: list[Key]) -> list[Key] | None:
    """Chains behind what they need, from inputs towards each end in turn; None if they go in a circle."""
    done: dict[Key, None] = {}
    inputs = [key for key, wanted in needs.items() if not wanted]
    for begin in [*ends, *inputs, *needs]:
        open_: dict[Key, Iterator[Key]] = {}
        waiting = [begin]
        while waiting:
            key = waiting[-1]
            if key in done:
                waiting.pop()
                continue
            each = next(open_.setdefault(key, iter(needs[key])), None)
            if each is None:
                done[key] = None
                waiting.pop()
            elif each in open_ and each not in done:
                return None
            else:
                waiting.append(each)
    return [*done]
