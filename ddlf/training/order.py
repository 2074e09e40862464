"""The order of the updates of an asynchronous run, read from what it has left, and followed again. Runs on the master; reads only.

All that asynchronous training depends on besides its settings is in which order updates were merged, and from which weights each was made.
Records have both: a run's folder in its events, a checkpoint in its journal. So a run that is replayed ends with the same bits, whoever carries
its slots, and however long that takes.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ddlf.algorithms.codec import CODEC
from ddlf.algorithms.weights import Weights, digest
from ddlf.errors import ConfigError
from ddlf.events.facts import from_data
from ddlf.events.record import RoundRecord
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from ddlf.training.checkpoints.contents import is_checkpoint
from ddlf.training.progress import Progress

EVENTS = "events.jsonl"
"""In a run's folder: each event as a line."""
SKIPPED = tuple(
    f'"event":"{name}'
    for name in ("SlotStarted", "SlotFinished", "Phase", "Worker", "UpdateArrived", "UpdateClipped", "Checkpoint")
)
"""What most lines of a file of events are, and an order is not made of."""


class Turn(NamedTuple):
    """One update.

    Args:
        slot: Number of the slot, from 0.
        round: Number of its round, from 0.
        base: Merges in the weights that it was made from.
        epochs: Local epochs in it.
        merges: Merges before it came.
        rates: Learning rates that callbacks had set for them.
    """

    slot: int
    round: int
    base: int
    epochs: int
    merges: int
    rates: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Order:
    """What decided about the bits of an asynchronous run.

    Args:
        source: Where it was read.
        app: Name of the app's class; "" if it is not known.
        settings: All that decides about the bits of a run, as a checkpoint has it.
        turns: Its updates, in the order in which they were merged.
        dropped: Of each round of a slot, both from 0, whose update was rejected, the worker that had made it.
        slots_from: The round from which on, from 0, and K in it.
        parts_from: The round from which on, from 0, and how many samples each slot has in it; none if parts are equal.
        versions_from: The round from which on, from 0, and the version of partition files in it; none if it was the same in all.
        weights: Digest of the weights that it ended with.
        records: Records of its updates.
    """

    source: Path
    app: str = ""
    settings: dict[str, Any]
    turns: list[Turn]
    dropped: dict[tuple[int, int], int]
    slots_from: list[tuple[int, int]]
    parts_from: list[tuple[int, tuple[int, ...]]]
    versions_from: list[tuple[int, int]]
    weights: str
    records: Sequence[RoundRecord] = ()

    def check(self) -> None:
        """Refuse an order that cannot be the whole one of a run.

        Raises:
            ConfigError: The text says what is wrong.
        """
        (firsts, slots), samples = zip(*self.slots_from, strict=True), self.settings["samples"]
        numbers = [samples, *firsts, *slots, *(number for turn in self.turns for number in turn[:-1])]
        if (
            not all(type(number) is int for number in numbers)
            or min((turn.epochs for turn in self.turns), default=1) < 1
        ):
            raise self.wrong("it has numbers that no run has")
        if (
            not 0 < slots[0] <= slots[-1] <= samples
            or firsts[0]
            or [*slots, *firsts] != [*sorted(slots), *sorted(firsts)]
        ):
            raise self.wrong(f"no run of {samples} samples has {' and then '.join(map(str, slots))} slots")
        done: dict[int, int] = {}
        for number, turn in enumerate(self.turns, 1):
            if turn.slot < 0 or turn.round < 0:
                raise self.wrong(f"update {number} is of no slot and round")
            if turn.slot >= self.slots_in(turn.round):
                raise self.wrong(
                    f"update {number} is of slot {turn.slot + 1}, but round {turn.round + 1} has {self.slots_in(turn.round)} slots"
                )
            if turn.round <= done.get(turn.slot, -1) or not 0 <= turn.base < number:
                raise self.wrong(f"before update {number} some are missing")
            done[turn.slot] = turn.round

    def as_given(self, slots: int | None) -> dict[str, Any]:
        """The settings, to be compared with those of a run whose ``slots`` are given or not: either way it has as many as this one."""
        return {**self.settings, "slots": slots and self.slots_from[-1][1]}

    def slots_in(self, number: int) -> int:
        """K in a round, from 0."""
        return next(slots for first, slots in reversed(self.slots_from) if first <= number)

    def begin(self, progress: Progress) -> None:
        """Give a run that begins with as many slots those that came later, and refuse one with other rounds.

        Raises:
            ConfigError: Its rounds are others.
        """
        progress.versions_from = self.versions_from or progress.versions_from
        for first, slots in self.slots_from[1:]:
            progress.add_slots(first, slots)
        rounds = {turn.round: turn.epochs for turn in self.turns}
        if any(progress.epochs[number : number + 1] not in ([], [epochs]) for number, epochs in rounds.items()):
            # It was made longer: a round that was cut short by its first end is followed by others.
            progress.plan_again(rounds, self.settings["worker_epochs"])
        for first, parts in self.parts_from:
            fits = 0 <= first < len(progress.epochs) + (not parts)
            if not fits or (parts and (min(parts) <= 0 or len(parts) != self.slots_in(first))):
                raise self.wrong(f"no slot has its parts from round {first + 1} on here: give this run as many epochs")
            progress.cut(first, parts)
        starts = [
            next(first for first, slots in self.slots_from if slot < slots) for slot in range(len(progress.states))
        ]
        progress.slot_rounds = [progress.following(slot, first) for slot, first in enumerate(starts)]
        done = list(progress.slot_rounds)
        for number, turn in enumerate(self.turns, 1):
            while (turn.slot, done[turn.slot]) in self.dropped:
                done[turn.slot] = progress.following(turn.slot, done[turn.slot] + 1)
            if turn.round != done[turn.slot] or progress.epochs[turn.round : turn.round + 1] != [turn.epochs]:
                raise self.wrong(
                    f"update {number} is of round {turn.round + 1} with {turn.epochs} local epochs, which slot {turn.slot + 1} "
                    "does not have here: give this run as many epochs"
                )
            done[turn.slot] = progress.following(turn.slot, turn.round + 1)

    def wrong(self, why: str) -> ConfigError:
        """The error of an order that cannot be followed."""
        return ConfigError(f"the run in {self.source} cannot be replayed: {why}")


@dataclass(kw_only=True)
class Replay:
    """How far a run has followed an order, and the weights that it still needs.

    Args:
        order: Order to follow.

    Attributes:
        kept: Weights, and what the algorithm kept with them, by the merges in them: of those that a slot is yet to begin with.
        place: How many updates were merged.
    """

    order: Order
    kept: dict[int, tuple[Weights, dict[str, Weights]]] = field(default_factory=dict)
    place: int = 0

    def __post_init__(self) -> None:
        self._turns = {(turn.slot, turn.round): turn for turn in self.order.turns}
        rounds: dict[int, int] = {}
        self._before: dict[tuple[int, int], int] = {}
        for turn in self.order.turns:
            self._before[turn.slot, turn.round] = rounds.get(turn.slot, -1)
            rounds[turn.slot] = turn.round
        self._needed = Counter(turn.base for turn in self.order.turns)

    def turn(self, slot: int, number: int) -> Turn | None:
        """The update of a slot's round; None if there was none."""
        return self._turns.get((slot, number))

    def before(self, slot: int, number: int) -> int:
        """The last round of a slot before another one whose update counts; -1 if there is none."""
        return self._before[slot, number]

    @property
    def next(self) -> Turn | None:
        """The update that is merged next; None when all were."""
        return self.order.turns[self.place] if self.place < len(self.order.turns) else None

    def was_last(self, merges: int) -> bool | None:
        """Whether what was left of the updates so far was merged with the next one; None if nothing says so.

        Args:
            merges: Merges so far.
        """
        after = self.order.turns[self.place + 1 : self.place + 2]
        return after[0].merges > merges if after else None

    def reached(self, merges: int, weights: Weights, state: dict[str, Weights]) -> None:
        """Say which weights there are now.

        Raises:
            ConfigError: The next update was made from others, which will never be there.
        """
        if self._needed[merges] and merges not in self.kept:
            self.kept[merges] = weights, dict(state)
        if self.next is not None and self.next.base not in self.kept:
            raise self.order.wrong(
                f"its update {self.place + 1} was made after {self.next.base} merges, and there have been {merges}"
            )

    def merged(self) -> None:
        """Say that the next update was merged."""
        turn = self.order.turns[self.place]
        self.place += 1
        self._needed[turn.base] -= 1
        if not self._needed[turn.base]:
            del self.kept[turn.base]


def read_order(source: Path) -> Order:
    """The order of the run that a folder is of: that of a run, of checkpoints, or one of these.

    Raises:
        ConfigError: It has no order, or not a whole one.
        CheckpointError: Its checkpoint cannot be read.
    """
    if (source / EVENTS).exists():
        try:
            order = _of_a_run(source)
            order.check()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{source / EVENTS} is damaged, or of another version: {error!r}") from None
    elif is_checkpoint(source) or source.is_dir():
        order = _of_a_checkpoint(source)
        order.check()
    else:
        raise ConfigError(f"there is no run and no checkpoint in {source}", hint="ddlf runs lists the runs")
    return order


def _events(file: Path) -> Iterator[dict[str, Any]]:
    """Events that may matter, but for lines that are torn: what is missing then is seen."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not any(text in line[:80] for text in SKIPPED):
                with contextlib.suppress(json.JSONDecodeError):
                    yield json.loads(line)


def _of_a_run(source: Path) -> Order:
    began: dict[str, Any] = {}
    ended: dict[str, Any] = {}
    app, slots_from = "", [(0, 1)]
    parts_from: list[tuple[int, tuple[int, ...]]] = []
    versions_from: list[tuple[int, int]] = []
    records: list[dict[str, Any]] = []
    dropped: dict[tuple[int, int], int] = {}
    for data in _events(source / EVENTS):
        match data.get("event"):
            case "RunBegan":
                app, began, ended = data["app"], {}, {}
            case "TrainingBegan":
                began, records, dropped, slots_from = data, [], {}, [(0, data["slots"])]
                parts_from, versions_from = [], []
            case "SlotsChanged":
                slots_from.append((data["round"] - 1, data["slots"]))
            case "FilesChanged":
                versions_from = versions_from or [(0, data["before"])]
                versions_from.append((data["round"] - 1, data["version"]))
            case "PartsChanged":
                parts_from.append((data["round"] - 1, tuple(data["samples"])))
            case "Committed":
                records.append(data["record"])
            case "UpdateRejected":
                dropped[data["slot"] - 1, data["round"] - 1] = data["worker"]
            case "RunEnded":
                ended = data
    if not began or not ended:
        raise ConfigError(
            f"{source / EVENTS} has no end: the run was killed, or the file is cut",
            hint="checkpoints of the run can be replayed up to the newest",
        )
    if began["version"]:
        raise ConfigError(
            f"the run in {source} went on from another one, so its own updates are not all",
            hint="replay its checkpoints, which have all",
        )
    return _order(
        source,
        [from_data(RoundRecord, record) for record in records],
        ended.get("weights", ""),
        app=app,
        settings={name: json.loads(value) for name, value in began.get("facts", {}).items()},
        dropped=dropped,
        slots_from=slots_from,
        parts_from=parts_from,
        versions_from=versions_from,
    )


def _of_a_checkpoint(source: Path) -> Order:
    found = CheckpointFolder(source.absolute().parent).load(source.absolute()) if is_checkpoint(source) else None
    if found is None:
        found = CheckpointFolder(source).newest(required=True)
    assert found is not None  # it was required
    progress = Progress.from_checkpoint(found)
    return _order(
        source,
        progress.records,
        digest(progress.weights),
        settings=progress.settings,
        dropped=progress.dropped,
        slots_from=progress.slots_from,
        parts_from=progress.parts_from,
        versions_from=progress.versions_from,
    )


def _order(source: Path, records: list[RoundRecord], weights: str, **facts: Any) -> Order:
    turns = [
        Turn(
            (r.slot or 1) - 1,
            r.round - 1,
            -1 if r.base is None else r.base,
            r.epochs,
            (r.base or 0) + r.staleness,
            r.rates,
        )
        for r in records
    ]
    order = Order(source=source, turns=turns, weights=weights, records=records, **facts)
    if order.settings.get("mode", "async") == "sync":
        raise order.wrong("it was a synchronous one, whose bits follow from its seed")
    if not order.settings or not all(record.slot and record.base is not None for record in records):
        raise order.wrong("it was recorded by a version that did not say which weights each update was made from")
    for number, record in enumerate(records, 1):
        if record.version != number:
            raise order.wrong(f"before update {number} some are missing")
    owed = (
        CODEC.read(order.settings["codec"]).biased
        or order.settings["weights_codec"].startswith("delta:")
        or order.settings.get("optimizer_state") == "stays"
    )
    if owed and (order.dropped or any(record.recomputed for record in records)):
        raise order.wrong("a slot began a round twice, and what was left of it on its worker then is not recorded")
    return order


def of_shards(order: Order) -> tuple[dict[Any, Any], list[Counter[int]]]:
    """What a run's records say of the order of pushes and fetches.

    Returns:
        Of each slot's round and replica how many pushes were in each shard before each of its fetches and pushes; and of each shard, by how many
        pushes it had, its fetches.

    Raises:
        ConfigError: Some are missing.
    """
    scripts: dict[Any, Any] = {}
    shards = max((len(fetch) - 1 for record in order.records for fetch in record.fetches), default=0)
    fetched: list[Counter[int]] = [Counter() for _ in range(shards)]
    pushed: list[list[int]] = [[] for _ in range(shards)]
    for record in order.records:
        for id, *at in record.fetches:
            script = scripts.setdefault(((record.slot or 1) - 1, record.round - 1, id), {"fetches": [], "pushes": []})
            script["fetches"].append(at)
            if min(at) < 0:
                raise order.wrong("a fetch saw pushes that were lost with a shard, and sent again in another order")
            for shard, one in enumerate(at):
                fetched[shard][one] += 1
        for id, _, *both in record.pushes:
            script = scripts.setdefault(((record.slot or 1) - 1, record.round - 1, id), {"fetches": [], "pushes": []})
            script["pushes"].append(both[shards:])
            for shard, one in enumerate(both[shards:]):
                pushed[shard].append(one)
    for shard, found in enumerate(pushed):
        if sorted(found) != list(range(len(found))):
            raise order.wrong(
                f"of the pushes to shard {shard + 1} some are missing, as of rounds that were ended early, or carried twice"
            )
    return scripts, fetched
