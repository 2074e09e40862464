"""Downpour SGD. Runs on the master, which sees no weights unless somebody looks.

K replicas, the slots' or several in each, train at their own pace; the weights are in shards on the workers (Dean et al. 2012, section 4.1)::

    give each shard its slice; let the replicas know where they are
    a slot's round: its replicas fetch from the shards and push to them, n_fetch and n_push steps apart, and train meanwhile
    a reply says which versions its fetches saw, and how stale its pushes were

A slot whose worker is lost is carried again by another one, which begins behind the last push that all shards have: each push counts once. The
weights come to the master at the end, and go into checkpoints from the shards.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.algorithms.flat_weights import Row, Rows
from ddlf.algorithms.weights import Weights
from ddlf.errors import ClusterTooSmall, ConfigError, ConnectError, DDLFError
from ddlf.events import UpdateRejected, Warned
from ddlf.training.checkpoints.slices import PUSHED, WEIGHTS
from ddlf.training.context import App
from ddlf.training.downpour.placement import Placement
from ddlf.training.downpour.replica import shares
from ddlf.training.downpour.server import shard_parts
from ddlf.training.evaluation import to_its_end
from ddlf.training.exchanges.members import Members
from ddlf.training.recovery import first_line
from ddlf.training.refusals import check
from ddlf.training.roles.evaluation import EVALUATION_BATCH
from ddlf.training.rounds import Elsewhere, end_all, nowhere, shapes
from ddlf.training.run import Run
from ddlf.training.slices import Writing, reading, sliced
from ddlf.training.slot.task import Reply

if TYPE_CHECKING:
    from ddlf.algorithms.codec import Outward
    from ddlf.training.spec import Downpour


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas push gradients to shards of the weights.

    Args:
        how: The settings of Downpour.
        weights_codec: How weights travel to replicas.
    """

    how: Downpour
    weights_codec: Outward

    def begin(self, run: Run) -> None:
        """Shards have the state of their rule."""

    async def train(self, run: Run) -> None:
        """Train until every slot has done its rounds or the run is to end; the master ends with the weights."""
        there = run.exchange.weights_out
        assert isinstance(there, Members)
        serving = Serving(run, there, self.how, self.weights_codec)
        watching = asyncio.ensure_future(serving.watch())
        try:
            async for reply in run.arrivals(bound=self.how.max_staleness, gate=serving.may_begin):
                await serving.committed(reply)
        finally:
            await end_all([watching])
            await there.close()
            await to_its_end(serving.settle())


WARM = 200
"""Steps of the shards before all replicas begin, if the first one has as many in the first half of its first round."""
EVERY = 8
"""Pushes that a shard takes before its copies get them, or as many as there are replicas if these are more."""
ATTEMPTS = 2
"""To have weights evaluated on workers: if a shard is another worker's meanwhile, the first is in vain."""
LOOK_S = 0.25
"""How often the owners of shards are asked for their versions."""


class OnShards(Elsewhere):
    """In the place of weights that are on the shards."""

    why = "the weights of now are on the workers: with mode='downpour' the master has them after a checkpoint and at the end"
    hint = "set checkpoint_every to have them here that often"


class Serving:
    """The shards of one run, as the master sees them.

    Args:
        run: The run.
        there: Where its tasks find them.
        how: The settings of Downpour.
        codec: How weights travel to replicas.

    Raises:
        ConfigError: No weight is trained, there are fewer replicas than slots, or more shards than values.
    """

    def __init__(self, run: Run, there: Members, how: Downpour, codec: Outward) -> None:
        self._run, self._there, self._how, self._codec = run, there, how, codec
        weights = shapes(run.weights)
        self._rows = Rows.of(weights, run.facts.trainable)
        if not self._rows.sizes[0]:
            raise ConfigError(
                "mode='downpour' steps weights by gradients, and this model has none that are trained",
                hint="see that a layer with weights has trainable=True",
            )
        if wide := [name for name, w in zip(run.facts.names, weights, strict=True) if w.dtype == np.float64]:
            why = f"shards keep float32 values, so {len(wide)} weights of type float64 lose digits; the first is {wide[0]!r}"
            run.crew.emit(Warned(about="model", why=why))
        beside = set(range(len(weights))) - {*self._rows.trained, *self._rows.rest}
        self._others = [one if i in beside else None for i, one in enumerate(weights)]  # that no shard has
        self._replicas = how.replicas or run.slots
        check(how.replica_refusals(self._replicas, run.slots))
        if self._replicas > run.slots and run.facts.files is not None and not run.facts.files.on_disk:
            raise ConfigError(
                f"replicas={self._replicas} on {run.slots} slots read in turn from several places, and {run.facts.files} is made in order",
                hint="leave out replicas: then each slot is one; or make partition files: ddlf data split",
            )
        self._layers = [name.rpartition("/")[0] or name for name in run.facts.names] if how.cut == "layers" else None
        if how.shards:
            self._rows.cut(how.shards, self._layers)  # what cannot be is refused before a worker is given anything
        n = how.softsync or self._replicas
        self._collects = self._replicas // n
        self._placement = Placement(run, there, how, self._restored)
        self._lives = itertools.count(1 + last_life(run.state.get(META)))
        self._brought = run.version  # the commit whose weights are here
        self._home = run.progress.snapshot()
        self._moments = itertools.count(1)
        self._warned = False
        self.version = 0
        self._begun = run.version
        self._warm = how.warm_start if how.warm_start is not None else self._some_pushes()
        there.begin, there.says = self._begin, self.told

    # -- before and while replicas train ----------------------------------------------------------------------------------

    def told(self, slot: int, number: int) -> dict[str, Any]:
        """What a task says of its replicas, each time that it goes to a worker."""
        ids = list(range(slot, self._replicas, self._run.slots))
        return {
            "replicas": ids,
            "all": self._replicas,
            "life": next(self._lives),
            "alone": max(0, self._warm - self.version) if (slot, number) == (0, 0) else 0,
        }

    def may_begin(self, slot: int, number: int) -> bool:
        """Whether a slot's round may begin: at first the first replica is alone for a while."""
        first = self._run.progress.slot_rounds[0]
        return slot == 0 or first > 0 or self.version >= self._warm

    async def watch(self) -> None:
        """Look at the shards as long as replicas train: how far they are, and whether their workers are there."""
        warming = True
        while True:
            await asyncio.sleep(LOOK_S / 5 if warming else LOOK_S)
            if not self._placement.owners:
                continue
            before = dict(self._placement.reached)
            try:
                found = await self._placement.versions()
                await self._placement.balance()
            except ClusterTooSmall:
                return  # the crew has it
            for replica, at in self._placement.reached.items():
                if at != before.get(replica):
                    self._run.crew.progressed(replica % self._run.slots)
            if found:
                self.version = min(found)
            if warming and self.may_begin(-1, 0):
                warming = False
                if self._run.loops is not None:
                    self._run.loops.turn()

    async def _begin(self) -> None:
        """See that the shards are on workers, and that all know where they are.

        Raises:
            ClusterTooSmall: One is lost, and there is nothing to go on from.
        """
        if self._placement.owners:
            await self._placement.look()
            await self._placement.meet()
        else:
            parts = self._rows.cut(self._shards_wanted(self._placement.places()), self._layers)
            await self._placement.give(parts, self._facts(parts, self._run.weights, self._run.state))

    # -- what came of it --------------------------------------------------------------------------------------------------

    async def committed(self, reply: Reply) -> None:
        """Count a slot's round.

        Raises:
            ConnectError: Its worker did not reach a shard whose worker is there.
            ClusterTooSmall: That one is lost.
        """
        run, told = self._run, reply.pushed or {}
        if "peer" in told:
            await self._unreached(reply.worker, told)
        if lost := [(shard, count) for shard, count in told.get("lost", ()) if count]:
            for shard, count in lost:
                run.verdicts.append(
                    f"slot {reply.slot + 1}: {count} push{'es' * (count > 1)} lost with shard {shard + 1}"
                )
        if refused := told.get("refused"):
            why = f"{refused} push{'es' * (refused > 1)} had NaN or infinite values, and {'were' if refused > 1 else 'was'} left out"
            run.verdicts.append(f"slot {reply.slot + 1}: {why} (worker {reply.worker})")
            run.crew.emit(UpdateRejected(round=reply.task.round + 1, slot=reply.slot + 1, worker=reply.worker, why=why))
        version = run.version + 1
        due = run.keeper is not None and run.keeper.is_due(version)
        shown = run.is_last(reply) or (run.reporter.shows and run.loops and run.loops.will_end_epoch(reply.task.round))
        evaluated = partial(self._evaluated, reply.worker)
        weights: Weights = OnShards(evaluated, self._bring)
        slices = await sliced(run, [reply], self._written) if due and not shown else None
        if slices is not None:
            weights = OnShards(evaluated, self._bring, reading(slices, WEIGHTS))
            weights.slices = slices
            run.state[STATE] = Elsewhere(nowhere, self._bring, reading(slices, PUSHED))
        elif due or shown:
            weights = await self._bring()
        await run.commit(weights, [reply])
        if shown and run.progress.weights is not weights and not self._warned:
            self._warned = True
            why = "callbacks have set weights, which has no effect before training is over: replicas go on from those of the shards"
            run.crew.emit(Warned(about="callback", why=why))
        if due or shown:
            self._brought, self._home = run.version, run.progress.snapshot()

    async def settle(self) -> None:
        """End with weights that are here: those of now, or if these are lost those of the last time, and nothing of the rounds since."""
        run, progress = self._run, self._run.progress
        if not self._placement.owners:
            return
        try:
            progress.weights = await self._bring()
        except DDLFError as error:
            if self._brought == progress.version:
                progress.fetch()
                return
            reached = progress.version
            progress.set_back(self._home)
            run.exchange.states.set_back(progress.states)
            why = f"the weights after update {reached} cannot be had ({first_line(error)}): what is left is that of update {progress.version}"
            run.crew.emit(Warned(about="model", why=why))
        finally:
            await self._placement.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _some_pushes(self) -> int:
        """Half of the pushes of the first replica's first round, or ``WARM``."""
        run = self._run
        if self._replicas == 1 or not run.progress.epochs:
            return 0
        span = run.progress.span(0)
        batches = math.ceil((span.end - span.begin) / run.slots / run.facts.batch_size)
        first = shares(batches, len(range(0, self._replicas, run.slots)))[0]
        pushes: int = math.ceil(first / self._how.push)
        return min(WARM, pushes // 2)

    def _shards_wanted(self, workers: int) -> int:
        """Number of shards: that of the checkpoint, or what is asked for."""
        if META in self._run.state and STATE in self._run.state:
            return len(self._run.state[META][0])
        most = (
            self._rows.sizes[0]
            if self._layers is None
            else len({self._layers[i] for i in self._rows.trained if self._rows.like[i].size})
        )
        wanted: int = self._how.shards or min(workers, most)
        return wanted

    def _restored(self, shard: int) -> tuple[dict[str, Any], str]:
        """What a shard was when it was here last, and what is lost of it since.

        Raises:
            ClusterTooSmall: There is no checkpoint; the text goes on behind what happened.
        """
        home = self._home
        if self._run.keeper is None or not home.version:
            raise ClusterTooSmall(
                " and there is no checkpoint yet" if self._run.keeper is not None else "",
                hint="resume from the last checkpoint: checkpoint=DIR, resume='auto'; with copies=1 and another worker nothing is lost",
            )
        facts = self._facts(self._placement.parts, home.weights, home.state)[shard]
        since = self._run.progress.records[home.version :]
        column = 2 + len(self._placement.parts) + shard
        lost = sum(push[column] >= facts["received"] for record in since for push in record.pushes)
        return facts, (
            f"it goes on as it was after update {home.version}, "
            f"and {lost} push{'es' * (lost != 1)} to it of the {len(since)} update{'s' * (len(since) != 1)} since are lost"
        )

    def _facts(self, parts: Sequence[Any], weights: Weights, state: dict[str, Weights]) -> list[dict[str, Any]]:
        """What each shard begins with, of whole weights and what is kept with them."""
        rows, slices = self._rows, getattr(weights, "slices", None)
        if slices is None:
            trained, rest = rows.row(weights, rows.trained), rows.row(weights, rows.rest)
        how = {
            "rule": str(self._how.rule),
            "staleness": str(self._how.staleness),
            "codec": str(self._codec),
            "collects": self._collects,
            "every": max(self._replicas, EVERY),
        }
        meta = state.get(META) if STATE in state else None
        found = []
        for shard, ((begin, end), (low, high)) in enumerate(parts):
            one: dict[str, Any] = {**how, "part": (begin, end)}
            if slices is None:
                one |= {"weights": trained[begin:end], "rest": rest[low:high]}
                one |= {"state": [row[begin:end] for row in state.get(STATE, ())]}
            else:  # whoever is to own it reads it
                names = [name.partition(" ")[2] for name, _, _ in slices.sliced[WEIGHTS]]
                one |= {"part": parts[shard], "names": names, "slices": slices}
                one |= {"restored": len(slices.sliced.get(PUSHED, ()))}
            if meta is not None:
                one |= facts_of_meta(meta, shard)
            found.append(one)
        return found

    async def _bring(self) -> Weights:
        """The weights of now; what shards keep is in the run's state with them.

        Raises:
            ClusterTooSmall: A worker that owned one is lost.
        """
        calls = (self._placement.call(shard, "snapshot") for shard in range(len(self._placement.owners)))
        found = [dict(one) for one in await asyncio.gather(*calls)]
        self.version = min(one["version"] for one in found)
        rows = [
            joined([one[name] for one in found], size)
            for name, size in zip(("weights", "rest"), self._rows.sizes, strict=True)
        ]
        state = self._run.state
        state[STATE] = [np.concatenate(parts) for parts in zip(*(one["state"] for one in found), strict=True)]
        state[META] = meta_of(found)
        return self._rows.weights(rows[0], rows[1], self._others)

    async def _evaluated(
        self, worker: int, app: App, part: str, batch_size: int = EVALUATION_BATCH
    ) -> dict[str, float] | None:
        """Have the weights of now evaluated; see ``Members``.

        Args:
            worker: The one that is asked first: it has nothing else to do.
            app, part, batch_size: See there.
        """
        at = sorted(self._there.members(), key=lambda one: (one[0] != worker, one))
        found = None
        for _ in range(ATTEMPTS):
            moment = next(self._moments)
            await self._mark(moment)
            found = await self._there.evaluated(at, {"moment": moment, "others": self._others}, app, part, batch_size)
            if found is not None:
                break
        await self._mark(0)
        return found

    async def _mark(self, moment: int) -> None:
        await asyncio.gather(*(self._placement.call(n, "mark", moment) for n in range(len(self._placement.owners))))

    async def _written(self, writing: Writing) -> None:
        """Have the owners of the shards write them into a checkpoint."""
        slices, names, rows = writing.slices, self._run.facts.names, self._rows

        async def one(shard: int) -> dict[str, Any]:
            async def there(place: dict[str, Any]) -> dict[str, Any]:
                return dict(await self._placement.call(shard, "write", self._placement.parts[shard], names, place))

            async def here() -> tuple[dict[str, Any], dict[str, Any]]:
                facts = dict(await self._placement.call(shard, "snapshot"))
                return shard_parts(rows, self._placement.parts[shard], names, facts)

            return await writing.slice(shard, there, here)

        found = await asyncio.gather(*(one(shard) for shard in range(len(self._placement.owners))))
        self.version = min(one["version"] for one in found)
        called = [f"{i:04d} {name}" for i, name in enumerate(names)]
        slices.sliced[WEIGHTS] = [(called[i], w.dtype.name, list(w.shape)) for i, w in enumerate(rows.like)]
        slices.sliced[PUSHED] = [(f"{i:04d}", "float32", [rows.sizes[0]]) for i in range(found[0]["kept"])]
        slices.arrays[WEIGHTS] = {called[i]: one for i, one in enumerate(self._others) if one is not None}
        self._run.state[META] = meta_of(found)
        writing.after = len(found)

    async def _unreached(self, worker: int, told: dict[str, Any]) -> None:
        """Raise what kept a replica from a shard.

        Raises:
            ClusterTooSmall: Its worker is lost.
            ConnectError: It is there.
        """
        await self._placement.versions()
        raise ConnectError(
            f"worker {worker} does not reach the shards of worker {told['peer']}: {told['why']}",
            hint="look at the network between the two, or say where that one is reached: ddlf-worker --advertise HOST:PORT",
        )


STATE, META = "push", "shards"
"""Groups of the run's state: what rules keep, as rows; and of each shard what else it is."""


def facts_of_meta(meta: Weights, shard: int) -> dict[str, Any]:
    """What a shard begins with of what is no row."""
    numbers, factors, last = meta
    return {
        **dict(zip(("version", "received", "count"), map(int, numbers[shard]), strict=True)),
        "factors": float(factors[shard]),
        "last": [list(map(int, row[1:])) for row in last if row[0] == shard],
    }


def meta_of(found: Sequence[dict[str, Any]]) -> Weights:
    """Of each shard what is no row, as arrays."""
    last = [[shard, *row] for shard, one in enumerate(found) for row in one["last"]]
    return [
        np.array([[one["version"], one["received"], one["count"]] for one in found], np.int64),
        np.array([one["factors"] for one in found], np.float64),
        np.array(last, np.int64).reshape(-1, 7),
    ]


def joined(parts: Sequence[Row], size: int) -> Row:
    """A row of its slices.

    Raises:
        ConfigError: They are of another length or type.
    """
    row = np.concatenate(parts)
    if row.shape != (size,) or row.dtype != np.float32:
        raise ConfigError(f"the shards' {row.dtype} {row.shape} should be {size} float32 values")
    return row


def last_life(meta: Weights | None) -> int:
    """The last life of any replica, in a run that goes on."""
    return 0 if meta is None or not meta[2].size else int(meta[2][:, 2].max())
