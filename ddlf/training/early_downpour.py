"""What of a run of Downpour can be seen to be wrong before anything is started. Runs on the master; imports nothing of Keras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddlf.algorithms.clipping import Adaptive
from ddlf.errors import ConfigError
from ddlf.training.settings.settings import SETTINGS, Settings

USELESS = {
    "worker_epochs": "a round is one epoch of a replica, or worker_steps of it",
    "outer": "push_rule says how the weights change",
    "codec": "gradients travel as they are",
    "optimizer_state": "what the compiled optimizer keeps is not used, and push_rule has a state of its own",
    "local_rule": "replicas begin with new weights every n_fetch steps",
    "balance": "replicas train at their own pace",
    "rate_decay": "push_rule says how far a push goes",
    "clip": "it goes by the norms that it has seen, and the replicas of a worker step with one optimizer in turn; agc does not",
    "multipliers": "push_rule decides how far a gradient moves each weight; freeze layers by layer.trainable = False",
}
"""Settings of other modes that have no ``only``, and why they would have no effect here."""


def check_downpour(settings: dict[str, Any]) -> None:
    """Refuse what has no effect in Downpour.

    Args:
        settings: Every setting as it is used, by name.

    Raises:
        ConfigError: Names the setting.
    """
    if settings["mode"] != "downpour":
        return
    for name, why in USELESS.items():
        usual = getattr(Settings, name)
        if isinstance(settings[name], Adaptive):
            continue
        if settings[name] != SETTINGS[name].check(name, usual):
            value = settings[name] if isinstance(settings[name], int) else repr(str(settings[name]))
            raise ConfigError(
                f"{name}={value} has no effect in Downpour training: {why}",
                hint=f"leave {name} at {usual!r}, or train in mode 'sync'",
            )
    if settings["weights_codec"].delta:
        raise ConfigError(
            f"weights_codec={str(settings['weights_codec'])!r} is of differences, and a shard does not keep what each replica has",
            hint="use 'float16' or 'bfloat16'",
        )
    if settings["precision"] == "mixed_float16":
        raise ConfigError(
            "precision='mixed_float16' scales the loss by what each worker sees, and replicas push gradients without",
            hint="use precision='mixed_bfloat16'",
        )
    if settings["update_policy"] == "clip":
        raise ConfigError(
            "update_policy='clip' compares updates of whole rounds, and Downpour has none",
            hint="use 'stop', or 'reject' to leave out what is no number",
        )
    if replicas := settings["replicas"] or settings["slots"]:
        check_replicas(replicas, settings["slots"] or 1, settings["softsync"])


def check_replicas(replicas: int, slots: int, softsync: int | None) -> None:
    """Refuse fewer replicas than there are slots, or than make a step together.

    Args:
        replicas: Number of replicas of the run.
        slots: K; 1 while it is not known.
        softsync: The setting.

    Raises:
        ConfigError: There are fewer.
    """
    if replicas < slots:
        raise ConfigError(
            f"replicas={replicas} are fewer than the {slots} slots that carry them",
            hint=f"set slots={replicas}, or leave replicas out: then each slot is one",
        )
    if softsync and softsync > replicas:
        raise ConfigError(f"softsync must be from 1 to the {replicas} replicas, got {softsync}")


def check_machines(settings: Mapping[str, Any], cluster: Any) -> None:
    """Refuse workers that cannot be what a run of Downpour makes of them.

    Args:
        settings: Every setting as it is used, by name.
        cluster: The workers; None while there are none.

    Raises:
        ConfigError: They cannot compute and answer at the same time, or are too few.
    """
    if settings["mode"] != "downpour" or cluster is None:
        return
    if getattr(cluster, "one_thing_at_a_time", False):
        raise ConfigError(
            "mode='downpour' needs workers that answer while others compute, and those of in_process_cluster do one thing at a time",
            hint="use local_cluster",
        )
    check_enough(settings["copies"], settings["shard_workers"], cluster.N)


def check_enough(copies: int | None, servers: int | None, workers: int) -> None:
    """Refuse copies of shards that have no worker of their own, and workers of shards that leave none to train.

    Args:
        copies: Of each shard; None for one, where there is another worker.
        servers: Workers of their own for the shards; None for those that train.
        workers: How many there are.

    Raises:
        ConfigError: There are too few.
    """
    there = f"there {'are' if workers > 1 else 'is'} {workers}"
    if copies and copies >= workers:
        raise ConfigError(
            f"copies={copies} of each shard and the shard itself need {copies + 1} workers, and {there}",
            hint="start more workers, or leave copies out",
        )
    if servers and servers >= workers:
        raise ConfigError(
            f"shard_workers={servers} leave no worker to train: {there}",
            hint="start more workers, or leave shard_workers out: then those that train have the shards, too",
        )
