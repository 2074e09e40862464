"""Downpour SGD. Runs on the master, which has no weights unless a callback needs them.

K replicas, one or several in each slot, train at their own pace. The weights are in servers on the workers (Dean et
al. 2012, section 4.1)::

    give each server its range; tell the replicas where the servers are
    a slot's round: its replicas fetch every n_fetch steps, push every n_push steps, and train meanwhile
    a reply says which versions its fetches returned, and how stale its pushes were

If a worker is lost, another worker carries its slot again, from the last push that all servers have. So each push
counts once. The master receives the weights at the end. Servers write them into checkpoints.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ddlf.algorithms.flat_weights import Row, Rows
from ddlf.algorithms.weights import Weights
from ddlf.errors import ClusterTooSmall, ConfigError, ConnectError, DDLFError
from ddlf.events import UpdateRejected, Warned
from ddlf.training.checkpoints.slices import PUSHED, WEIGHTS, Destination, Slices, Written
from ddlf.training.context import App
from ddlf.training.crew.recovery import end_all, first_line
from ddlf.training.evaluation.master import to_its_end
from ddlf.training.evaluation.model import EVALUATION_BATCH
from ddlf.training.exchanges.members import Members
from ddlf.training.progress import WeightsRef, is_unmade, local, shapes, slices_of
from ddlf.training.run import Run
from ddlf.training.slot.pushes import RoundPushes
from ddlf.training.slot.task import Reply
from ddlf.training.strategies.arrivals import arrivals
from ddlf.training.strategies.downpour.client import ReplicaEntry
from ddlf.training.strategies.downpour.placement import Placement, ServerStart
from ddlf.training.strategies.downpour.replica import shares
from ddlf.training.strategies.downpour.state import Counters, Ranges, ServerSettings, ServerState, StoredState, Summary

if TYPE_CHECKING:
    from ddlf.algorithms.codec import Outward
    from ddlf.training.progress import Progress
    from ddlf.training.strategies.downpour.settings import DownpourSettings


@dataclass(frozen=True, slots=True)
class Replicas:
    """The master's training loop of Downpour, whose replicas push gradients to servers.

    Args:
        settings: The settings of Downpour.
        weights_codec: Codec of weights from servers to replicas.
    """

    settings: DownpourSettings
    weights_codec: Outward

    def begin(self, run: Run) -> None:
        """Do nothing before training: the servers have the state of the push rule."""

    async def train(self, run: Run) -> None:
        """Train until all slots have done their rounds or the run ends. Then fetch the final weights to the master."""
        members = run.exchange.weights_out
        assert isinstance(members, Members)
        serving = Serving(run, members, self.settings, self.weights_codec)
        watching = asyncio.ensure_future(serving.watch())
        try:
            async for reply in arrivals(run, bound=self.settings.max_staleness, gate=serving.may_begin):
                await serving.committed(reply)
        finally:
            await end_all([watching])
            await members.close()
            await to_its_end(serving.fetch_final())


WARM = 200
"""Steps that the first replica makes alone before the others begin, but at most half of its first round."""
EVERY = 8
"""Minimum number of pushes between two backups of a server. With more replicas than this, it is the number of
replicas."""
ATTEMPTS = 2
"""Maximum number of attempts to have workers evaluate weights. An attempt fails if a server is handed over
meanwhile."""
LOOK_S = 0.25
"""Seconds between two requests for the servers' versions."""


UNREAD = (
    "the current weights are on the workers: with mode='downpour' the master has them after a checkpoint and at the end",
    "set checkpoint_every: the master then gets the weights with each checkpoint",
)


class Serving:
    """The master's side of the servers of one run: it places them on workers, watches them, and fetches their weights.

    Args:
        run: The run.
        members: Tells the run's tasks which workers have the servers.
        settings: The settings of Downpour.
        codec: Codec of weights from servers to replicas.

    Raises:
        ConfigError: No weight is trained, there are fewer replicas than slots, or more servers than values.
    """

    def __init__(self, run: Run, members: Members, settings: DownpourSettings, codec: Outward) -> None:
        self._run, self._members, self._settings, self._codec = run, members, settings, codec
        unmade = is_unmade(run.progress.weights)  # nobody has made the first weights yet
        weights = (local if unmade else shapes)(run.progress.weights)
        self._rows = Rows.of(weights, run.facts.trainable)
        if not self._rows.sizes[0]:
            raise ConfigError(
                "mode='downpour' steps weights by gradients, and this model has none that are trained",
                hint="make sure that a layer with weights has trainable=True",
            )
        if wide := [name for name, w in zip(run.facts.names, weights, strict=True) if w.dtype == np.float64]:
            sentence = f"shards keep float32 values, so {len(wide)} weights of type float64 lose digits; the first is {wide[0]!r}"
            run.crew.emit(Warned(about="model", why=sentence))
        unserved = set(range(len(weights))) - {*self._rows.trained, *self._rows.rest}
        self._unserved = [
            weight if i in unserved else None for i, weight in enumerate(weights)
        ]  # weights that no server has
        self._replicas = settings.replicas or run.slots
        if self._replicas > run.slots and run.facts.files is not None and not run.facts.files.on_disk:
            raise ConfigError(
                f"replicas={self._replicas} on {run.slots} slots read in turn from several places, but {run.facts.files} can only be read in order",
                hint="leave out replicas, so that each slot has one replica; or make partition files: ddlf data split",
            )
        self._layers = (
            [name.rpartition("/")[0] or name for name in run.facts.names] if settings.cut == "layers" else None
        )
        if settings.shards:
            self.cut(settings.shards)  # refuse impossible settings before a worker receives anything
        n = settings.softsync or self._replicas
        self._collects = self._replicas // n
        self._placement = Placement(run, members, settings, self._restored)
        run.crew.finishes = False  # a replica trains until the end of the run
        run.crew.hand_back.append(self._placement.hand_back)
        self._lives = itertools.count(1 + last_life(run.state.get(META)))
        self._brought = run.version  # the commit whose weights are on the master
        self._home = run.progress.snapshot()
        self._moments = itertools.count(1)
        self._warned = False
        self.version = 0
        self._begun = run.version
        self._warm = settings.warm_start if settings.warm_start is not None else self._some_pushes()
        members.begin = self._begin
        members.says = lambda slot, number, holds: self.task_entry(slot, number).to_message()

    def cut(self, shards: int) -> list[Ranges]:
        """Divide the weights among a number of servers. Return the ranges of both rows for each one."""
        return self._rows.cut(shards, self._layers)

    async def looked(self) -> None:
        """Do what follows from a look at the servers. Here nothing."""

    # -- before and while replicas train ------------------------------------------------------------------------------

    def task_entry(self, slot: int, number: int) -> ReplicaEntry:
        """Return the entry about a slot's replicas in the task of its round ``number``.

        Each call counts as a new incarnation of the replicas.
        """
        return ReplicaEntry(
            replicas=list(range(slot, self._replicas, self._run.slots)),
            all=self._replicas,
            life=next(self._lives),
            alone=max(0, self._warm - self.version) if (slot, number) == (0, 0) else 0,
        )

    def may_begin(self, slot: int, number: int) -> bool:
        """Return whether a slot's round may begin.

        At the start of the run only the first replica trains for a while.
        """
        first = self._run.progress.slot_rounds[0]
        return slot == 0 or first > 0 or self.version >= self._warm

    async def watch(self) -> None:
        """Check the servers while replicas train: their progress, and whether their workers are present."""
        warming = True
        while True:
            await asyncio.sleep(LOOK_S / 5 if warming else LOOK_S)
            if not self._placement.owners:
                continue
            before = dict(self._placement.reached)
            try:
                versions = await self._placement.versions()
                await self._placement.balance()
                await self.looked()
            except ClusterTooSmall:
                return  # the crew reports this loss
            for replica, reached in self._placement.reached.items():
                if reached != before.get(replica):
                    self._run.crew.progressed(replica % self._run.slots)
            if versions:
                self.version = min(versions)
            if warming and self.may_begin(-1, 0):
                warming = False
                if self._run.loops is not None:
                    self._run.loops.turn()

    async def _begin(self) -> None:
        """Make sure that the servers are on workers, and that all workers know which worker has which server.

        Raises:
            ClusterTooSmall: A server is lost, and there is no backup or checkpoint to continue from.
        """
        if self._placement.owners:
            await self._placement.replace_lost()
            await self._placement.announce_to_new()
        else:
            parts = self.cut(self._shards_wanted(self._placement.capacity()))
            await self._placement.assign(parts, self._starts(parts, self._run.progress))

    # -- after a round ------------------------------------------------------------------------------------------------

    async def committed(self, reply: Reply) -> None:
        """Do what follows from a slot's finished round: report lost and refused pushes, and commit the round.

        Raises:
            ConnectError: The slot's worker did not reach a server, although the server's worker is present.
            ClusterTooSmall: The server's worker is lost.
        """
        run, pushed = self._run, reply.pushed or RoundPushes()
        if pushed.unreached is not None:
            await self._raise_unreached(reply.worker, pushed.unreached, pushed.reason)
        for shard, count in pushed.lost:
            if count:
                run.verdicts.append(
                    f"slot {reply.slot + 1}: {count} push{'es' * (count > 1)} lost with shard {shard + 1}"
                )
        if refused := pushed.refused:
            sentence = f"{refused} push{'es' * (refused > 1)} had NaN or infinite values, and {'were' if refused > 1 else 'was'} left out"
            run.verdicts.append(f"slot {reply.slot + 1}: {sentence} (worker {reply.worker})")
            run.crew.emit(
                UpdateRejected(round=reply.task.round + 1, slot=reply.slot + 1, worker=reply.worker, why=sentence)
            )
        version = run.version + 1
        due = run.keeper is not None and run.keeper.is_due(version)
        shown = run.is_last(reply) or (run.reporter.shows and run.loops and run.loops.will_end_epoch(reply.task.round))
        evaluated = partial(self._evaluated, reply.worker)
        remote = partial(
            WeightsRef,
            like=list(self._rows.like),
            group=WEIGHTS,
            from_workers=self._bring,
            evaluate=evaluated,
            unread=UNREAD,
        )
        slices = None
        if run.keeper is not None and due and not shown:
            slices = await run.keeper.sliced(run.progress, self._written)
        weights: Weights | WeightsRef
        if slices is not None:
            weights, like = remote(slices=slices), np.broadcast_to(np.float32(0), self._rows.sizes[0])
            rows = [like] * len(slices.sliced[PUSHED])
            run.progress.keep(STATE, WeightsRef(like=rows, group=PUSHED, slices=slices))
        elif due or shown:
            weights = await self._bring()
        else:
            weights = remote()
        await run.commit(weights, [reply])
        if shown and run.progress.weights is not weights and not self._warned:
            self._warned = True
            sentence = "callbacks have set weights, which has no effect before training is over: replicas continue with the weights of the shards"
            run.crew.emit(Warned(about="callback", why=sentence))
        if due or shown:
            self._brought, self._home = run.version, run.progress.snapshot()

    async def fetch_final(self) -> None:
        """Fetch the final weights to the master.

        If they are lost, restore the master's last weights, and undo later updates.
        """
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
            sentence = f"the weights after update {reached} are unavailable ({first_line(error)}): the run returns to update {progress.version}"
            run.crew.emit(Warned(about="model", why=sentence))
        finally:
            await self._placement.close()

    # -- parts --------------------------------------------------------------------------------------------------------

    def _some_pushes(self) -> int:
        """Return how many pushes of the first replica must arrive before the others begin.

        This is half of the pushes of its first round, at most ``WARM``.
        """
        run = self._run
        if self._replicas == 1 or not run.progress.epochs:
            return 0
        span = run.progress.span(0)
        batches = math.ceil((span.end - span.begin) / run.slots / run.facts.batch_size)
        first = shares(batches, len(range(0, self._replicas, run.slots)))[0]
        pushes: int = math.ceil(first / self._settings.push)
        return min(WARM, pushes // 2)

    def _shards_wanted(self, workers: int) -> int:
        """Return how many servers the run must have, from the checkpoint or the settings."""
        if META in self._run.state and self._run.progress.group(STATE) is not None:
            return len(self._run.state[META][0])
        most = (
            self._rows.sizes[0]
            if self._layers is None
            else len({self._layers[i] for i in self._rows.trained if self._rows.like[i].size})
        )
        shards: int = self._settings.shards or min(workers, most)
        return shards

    def _restored(self, shard: int) -> tuple[ServerStart, str]:
        """Return the last state of a lost server that the master had, to start it again on another worker.

        Also return a sentence about the pushes lost since.

        Raises:
            ClusterTooSmall: There is no checkpoint. The message continues a sentence about the loss.
        """
        home = self._home
        if self._run.keeper is None or not home.version:
            raise ClusterTooSmall(
                " and there is no checkpoint yet" if self._run.keeper is not None else "",
                hint="resume from the last checkpoint: checkpoint=DIR, resume='auto'; with copies=1 and another worker nothing is lost",
            )
        start = self._starts(self._placement.parts, home)[shard]
        since = self._run.progress.records[home.version :]
        column = 2 + len(self._placement.parts) + shard
        received = start.state.counters.received
        lost = sum(push[column] >= received for record in since for push in record.pushes)
        return start, (
            f"it continues from update {home.version}, "
            f"and {lost} push{'es' * (lost != 1)} to it of the {len(since)} update{'s' * (len(since) != 1)} since are lost"
        )

    def _starts(self, parts: Sequence[Ranges], progress: Progress) -> list[ServerStart]:
        """Return the state that each server starts with, cut from the whole weights and the state of the push rule."""
        rows, slices, rule_state = self._rows, slices_of(progress.weights), progress.group(STATE)
        if slices is None:
            weights, rule_rows = local(progress.weights), local(rule_state or [])
            trained, rest = rows.row(weights, rows.trained), rows.row(weights, rows.rest)
        meta = progress.state.get(META) if rule_state is not None else None
        starts = []
        for shard, ((begin, end), (low, high)) in enumerate(parts):
            settings = ServerSettings(
                part=(begin, end),
                rule=str(self._settings.rule),
                staleness=str(self._settings.staleness),
                codec=str(self._codec),
                collects=self._collects,
                every=max(self._replicas, EVERY),
            )
            counters = Counters() if meta is None else Counters.from_arrays(meta, shard)
            state: ServerState | StoredState
            if slices is None:
                state = ServerState(
                    settings=settings,
                    counters=counters,
                    weights=trained[begin:end],
                    rest=rest[low:high],
                    rule_rows=[row[begin:end] for row in rule_rows],
                )
            else:  # the server's owner reads its values
                state = StoredState(
                    settings=settings,
                    counters=counters,
                    rest=(low, high),
                    names=[name.partition(" ")[2] for name, _, _ in slices.sliced[WEIGHTS]],
                    rule_rows=len(slices.sliced.get(PUSHED, ())),
                )
            starts.append(ServerStart(state, slices))
        return starts

    async def _snapshot(self, shard: int) -> ServerState:
        """Return the current state of a server."""
        return ServerState.from_message(await self._placement.call(shard, "snapshot"))

    async def _bring(self) -> Weights:
        """Fetch the current weights to the master, and put the servers' state into the run's state.

        Raises:
            ClusterTooSmall: The worker of a server is lost.
        """
        states = await asyncio.gather(*map(self._snapshot, range(len(self._placement.owners))))
        self.version = min(state.counters.version for state in states)
        trained_size, rest_size = self._rows.sizes
        trained = joined([state.weights for state in states], trained_size)
        rest = joined([state.rest for state in states], rest_size)
        rule_rows = [np.concatenate(parts) for parts in zip(*(state.rule_rows for state in states), strict=True)]
        self._run.progress.keep(STATE, rule_rows)
        self._run.state[META] = Counters.to_arrays([state.counters for state in states])
        return self._rows.weights(trained, rest, self._unserved)

    async def _evaluated(
        self, worker: int, app: App, part: str, batch_size: int = EVALUATION_BATCH
    ) -> dict[str, float] | None:
        """Have workers evaluate the current weights on a part of the data, like ``Members.evaluated``.

        Args:
            worker: The worker to ask first, because it is idle.
            app, part, batch_size: Arguments of ``Members.evaluated``.
        """
        at = sorted(self._members.members(), key=lambda member: (member[0] != worker, member))
        metrics = None
        for _ in range(ATTEMPTS):
            moment = next(self._moments)
            await self._mark(moment)
            metrics = await self._members.evaluated(
                at, {"moment": moment, "others": self._unserved}, app, part, batch_size
            )
            if metrics is not None:
                break
        await self._mark(0)
        return metrics

    async def _mark(self, moment: int) -> None:
        await asyncio.gather(*(self._placement.call(n, "mark", moment) for n in range(len(self._placement.owners))))

    async def _written(self, slices: Slices) -> None:
        """Have the workers that own servers write them into a checkpoint."""
        names, rows = self._run.facts.names, self._rows

        async def write_shard(shard: int) -> Summary:
            async def write_on_worker(destination: Destination) -> Written[Summary]:
                answer: Written[Summary] = await self._placement.call(
                    shard, "write", self._placement.parts[shard], names, destination
                )
                return answer

            async def bring_to_master() -> tuple[dict[str, Row], Summary]:
                state = await self._snapshot(shard)
                return state.to_arrays(rows, self._placement.parts[shard], names), state.summary()

            return await slices.write_one(shard, write_on_worker, bring_to_master)

        summaries = await asyncio.gather(*(write_shard(shard) for shard in range(len(self._placement.owners))))
        self.version = min(summary.counters.version for summary in summaries)
        called = [f"{i:04d} {name}" for i, name in enumerate(names)]
        slices.sliced[WEIGHTS] = [(called[i], w.dtype.name, list(w.shape)) for i, w in enumerate(rows.like)]
        slices.sliced[PUSHED] = [(f"{i:04d}", "float32", [rows.sizes[0]]) for i in range(summaries[0].rule_rows)]
        slices.arrays[WEIGHTS] = {called[i]: weight for i, weight in enumerate(self._unserved) if weight is not None}
        self._run.state[META] = Counters.to_arrays([summary.counters for summary in summaries])

    async def _raise_unreached(self, worker: int, unreached: int, reason: str) -> None:
        """Raise the error that explains why a replica could not reach a server.

        Args:
            worker: The worker of the replica.
            unreached: The worker of the server.
            reason: Why it could not be reached.

        Raises:
            ClusterTooSmall: The server's worker is lost.
            ConnectError: The server's worker is present.
        """
        await self._placement.versions()
        raise ConnectError(
            f"worker {worker} does not reach the shards of worker {unreached}: {reason}",
            hint="check the network between the two workers, or set the address of that worker: ddlf-worker --advertise HOST:PORT",
        )


STATE, META = "push", "shards"
"""Names of two groups of the run's state: the state of the push rules, and the counters of each server."""


def joined(parts: Sequence[Row], size: int) -> Row:
    """Join the servers' ranges into one whole row of values.

    Raises:
        ConfigError: The ranges have another length or type.
    """
    row = np.concatenate(parts)
    if row.shape != (size,) or row.dtype != np.float32:
        raise ConfigError(f"the shards' {row.dtype} {row.shape} should be {size} float32 values")
    return row


def last_life(meta: Weights | None) -> int:
    """Return the highest incarnation (count of begun rounds) of any replica in the checkpoint to resume from.

    Return 0 for none.
    """
    return 0 if meta is None or not meta[2].size else int(meta[2][:, 2].max())
