"""Events of a training by peers, for the run's folder, its report and the dashboard. Runs on the server.

A server may take a thousand posts a second, so ``Teller`` collects them, and ``tick`` reports them a few times a second:
an event for each peer that has posted, and one record of all posts. Each record counts as an asynchronous update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import fmean

from ddlf import events as e
from ddlf.events.record import RoundRecord
from ddlf.monitor.runs import folder, summary
from ddlf.monitor.runs.recording import FolderWriter
from ddlf.peers.entries import Arrived, Entry, Left, Posted, Summed, Validated
from ddlf.peers.ledger import WeightLedger
from ddlf.peers.plan import LAST, Plan
from ddlf.peers.wire import FLOAT32


@dataclass
class Posts:
    """The posts of one peer since the last tick."""

    new: int = 0
    batches: int = 0
    accuracy: float = float("nan")
    loss: float = float("nan")


class Teller:
    """Turns entries of the journal into events.

    Args:
        ledger: The ledger, which has applied the entries.
        tell: Gets each event.
        set_bytes: Length of a set, as it travels.

    Attributes:
        epsilons: Returns the epsilon of each peer; without noise, there is none.
    """

    def __init__(self, ledger: WeightLedger, tell: Callable[[e.Event], object], set_bytes: int) -> None:
        self.epsilons: Callable[[], dict[int, float]] = dict
        self._ledger = ledger
        self._tell = tell
        self._set_bytes = set_bytes
        self._posts: dict[int, Posts] = {}
        self._sent_bytes = 0
        self._ticked_at = 0.0
        self._validated = 0

    def begin(self, name: str, seed: int, now: float) -> None:
        """Tell that the run begins, or continues."""
        ledger, plan = self._ledger, self._ledger.plan
        rounded = "" if plan.codec == FLOAT32 else f", sets as {plan.codec}"
        mode = f"peers in {'swaps' if plan.way == 'swap' else 'rounds'}{rounded}"
        self._tell(
            e.RunBegan(
                run=ledger.run,
                app=name,
                mode=mode,
                epochs=0,
                batch_size=plan.batch_size,
                worker_epochs=1,
                seed=seed,
                in_rounds=False,
            )
        )
        version = ledger.counts.get("posts", 0)
        ends_after_s = plan.end if plan.end >= 1 else 0.0
        self._tell(
            e.TrainingBegan(
                mode=mode,
                samples=0,
                slots=0,
                fixed=False,
                workers=len(ledger.present),
                version=version,
                in_rounds=False,
                ends_after_s=ends_after_s,
                passed_s=now - ledger.first_at if ends_after_s and ledger.first_at else 0.0,
            )
        )
        self._ticked_at = now

    def took(self, entry: Entry) -> None:
        """Take an entry that the ledger has applied."""
        match entry:
            case Arrived():
                self._tell(e.PeerArrived(peer=entry.peer, name=self._name(entry.peer), samples=entry.samples))
            case Left():
                name = self._name(entry.peer)
                self._tell(e.PeerLeft(peer=entry.peer, name=name, why=entry.why, removed=entry.removed))
            case Posted():
                posts = self._posts.setdefault(entry.peer, Posts())
                posts.new += 1
                posts.batches += entry.updates
                posts.accuracy, posts.loss = entry.accuracy, entry.loss
            case Summed():  # peers report no loss and no accuracy: these would tell about one peer's data
                for peer, updates in zip(entry.peers, entry.updates, strict=True):
                    posts = self._posts.setdefault(peer, Posts())
                    posts.new += 1
                    posts.batches += updates
            case Validated():
                self._tell(
                    e.SetValidated(
                        set=entry.set,
                        peer=entry.peer,
                        accuracy=entry.accuracy,
                        loss=entry.loss,
                        samples=entry.samples,
                    )
                )

    def report(self, kind: str, text: str) -> None:
        """Tell something that the terminal has shown, too."""
        self._tell(e.PeersTold(what=kind, why=text))

    def sent(self, bytes: int) -> None:
        """Take the length of a set that was sent to a peer."""
        self._sent_bytes += bytes

    def tick(self, now: float) -> RoundRecord | None:
        """Tell the posts since the last tick, and the means of the last validations. Return the record; None without
        posts.
        """
        seconds, posts = now - self._ticked_at, self._posts
        self._ticked_at, self._posts = now, {}
        if not posts:
            return None
        ledger, samples = self._ledger, 0
        for peer, counts in posts.items():
            trained = self._samples(peer, counts.batches)
            samples += trained
            self._tell(
                e.PeerPosted(
                    peer=peer,
                    name=self._name(peer),
                    posts=ledger.members[peer].number,
                    new=counts.new,
                    batches=counts.batches,
                    samples=trained,
                    seconds=seconds,
                    accuracy=counts.accuracy,
                    loss=counts.loss,
                    bytes_back=counts.new * self._set_bytes,
                )
            )
        test = {}
        if ledger.validations and ledger.validation_count != self._validated:
            self._validated = ledger.validation_count
            last = ledger.validations[-LAST:]
            test = _finite({name: fmean(getattr(counts, name) for counts in last) for name in ("accuracy", "loss")})
        metrics = {name: [getattr(counts, name) for counts in posts.values()] for name in ("accuracy", "loss")}
        new = sum(counts.new for counts in posts.values())
        epsilons = self.epsilons()
        largest = {"epsilon": max(epsilons.values())} if epsilons else {}
        record = RoundRecord(
            round=max(ledger.members[peer].number for peer in posts),
            rounds=0,
            slot=max(posts),
            version=ledger.counts.get("posts", 0),
            epochs=1,
            samples=samples,
            seconds=seconds,
            compute_s=0.0,
            transfer_s=0.0,
            merge_s=0.0,
            bytes_out=self._sent_bytes,
            bytes_back=new * self._set_bytes,
            slots=len(ledger.present),
            metrics=_finite(
                {name: fmean(finite) for name, counts in metrics.items() if (finite := [v for v in counts if v == v])}
            )
            | largest,
            epsilons={str(peer): epsilon for peer, epsilon in epsilons.items()},
            test=test,
        )
        self._sent_bytes = 0
        self._tell(e.Committed(record=record))
        return record

    def end(self, how: e.How, reason: str) -> None:
        """Tell that the run has ended."""
        self._tell(e.RunEnded(run=self._ledger.run, how=how, version=self._ledger.counts.get("posts", 0), why=reason))

    def _samples(self, peer: int, batches: int) -> int:
        """Return the samples in batches of a peer. The last batch of each pass over its data may be smaller."""
        samples = self._ledger.members[peer].samples
        return round(batches * samples / ceil(samples / self._ledger.plan.batch_size))

    def _name(self, peer: int) -> str:
        return self._ledger.members[peer].name or f"peer {peer}"


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value == value}


class PeersWriter(FolderWriter):
    """Writes the folder of a run with peers: events, metrics, summary and report.

    Args:
        path: The folder.
        plan: The plan, whose fields are the settings of the run.
        name: Name of the model.
        continues: Whether an earlier server has begun the run.
    """

    def __init__(self, path: Path, plan: Plan, name: str, *, continues: bool) -> None:
        self._plan = plan
        super().__init__(None, path, {}, name=name, continues=continues)

    def _write_summary(self) -> None:
        rows = {name: getattr(self._plan, name) for name in self._plan.__slots__}
        self._summary["settings"] = {name: {"value": value, "origin": "plan"} for name, value in rows.items()}
        self._summary |= {**summary.environment(), "workers": []}
        if self._last is not None:
            self._summary["results"] = summary.results(self._last, self._test)
        folder.write_json(self._path / folder.SUMMARY, self._summary)
