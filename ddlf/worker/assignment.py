"""Decides which cards a worker computes on, and keeps other workers away from them. Runs in daemons and on the master.

A card has one worker, unless each of its workers has a memory limit. So a second worker gets a card only on request. A
daemon has a lock on a file for each of its cards: alone, or shared with other daemons that have a limit. The system
releases the lock at the daemon's death.

The executor gets its cards through its environment, before it imports a framework. This also holds for a fork of the warm
template, because importing a framework does not look at the cards.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

from ddlf.errors import ConfigError
from ddlf.settings.checks import count_of_bytes, exact_size
from ddlf.worker.cards import (
    HIDDEN,
    MASK,
    NONE,
    REPAIR,
    Card,
    build_of,
    find_card,
    find_cards,
    listed,
    named_cards,
    read_names,
    visible_cards,
)
from ddlf.worker.lost_cards import folder_of_cards, lost_cards
from ddlf.worker.machine import keras_backend

CARDS = "DDLF_CARDS"
"""Environment variable of an executor with its cards, for people: a list of texts in JSON."""
MEMORY = "DDLF_GPU_MEMORY"
"""Environment variable of an executor with the limit of its memory on each card, in bytes."""
GROWING = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Variables that let TensorFlow and JAX take memory by need. Otherwise TensorFlow takes nearly all memory of a card, and
JAX three quarters. PyTorch always takes memory by need. A variable that the user has set keeps its value."""
ON_CPU = {"JAX_PLATFORMS": "cpu"}
"""JAX with CUDA prints a traceback if it finds no card, unless this variable says that it computes on the CPU."""
JAX_SHARE, JAX_SHARE_NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"
SHARED = 0.9
"""Part of a card's memory that workers get in all, if they share it without a limit from the user. CUDA itself needs about
half a gigabyte for each process."""
LEAST_MEMORY = 256 * 2**20


@dataclass(frozen=True, slots=True)
class CardWish:
    """The cards that a user wants for one worker.

    Args:
        names: Names of cards, as ``read_names`` returns them; None for the default.
        memory: Limit of the worker's memory on each card, in bytes; None without a limit.
    """

    names: tuple[str, ...] | None = None
    memory: int | None = None

    def arguments(self) -> list[str]:
        """Return the options of ``ddlf-worker`` that say the same."""
        gpus = [] if self.names is None else ["--gpus", ",".join(self.names)]
        return [*gpus, *([] if self.memory is None else ["--gpu-memory", exact_size(self.memory)])]

    def differs(self, described: Sequence[str], uuids: Sequence[str]) -> bool:
        """Return whether a worker has not got these options.

        Args:
            described: Its cards, as ``Assignment.described`` returns them.
            uuids: The unique names of these cards; empty for a worker of an earlier release.
        """
        limits = [] if self.memory is None else [card for card in described if not card.endswith(_limit(self.memory))]
        if self.names is None:
            return bool(limits)
        names = [] if self.names == (NONE,) else list(self.names)
        numbers_and_uuids = zip(
            [card.partition(" ")[0] for card in described], uuids or [""] * len(described), strict=True
        )
        return bool(limits) or len(names) != len(described) or not all(map(_is_named, names, numbers_and_uuids))


def _limit(memory: int | None) -> str:
    return "" if memory is None else f", at most {memory / 1e9:.1f} GB"


def _is_named(name: str, number_and_uuid: tuple[str, str]) -> bool:
    """Return whether a name is the number of a card, or the beginning of its unique name."""
    number, uuid = number_and_uuid
    return uuid.startswith(name) if name.startswith(("GPU-", "MIG-")) else number == name


NO_WISH = CardWish()


class Assignment:
    """The cards of one worker, and its locks on them.

    Args:
        cards: The cards.
        memory: Limit of its memory on each card, in bytes.
        hides: Whether its executor may use no other card. Without this, the worker leaves the environment as it is.
    """

    def __init__(self, cards: Sequence[Card] = (), memory: int | None = None, *, hides: bool = False) -> None:
        self.cards = tuple(cards)
        self._memory = memory
        self._hides = hides or bool(cards)
        self._locks: list[int] = []

    @classmethod
    def take(cls, wish: CardWish) -> Self:
        """Find the cards of a worker and lock them.

        Without names, a worker takes all cards that the mask of its environment leaves. Without a mask, it takes one card
        that is free. Where Keras cannot use cards, it takes none.

        Raises:
            ConfigError: The cards do not exist, belong to another worker, or cannot be used.
        """
        names, memory = wish.names, wish.memory
        mask = os.environ.get(MASK)
        if names == (NONE,):
            _refuse_memory(memory, "with gpus=none")
            return cls(hides=True)
        if names is None:
            cards = usable_cards(mask)
            if not cards:
                _refuse_memory(memory, "without a card")
                return cls()
            if mask is not None and (lost := [card for card in cards if card.lost]):
                raise ConfigError(f"{MASK}={mask} names the card {lost[0]}, which {lost[0].lost}", hint=REPAIR)
            if mask is not None and len(cards) > 1 and any(":" in card.number for card in cards):
                raise ConfigError(
                    f"{MASK}={mask} names {listed(cards)}, but a process can use only one instance of divided cards (MIG)",
                    hint=f"name one with --gpus, as in --gpus {cards[0].uuid}",
                )
        else:
            cards = named_cards(_cards_for(names), names, mask)
        with card_folder_lock():
            if names is None and mask is None:
                cards = free_cards(cards, memory)[:1]
            assigned = cls(cards, memory)
            for card in cards:
                check_memory(memory, card)
                assigned._lock(card)
        return assigned

    def _lock(self, card: Card) -> None:
        lock = _try_to_lock(card, shared=self._memory is not None)
        if lock is None:
            self.release()
            raise ConfigError(
                f"the card {card} has another worker of DDLF",
                hint="name another card, or give each worker of this card a limit, such as --gpu-memory 8GiB",
            )
        self._locks.append(lock)

    def release(self) -> None:
        """Let other workers take the cards."""
        for lock in self._locks:
            os.close(lock)
        self._locks.clear()

    def environment(self) -> dict[str, str]:
        """Return the environment variables that make the worker's executor compute on these cards only."""
        if not self._hides:
            return {}
        if not self.cards:
            return {MASK: "", CARDS: "[]"} | {name: value for name, value in ON_CPU.items() if name not in os.environ}
        variables = {MASK: ",".join(card.uuid for card in self.cards), CARDS: json.dumps(self.described())}
        variables |= {name: value for name, value in GROWING.items() if name not in os.environ}
        if self._memory is not None:
            share = self._memory / min(card.memory for card in self.cards)
            variables[MEMORY] = str(self._memory)
            variables[JAX_SHARE_NEW if JAX_SHARE_NEW in os.environ else JAX_SHARE] = f"{share:.4f}"
        return variables

    def avoided(self) -> list[str]:
        """Return a sentence about each card of this machine that was lost, so that no worker takes it."""
        return _sentences_about_lost_cards(find_cards().cards)

    def described(self) -> list[str]:
        """Return the number and name of each card, and the limit, for people."""
        return [f"{card}{_limit(self._memory)}" for card in self.cards]


def _sentences_about_lost_cards(cards: Sequence[Card]) -> list[str]:
    return [f"the card {card} is left alone, because it {card.lost}" for card in cards if card.lost]


def unused_cards() -> list[str]:
    """Return a sentence about each reason why Keras uses no card of this machine, or not all. Cards that the mask of this
    process hides, or that other workers have, do not count.
    """
    mask = os.environ.get(MASK)
    if mask is not None and mask.partition(",")[0].strip().casefold() in HIDDEN:
        return []
    inventory, build = find_cards(), build_of(keras_backend())
    reasons = [f"{inventory.problem}; {inventory.do}"] if inventory.problem else []
    if inventory.cards and build.package and not build.cuda:
        install = f"python -m pip install 'ddlf[{build.extra}]'" if build.extra else "choose another with KERAS_BACKEND"
        reasons.append(f"{build.package}, which Keras would use, computes on CPUs only; {install}")
    return reasons + _sentences_about_lost_cards(inventory.cards)


def usable_cards(mask: str | None) -> tuple[Card, ...]:
    """Return the cards that the mask leaves, if Keras can compute on them."""
    cards = find_cards().cards
    return visible_cards(cards, mask) if cards and build_of(keras_backend()).cuda else ()


def _cards_for(names: Sequence[str]) -> tuple[Card, ...]:
    """Return the cards of this machine for a user who names some.

    Raises:
        ConfigError: There are none, one is missing for a known reason, or Keras cannot compute on them.
    """
    inventory, backend = find_cards(), keras_backend()
    if not inventory.cards or (inventory.problem and any(find_card(inventory.cards, name) is None for name in names)):
        raise ConfigError(
            f"no card is found for gpus={','.join(names)}" + (f": {inventory.problem}" if inventory.problem else ""),
            hint=inventory.do or "ddlf doctor lists the cards of this machine",
        )
    build = build_of(backend)
    if build.package and not build.cuda:
        raise ConfigError(
            f"gpus={','.join(names)} has no effect: {build.package}, which Keras would use, computes on CPUs only",
            hint=f"python -m pip install 'ddlf[{build.extra}]'" if build.extra else "choose another with KERAS_BACKEND",
        )
    return inventory.cards


def _refuse_memory(memory: int | None, reason: str) -> None:
    if memory is not None:
        raise ConfigError(f"gpu_memory has no effect {reason}", hint="leave it out; ddlf doctor lists the cards")


def check_memory(memory: int | None, card: Card, workers: int = 1) -> None:
    """Check that a card has the memory for the limits of its workers.

    Raises:
        ConfigError: It has less, or the limit is too small to compute.
    """
    if memory is None:
        return
    if memory < LEAST_MEMORY:
        raise ConfigError(f"gpu_memory must be at least 256MiB, got {memory} bytes", hint="as in --gpu-memory 8GiB")
    if memory * workers > card.memory:
        several = f" for each of {workers} workers" if workers > 1 else ""
        raise ConfigError(
            f"gpu_memory is {memory / 1e9:.1f} GB{several}, but the card {card} has {card.memory / 1e9:.1f} GB",
            hint="name less, or use fewer workers on it" if several else "name less",
        )


# -- locks ------------------------------------------------------------------------------------------------------------


@contextmanager
def card_folder_lock() -> Iterator[None]:
    """Let no other process of this user look for free cards meanwhile. So workers that start together find different cards."""
    lock = os.open(folder_of_cards(), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def free_cards(cards: Sequence[Card], memory: int | None = None) -> tuple[Card, ...]:
    """Return the cards that another worker of this user could take now. Call it within ``card_folder_lock``.

    Raises:
        ConfigError: There is none.
    """
    free = []
    for card in cards:
        lock = None if card.lost else _try_to_lock(card, shared=memory is not None)
        if lock is not None:
            os.close(lock)
            free.append(card)
    if not free and (lost := [card for card in cards if card.lost]):
        busy = (
            f", and {listed([card for card in cards if not card.lost])} has a worker" if len(lost) < len(cards) else ""
        )
        raise ConfigError(
            f"no card of this machine is free: {', and '.join(f'the card {card} {card.lost}' for card in lost)}{busy}",
            hint=f"{REPAIR}; or leave the cards alone with --gpus none",
        )
    if not free:
        raise ConfigError(
            f"each card of this machine has a worker of DDLF already: {listed(cards)}",
            hint="wait for it; or leave the cards alone with --gpus none; or give all workers of a card a limit, such as "
            "--gpu-memory 8GiB",
        )
    return tuple(free)


def _try_to_lock(card: Card, *, shared: bool) -> int | None:
    """Return the descriptor of a lock on a card; None if another worker has the card."""
    lock = os.open(folder_of_cards() / card.uuid.replace("/", "-"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


# -- several workers of one machine -------------------------------------------------------------------------------------


def count_of_workers(wish: CardWish, usual: int) -> int:
    """Return the number of local workers if the user names none: one for each named or free card, or ``usual`` without a
    card.

    Raises:
        ConfigError: Each card has a worker already.
    """
    if wish.names is not None:
        return usual if wish.names == (NONE,) else len(wish.names)
    visible = usable_cards(os.environ.get(MASK))
    if not visible:
        return usual
    with card_folder_lock():
        return len(free_cards(visible, wish.memory))


def wish(gpus: object = None, gpu_memory: object = None) -> CardWish:
    """Return the cards that a program wants for local workers.

    Args:
        gpus: Names of cards, such as ``[0, 1]`` or ``"none"``; None for the default.
        gpu_memory: Limit of each worker's memory on its card, such as ``"8GiB"``.

    Raises:
        ConfigError: One of them cannot be read.
    """
    try:
        names = None if gpus is None else read_names(gpus)
    except ValueError as error:
        raise ConfigError(f"gpus {error}") from None
    return CardWish(names, count_of_bytes("gpu_memory", gpu_memory))


def replacement_card(wish: CardWish) -> CardWish:
    """Return the card of a local worker that starts again: its own, or a free one if its own was lost.

    Args:
        wish: The cards that ``spread`` has given the worker.

    Raises:
        ConfigError: No other card is free.
    """
    lost = lost_cards()
    if wish.names is None or not lost.keys() & {*wish.names}:
        return wish
    with card_folder_lock():
        card = free_cards(usable_cards(os.environ.get(MASK)), wish.memory)[0]
    return CardWish((card.uuid,), wish.memory)


def spread(workers: int, wish: CardWish) -> list[CardWish]:
    """Give each of the workers of one machine its card.

    Workers beyond the number of cards share cards. If the user names no limit, each one gets an equal part of its card.

    Args:
        workers: Number of workers.
        wish: Cards of all of them, and the limit for each.

    Returns:
        The card of each worker, and its limit.

    Raises:
        ConfigError: The cards do not exist, belong to another worker, or cannot be used.
    """
    names, memory = wish.names, wish.memory
    mask = os.environ.get(MASK)
    if names == (NONE,):
        _refuse_memory(memory, "with gpus=none")
        return [wish] * workers
    if names is None:
        visible = usable_cards(mask)
        if not visible:
            _refuse_memory(memory, "without a card")
            return [NO_WISH] * workers
        with card_folder_lock():
            cards = free_cards(visible, memory)
    else:
        cards = named_cards(_cards_for(names), names, mask, together=False)
        if len(cards) > workers:
            raise ConfigError(
                f"gpus names {len(cards)} cards for {workers} worker{'s' * (workers != 1)}, which compute on one card each",
                hint=f"name {workers}, or start {len(cards)} workers",
            )
    count = Counter(cards[worker % len(cards)].uuid for worker in range(workers))
    wishes = []
    for worker in range(workers):
        card = cards[worker % len(cards)]
        check_memory(memory, card, count[card.uuid])
        part = int(SHARED * card.memory / count[card.uuid]) if count[card.uuid] > 1 else None
        wishes.append(CardWish((card.uuid,), memory or part))
    return wishes


def cards_for(workers: int, wish: CardWish) -> list[str]:
    """Return the card that each worker of this machine would get from ``spread``, and its limit, for people; empty texts
    without cards.

    Raises:
        ConfigError: As for ``spread``.
    """
    cards = {card.uuid: card for card in find_cards().cards}
    return [
        ", ".join(f"{cards[name]}{_limit(assigned.memory)}" for name in assigned.names or () if name in cards)
        for assigned in spread(workers, wish)
    ]


# -- in the executor ----------------------------------------------------------------------------------------------------


def cards_of_executor() -> list[str]:
    """Return the cards of this executor, for people; empty if it has none, or outside of an executor."""
    with suppress(ValueError, TypeError):
        return [str(card) for card in json.loads(os.environ.get(CARDS, "[]"))]
    return []


def uuids_of_executor() -> list[str]:
    """Return the unique names of the cards of this executor; empty if it has none, or outside of an executor."""
    return os.environ[MASK].split(",") if cards_of_executor() else []


def memory_limit() -> int:
    """Return the limit of this executor's memory on each card, in bytes; 0 without a limit, or outside of an executor."""
    return int(os.environ.get(MEMORY) or 0)


def prepare_framework() -> None:
    """Let a framework that is already imported obey the environment of this executor. Call it after the import of Keras,
    and before the first use of the framework.

    TensorFlow and PyTorch get their memory limit, which JAX reads from its environment. JAX learns that it computes on
    the CPU, because the warm template has imported it before the executor got its environment.

    Raises:
        ConfigError: TensorFlow has used a card already.
    """
    limit = memory_limit()
    backend = keras_backend()
    if CARDS not in os.environ or backend not in sys.modules:
        return
    framework = importlib.import_module(backend)
    if backend == "jax" and not cards_of_executor():
        if framework.config.jax_platforms != (platforms := os.environ["JAX_PLATFORMS"]):
            framework.config.update("jax_platforms", platforms)
    elif backend == "tensorflow" and limit:
        _limit_tensorflow(framework.config, limit // 2**20)
    elif backend == "torch" and limit and framework.cuda.is_available():
        for number in range(framework.cuda.device_count()):
            total = framework.cuda.get_device_properties(number).total_memory
            framework.cuda.set_per_process_memory_fraction(min(1.0, limit / total), number)


def _limit_tensorflow(config: Any, megabytes: int) -> None:
    for device in config.list_physical_devices("GPU"):
        former = config.get_logical_device_configuration(device)
        if former and former[0].memory_limit == megabytes:
            continue  # an earlier run of this executor has set it
        try:
            config.set_logical_device_configuration(device, [config.LogicalDeviceConfiguration(memory_limit=megabytes)])
        except RuntimeError:
            raise ConfigError(
                "gpu_memory cannot limit TensorFlow, because it has used the card already",
                hint="make tensors in create_model and load_dataset, not while the file of the app is imported",
            ) from None
