"""How a node computes: its kind of card, equal bits in each run, and TF32. Runs on master and workers.

The settings are ``deterministic`` and ``tf32``. Each node obeys them before it builds the model, and reports its card.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ddlf.errors import ConfigError
from ddlf.training.context import App
from ddlf.worker.assignment import cards_of_executor
from ddlf.worker.determinism import DETERMINISTIC_OPS, set_environment
from ddlf.worker.frameworks import framework, lacks_flags


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """How a node computes.

    Args:
        card: The kind of its card, such as ``"NVIDIA H200"``; empty on the CPU.
        tf32: Which float32 products its card rounds to TF32; empty for none.
        in_any_case: Why ``deterministic`` has no effect there; empty if it has, or if it is off.
        unused: Cards that it was given and that its framework does not use, for people; empty if it uses them.
    """

    card: str = ""
    tf32: str = ""
    in_any_case: str = ""
    unused: str = ""

    @property
    def kind(self) -> str:
        """The kind of its processor, which decides its bits, for people."""
        return self.card or "a CPU"


def prepare_master(app: App) -> None:
    """Let the master compute like its workers. Call it before Keras is imported.

    Raises:
        ConfigError: JAX has read its flags already.
    """
    set_environment(app.deterministic)
    if app.deterministic and lacks_flags():
        raise ConfigError(
            "deterministic=True comes too late for JAX in this process: it has used the card before, and reads its flags once",
            hint=f"make arrays in load_dataset and create_model, or start with XLA_FLAGS={DETERMINISTIC_OPS}",
        )


def set_arithmetic(app: App) -> Arithmetic:
    """Let the framework of this process obey the app's settings, and return how it computes."""
    backend = framework()
    backend.set_tf32(app.tf32)
    in_any_case = backend.determine(app.deterministic)
    card = backend.card()
    return Arithmetic(card, backend.tf32(), in_any_case, "" if card else ", ".join(cards_of_executor()))


def arithmetic_warnings(app: App, workers: Mapping[str, Arithmetic], master: Arithmetic) -> Iterator[tuple[str, str]]:
    """Yield what the user must know about the arithmetic of a run: a subject and a sentence.

    Args:
        app: The user's ``IApp``.
        workers: How each worker computes, by its name.
        master: How the master computes.
    """
    reasons = [arithmetic.in_any_case for arithmetic in (*workers.values(), master)]
    if app.deterministic and all(reasons):
        yield "deterministic", f"deterministic=True changes nothing in this run: {reasons[0]}"
    if app.tf32 != "auto" and not any(arithmetic.card for arithmetic in workers.values()):
        yield "tf32", f"tf32={app.tf32!r} changes nothing in this run: no worker computes on a card"
    if app.precision == "mixed_float16" and app.optimizer_state == "fresh":
        yield (
            "precision",
            "optimizer_state='fresh' begins each round with the first scale of the loss, so that its first steps may overflow",
        )
    if len({arithmetic.kind for arithmetic in workers.values()}) > 1:
        yield "cards", mixed(workers)
    for name, arithmetic in workers.items():
        if arithmetic.unused:
            yield "cards", unused(name, arithmetic)


def unused(name: str, arithmetic: Arithmetic) -> str:
    """Return a sentence about a worker whose framework does not use its cards."""
    return (
        f"{name} has the card {arithmetic.unused}, but its framework does not see it and computes on the CPU: ddlf doctor says why "
        "on its machine"
    )


def mixed(workers: Mapping[str, Arithmetic], other_kinds: Iterable[str] = ()) -> str:
    """Return a sentence about workers that compute on different kinds of cards.

    Args:
        workers: How each worker computes, by its name.
        other_kinds: The kinds of further workers.
    """
    names: dict[str, list[str]] = {}
    for name, arithmetic in workers.items():
        names.setdefault(arithmetic.kind, []).append(name)
    kinds = [f"{kind} ({', '.join(workers_of_kind)})" for kind, workers_of_kind in names.items()] + [
        f"{kind} (the others)" for kind in other_kinds
    ]
    return (
        f"a slot has other bits on another kind of card, and this run computes on {' and '.join(kinds)}: equal bits in "
        "each run need workers of one kind"
    )


def mixed_backends(app: App, backends: Mapping[int, str]) -> str:
    """Return a sentence about workers that compute with different backends of Keras; empty if all have the same one.

    Args:
        app: The user's ``IApp``.
        backends: The backend of each worker, by its number.

    Raises:
        ConfigError: They differ, and the app asks for equal bits.
    """
    numbers: dict[str, list[int]] = {}
    for number, backend in sorted(backends.items()):
        numbers.setdefault(backend, []).append(number)
    if len(numbers) < 2:
        return ""
    descriptions = [
        f"{', '.join(f'worker {number}' for number in of)} with {backend}" for backend, of in sorted(numbers.items())
    ]
    text = f"{' and '.join(descriptions)}"
    if app.deterministic:
        raise ConfigError(
            f"deterministic=True needs one backend of Keras, but this run computes on {text}",
            hint="set KERAS_BACKEND to the same backend on each machine, and start the workers again",
        )
    return f"a slot has other bits with another backend of Keras, and this run computes on {text}"
