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
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.algorithms.flat_weights import Row, Rows, Slice
from ddlf.algorithms.weights import Weights
from ddlf.errors import ClusterTooSmall, ConfigError, ConnectError, DDLFError
from ddlf.events import UpdateRejected, Warned
from ddlf.training.checkpoints.slices import PUSHED, WEIGHTS, Slices
from ddlf.training.context import App
from ddlf.training.crew.recovery import end_all, first_line
from ddlf.training.evaluation.master import to_its_end
from ddlf.training.evaluation.model import EVALUATION_BATCH
from ddlf.training.exchanges.members import Members
from ddlf.training.progress import WeightsRef, is_unmade, local, shapes, slices_of
from ddlf.training.run import Run
from ddlf.training.slot.task import Reply
from ddlf.training.strategies.arrivals import arrivals
from ddlf.training.strategies.downpour.placement import Placement
from ddlf.training.strategies.downpour.replica import shares
from ddlf.training.strategies.downpour.server import shard_parts

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
        members.begin, members.says = self._begin, self.task_entry

    def cut(self, shards: int) -> list[tuple[Slice, Slice]]:
        """Divide the weights among a number of servers. Return the ranges of both rows for each one."""
        return self._rows.cut(shards, self._layers)

    async def looked(self) -> None:
        """Do what follows from a look at the servers. Here nothing."""

    # -- before and while replicas train ------------------------------------------------------------------------------

    def task_entry(self, slot: int, number: int, holds: bool) -> dict[str, Any]:
        """Return the entry about a slot's replicas in its task.

        Each call counts as a new incarnation of the replicas.
        """
        ids = list(range(slot, self._replicas, self._run.slots))
        return {
            "replicas": ids,
            "all": self._replicas,
            "life": next(self._lives),
            "alone": max(0, self._warm - self.version) if (slot, number) == (0, 0) else 0,
        }

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
            await self._placement.assign(parts, self._facts(parts, self._run.progress))

    # -- after a round ------------------------------------------------------------------------------------------------

    async def committed(self, reply: Reply) -> None:
        """Do what follows from a slot's finished round: report lost and refused pushes, and commit the round.

        Raises:
            ConnectError: The slot's worker did not reach a server, although the server's worker is present.
            ClusterTooSmall: The server's worker is lost.
        """
        run, pushed = self._run, reply.pushed or {}
        if "peer" in pushed:
            await self._unreached(reply.worker, pushed)
        if lost := [(shard, count) for shard, count in pushed.get("lost", ()) if count]:
            for shard, count in lost:
                run.verdicts.append(
                    f"slot {reply.slot + 1}: {count} push{'es' * (count > 1)} lost with shard {shard + 1}"
                )
        if refused := pushed.get("refused"):
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

    def _restored(self, shard: int) -> tuple[dict[str, Any], str]:
        """Return the last facts about a lost server that the master had, to start it again on another worker.

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
        facts = self._facts(self._placement.parts, home)[shard]
        since = self._run.progress.records[home.version :]
        column = 2 + len(self._placement.parts) + shard
        lost = sum(push[column] >= facts["received"] for record in since for push in record.pushes)
        return facts, (
            f"it continues from update {home.version}, "
            f"and {lost} push{'es' * (lost != 1)} to it of the {len(since)} update{'s' * (len(since) != 1)} since are lost"
        )

    def _facts(self, parts: Sequence[Any], progress: Progress) -> list[dict[str, Any]]:
        """Return the facts that each server starts with, cut from the whole weights and the state of the push rule."""
        rows, slices, state = self._rows, slices_of(progress.weights), progress.group(STATE)
        if slices is None:
            weights, pushed = local(progress.weights), local(state or [])
            trained, rest = rows.row(weights, rows.trained), rows.row(weights, rows.rest)
        common_facts = {
            "rule": str(self._settings.rule),
            "staleness": str(self._settings.staleness),
            "codec": str(self._codec),
            "collects": self._collects,
            "every": max(self._replicas, EVERY),
        }
        meta = progress.state.get(META) if state is not None else None
        facts_of_servers = []
        for shard, ((begin, end), (low, high)) in enumerate(parts):
            facts: dict[str, Any] = {**common_facts, "part": (begin, end)}
            if slices is None:
                facts |= {"weights": trained[begin:end], "rest": rest[low:high]}
                facts |= {"state": [row[begin:end] for row in pushed]}
            else:  # the server's owner reads its values
                names = [name.partition(" ")[2] for name, _, _ in slices.sliced[WEIGHTS]]
                facts |= {"part": parts[shard], "names": names, "slices": slices}
                facts |= {"restored": len(slices.sliced.get(PUSHED, ()))}
            if meta is not None:
                facts |= facts_of_meta(meta, shard)
            facts_of_servers.append(facts)
        return facts_of_servers

    async def _bring(self) -> Weights:
        """Fetch the current weights to the master, and put the servers' state into the run's state.

        Raises:
            ClusterTooSmall: The worker of a server is lost.
        """
        calls = (self._placement.call(shard, "snapshot") for shard in range(len(self._placement.owners)))
        snapshots = [dict(snapshot) for snapshot in await asyncio.gather(*calls)]
        self.version = min(snapshot["version"] for snapshot in snapshots)
        rows = [
            joined([snapshot[name] for snapshot in snapshots], size)
            for name, size in zip(("weights", "rest"), self._rows.sizes, strict=True)
        ]
        pushed = [np.concatenate(parts) for parts in zip(*(snapshot["state"] for snapshot in snapshots), strict=True)]
        self._run.progress.keep(STATE, pushed)
        self._run.state[META] = meta_of(snapshots)
        return self._rows.weights(rows[0], rows[1], self._unserved)

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

        async def write_shard(shard: int) -> dict[str, Any]:
            async def write_on_worker(destination: dict[str, Any]) -> dict[str, Any]:
                return dict(
                    await self._placement.call(shard, "write", self._placement.parts[shard], names, destination)
                )

            async def bring_to_master() -> tuple[dict[str, Any], dict[str, Any]]:
                facts = dict(await self._placement.call(shard, "snapshot"))
                return shard_parts(rows, self._placement.parts[shard], names, facts)

            return await slices.write_one(shard, write_on_worker, bring_to_master)

        written = await asyncio.gather(*(write_shard(shard) for shard in range(len(self._placement.owners))))
        self.version = min(facts["version"] for facts in written)
        called = [f"{i:04d} {name}" for i, name in enumerate(names)]
        slices.sliced[WEIGHTS] = [(called[i], w.dtype.name, list(w.shape)) for i, w in enumerate(rows.like)]
        slices.sliced[PUSHED] = [(f"{i:04d}", "float32", [rows.sizes[0]]) for i in range(written[0]["kept"])]
        slices.arrays[WEIGHTS] = {called[i]: weight for i, weight in enumerate(self._unserved) if weight is not None}
        self._run.state[META] = meta_of(written)

    async def _unreached(self, worker: int, pushed: dict[str, Any]) -> None:
        """Raise the error that explains why a replica could not reach a server.

        Raises:
            ClusterTooSmall: The server's worker is lost.
            ConnectError: The server's worker is present.
        """
        await self._placement.versions()
        raise ConnectError(
            f"worker {worker} does not reach the shards of worker {pushed['peer']}: {pushed['why']}",
            hint="check the network between the two workers, or set the address of that worker: ddlf-worker --advertise HOST:PORT",
        )


STATE, META = "push", "shards"
"""Names of two groups of the run's state: the state of the push rules, and the counters of each server."""


def facts_of_meta(meta: Weights, shard: int) -> dict[str, Any]:
    """Return those facts a server starts with that a checkpoint stores as small arrays, made by ``meta_of``."""
    numbers, factors, last = meta
    return {
        **dict(zip(("version", "received", "count"), map(int, numbers[shard]), strict=True)),
        "factors": float(factors[shard]),
        "last": [list(map(int, row[1:])) for row in last if row[0] == shard],
    }


def meta_of(snapshots: Sequence[dict[str, Any]]) -> Weights:
    """Return the small facts of each server, such as its version, as arrays for a checkpoint.

    Weights and the state of the push rule are stored separately, as rows.
    """
    last = [[shard, *row] for shard, snapshot in enumerate(snapshots) for row in snapshot["last"]]
    return [
        np.array([[snapshot["version"], snapshot["received"], snapshot["count"]] for snapshot in snapshots], np.int64),
        np.array([snapshot["factors"] for snapshot in snapshots], np.float64),
        np.array(last, np.int64).reshape(-1, 7),
    ]


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
