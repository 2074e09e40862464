"""Downpour SGD: its settings. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddlf.settings.checks import PUSHED, STALENESS, OneOf, Whole
from ddlf.settings.setting import FACT, FILE, Setting
from ddlf.training.spec import Refusal, RunSpec
from ddlf.training.strategy import MAX_STALENESS, STALENESS_HELP, Strategy

if TYPE_CHECKING:
    from ddlf.algorithms.push_rules import Pushed
    from ddlf.algorithms.staleness import Staleness


@dataclass(frozen=True)
class DownpourSettings(Strategy):
    """The settings of Downpour SGD, and the checks that refuse bad ones. ``Downpour`` adds the code that trains."""

    name: ClassVar[str] = "downpour"
    words: ClassVar[str] = "Downpour"
    about: ClassVar[str] = "as gradients pushed to servers on the workers"
    encodes_small: ClassVar[bool] = True  # a shard is one row of values
    keeps_optimizer: ClassVar[bool] = False
    about_rates: ClassVar[str] = "applies only between two fetches of a replica; shards step at the rate of push_rule"
    role: ClassVar[str] = "ddlf.training.strategies.downpour.replica:DownpourReplica"
    role_of_part: ClassVar[str] = "ddlf.training.strategies.downpour.part:DownpourPart"
    slot_parts: ClassVar[tuple[str, ...] | None] = ("optimizer", "callbacks")
    no_peer: ClassVar[str] = (
        "its weights are on servers, which change them at each push, so there is no time for a merge"
    )
    unused: ClassVar[dict[str, str]] = {
        "worker_epochs": "a round is one epoch of a replica, or worker_steps of it",
        "exchange": "replicas push to servers and fetch from them",
        "codec": "gradients are sent without a codec",
        "optimizer_state": "Downpour does not use the state of the compiled optimizer; push_rule has its own state",
        "local_rule": "replicas begin with new weights every n_fetch steps",
        "balance": "replicas train at their own pace",
        "rate_decay": "push_rule determines the effect of a push",
        "multipliers": "push_rule decides how far a gradient moves each weight; freeze layers by layer.trainable = False",
    }

    replicas: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="one in each slot"),
        "number of model replicas, distributed among the slots (default: one per slot)",
        "N",
        FILE | FACT,
    )
    """Replicas on the same worker take turns in random order."""

    fetch: Setting[int, int] = Setting(
        1,
        Whole(1),
        "steps between two fetches of the weights by a replica",
        "N",
        FILE | FACT,
        flat="n_fetch",
    )

    push: Setting[int, int] = Setting(
        1, Whole(1), "steps whose gradients a replica pushes together", "N", FILE | FACT, flat="n_push"
    )
    """A push is the sum of these gradients."""

    rule: Setting[Pushed, Pushed | str] = Setting(
        "adagrad",
        PUSHED,
        "optimizer that the servers apply to pushed gradients",
        "RULE",
        FACT,
        flat="push_rule",
    )
    """Between two fetches a replica steps with the model's own optimizer, including its learning rate, clipping and
    weight decay."""

    staleness: Setting[Staleness, Staleness | str] = Setting(
        "inverse", STALENESS, STALENESS_HELP, "RULE", FACT, unset=None
    )
    max_staleness: Setting[int | None, int | None] = MAX_STALENESS

    shards: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="one on each worker"),
        "number of servers that hold the weights, each a part (default: one per worker)",
        "N",
        FILE | FACT,
    )

    cut: Setting[str, str] = Setting(
        "equal",
        OneOf("equal", "layers"),
        "how the weights are divided among the servers: equal parts, or whole layers (layers)",
        "",
        FILE | FACT,
        flat="shard_cut",
    )
    """``layers`` never splits a layer between two servers. The parts are as equal as this allows."""

    servers: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="those that train"),
        "number of workers that only hold weights and do not train: the last N of the cluster",
        "N",
        FILE,
        flat="shard_workers",
    )
    """By default ``slots`` is the number of the other workers. If such a worker is lost, its part continues on the
    worker with the copy. These workers train only when no other worker is left."""

    copies: Setting[int | None, int | None] = Setting(
        None,
        Whole(0, none="one, where there is another worker"),
        "copies of each part of the weights, on other workers (default: 1)",
        "N",
        FILE,
    )
    """No copies are made if there is only one worker."""

    softsync: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="a step for each push"),
        "combine pushes: a server takes one step with the mean of replicas/N pushes",
        "N",
        FACT,
    )
    """By default a server takes one step per push."""

    warm_start: Setting[int | None, int | None] = Setting(
        None,
        Whole(0, none="at most 200, and half of the first replica's first round"),
        "steps that the first replica takes alone before the others start",
        "N",
        FACT,
    )
    """By default at most 200, and at most half of the first replica's first round. The warm start always ends with
    the first slot's first round."""

    def has_fixed_slots(self, spec: RunSpec) -> bool:
        """Return True: the number of slots must not change during a run, since their replicas are numbered."""
        return True

    @property
    def extra_workers(self) -> int:
        """The number of workers that only have servers, and train nothing."""
        return self.servers or 0

    def refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield an error for each setting that replicas or servers cannot support."""
        weights = spec.exchange.weights_codec
        yield Refusal(
            str(spec.local.clip).startswith("rolling"),
            f"clip={str(spec.local.clip)!r} has no effect in Downpour training: it uses the norms of earlier gradients, "
            "and the replicas of a worker step with one optimizer in turn; agc does not",
            "leave clip at None, or train in mode 'sync'",
        )
        yield Refusal(
            weights.delta,
            f"weights_codec={str(weights)!r} is of differences, and a shard does not keep the weights of each replica",
            "use 'float16' or 'bfloat16'",
        )
        yield Refusal(
            spec.local.precision == "mixed_float16",
            "precision='mixed_float16' scales the loss on each worker, but replicas push gradients without this scale",
            "use precision='mixed_bfloat16'",
        )
        cut = getattr(spec.exchange, "parts", None) if spec.exchange.spans_workers else None
        yield Refusal(
            cut is not None and cut.within > 1,
            f"split={str(cut)!r} cuts layers, and with mode='downpour' a server has whole layers of a part",
            "use split='stages:N', or train in mode 'sync'",
        )
        yield Refusal(
            cut is not None and self.replicas not in (None, spec.slots or 1),
            f"replicas={self.replicas} share slots, but with split a slot is a group of workers that carries one replica",
            "leave replicas out, and set slots",
        )
        yield Refusal(
            spec.exchange.update_policy == "clip",
            "update_policy='clip' compares updates of whole rounds, but Downpour has no rounds of all slots",
            "use 'stop', or 'reject' to leave out NaN and infinite values",
        )

    def slot_refusals(self, slots: int, fewest: int) -> Iterator[Refusal]:
        """Yield an error if there are fewer replicas than slots, or than pushes in a step with ``softsync``."""
        replicas = self.replicas or slots
        yield Refusal(
            replicas < slots,
            f"replicas={replicas} are fewer than the {slots} slots that carry them",
            f"set slots={replicas}, or leave replicas out: then each slot has one replica",
        )
        yield Refusal(
            0 < replicas < (self.softsync or 0),
            f"softsync must be from 1 to the {replicas} replicas, got {self.softsync}",
            "",
        )

    def file_refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield an error if the run is to leave out damaged data files, which Downpour cannot."""
        yield Refusal(
            spec.data.on_bad == "skip",
            "on_bad='skip' cannot be combined with mode='downpour': replicas number the batches of all samples before they read any",
            "leave out on_bad, or train in mode 'async'",
        )

    def worker_refusals(self, workers: int, one_at_a_time: bool) -> Iterator[Refusal]:
        """Yield an error if the workers do not suit Downpour.

        They may be unable to answer while they compute, or too few for backups and servers.
        """
        present = f"there {'are' if workers > 1 else 'is'} {workers}"
        yield Refusal(
            one_at_a_time,
            "mode='downpour' needs workers that answer while others compute, but workers of in_process_cluster do one thing at a time",
            "use local_cluster",
        )
        yield Refusal(
            bool(self.copies) and (self.copies or 0) >= workers,
            f"copies={self.copies} of each shard and the shard itself need {(self.copies or 0) + 1} workers, and {present}",
            "start more workers, or leave copies out",
        )
        yield Refusal(
            bool(self.servers) and (self.servers or 0) >= workers,
            f"shard_workers={self.servers} leave no worker to train: {present}",
            "start more workers, or leave shard_workers out: then the training workers also have the shards",
        )
