"""Whether a run can train on partition files, and how it reads them. Runs on the master."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

from ddlf.algorithms.reading_order import MAX_GLOBAL, NEAR, SHUFFLE, Global, Portion
from ddlf.errors import ConfigError
from ddlf.events import Warned
from ddlf.training.parts import LEAST_SHARE

if TYPE_CHECKING:
    from ddlf.data.data_set import DataSet
    from ddlf.training.run import Run
    from ddlf.training.slot.task import Reply

USUAL = "window:8"
"""What mixes as well as a whole shuffle where the samples of files are mixed already, and reads each file once: ``docs/howto/big_data.md``."""


def files_of(app: Any) -> DataSet | None:
    """The data set at a place that an app trains on; None where it trains on arrays."""
    found: DataSet | None = getattr(app, "train_data", None)
    return found


def settle(app: Any, settings: dict[str, Any]) -> None:
    """Decide how partition files are read, and refuse what cannot be with them, or has no effect without them.

    Args:
        app: The user's ``IApp``, with its data.
        settings: Every setting as it is used, by name; ``shuffle`` is set.

    Raises:
        ConfigError: Names the setting.
    """
    data = files_of(app)
    if settings["on_bad"] == "skip" and (data is None or not data.on_disk):
        raise ConfigError(
            "on_bad='skip' is for partition files, and load_dataset sets something else as training data",
            hint="leave out on_bad, or set self.train_data = ddlf.data.open(place)",
        )
    if data is None:
        some = any(getattr(app, f"{part}_data", None) is not None for part in ("val", "test"))
        for name in ("shuffle", *(() if some else ("data_memory",))):
            if (value := settings[name]) is not None:
                shown = value if name == "data_memory" else repr(str(value))
                raise ConfigError(
                    f"{name}={shown} is for partition files, and load_dataset sets arrays, which are in memory",
                    hint=f"leave out {name}, or set self.train_data = ddlf.data.open(place)",
                )
        return
    rule = settings["shuffle"] = settings["shuffle"] or SHUFFLE.read("none" if data.in_order else USUAL)
    samples, whole = data.manifest.samples, isinstance(rule, Global)
    if settings["on_bad"] == "skip" and settings["mode"] == "downpour":
        raise ConfigError(
            "on_bad='skip' does not go with mode='downpour': replicas number the batches of all samples before they read any",
            hint="leave out on_bad, or train in mode 'async'",
        )
    if whole and samples > MAX_GLOBAL:
        raise ConfigError(
            f"{samples:,} samples are too many for shuffle='global', which takes up to {MAX_GLOBAL:,}",
            hint=f"use shuffle={USUAL!r}",
        )
    for name, fine, why in (
        ("shuffle", not (whole and data.manifest.hosts), "each worker has some of the files"),
        ("partition", str(settings["partition"]) == "equal", "it needs all labels at once"),
        ("exchange", whole or settings["exchange"] != "gradient", "a slot has no equal batches of its files"),
        ("worker_steps", whole or settings["worker_steps"] is None, "round_samples is what cuts an epoch into rounds"),
    ):
        if not fine:
            more = "" if name in ("mode", "partition", "shuffle") else ", or use shuffle='global'"
            shown = settings[name] if name == "worker_steps" else repr(str(settings[name]))
            raise ConfigError(
                f"{name}={shown} does not go with partition files that are read with shuffle={str(rule)!r}: {why}",
                hint=f"leave out {name}{more}",
            )


def check_rounds(settings: dict[str, Any], samples: int, slots: int) -> None:
    """Refuse rounds that are so short that a slot could have no row of its files in one.

    Args:
        settings: Every setting as it is used, by name.
        samples: n.
        slots: K.

    Raises:
        ConfigError: They are.
    """
    asked = settings["round_samples"]
    if asked is None or settings["shuffle"] is None or isinstance(settings["shuffle"], Global):
        return
    rounds = ceil(samples / asked)
    last = samples - (rounds - 1) * ceil(samples / rounds)
    share = 1 / LEAST_SHARE - NEAR if settings["balance"] == "speed" else 1
    least = int((share - NEAR) * samples / slots) - 1
    if least * last < samples:
        raise ConfigError(
            f"round_samples={asked} cuts {samples:,} samples into {rounds:,} rounds, too short for {slots} slots",
            hint="use longer rounds, or fewer slots",
        )


def left_out(run: Run, reply: Reply) -> tuple[list[int], ...]:
    """What the ledger is to know of damaged files that a worker left out; each is told of once.

    Returns:
        Nothing, or the numbers of the files.
    """
    if not reply.skipped:
        return ()
    assert isinstance(reply.task.indices, Portion)  # what a worker says of others is refused
    version = reply.task.indices.version
    files = run.facts.files.at(version).manifest.files
    for number, _ in reply.skipped:
        if (version, number) not in run.left_out:
            run.left_out.add((version, number))
            file = files[number]
            ids = f"{file.first:,} to {file.first + file.samples - 1:,}"
            why = f"{file.name} cannot be used, and is left out (on_bad='skip'): samples {ids}; the ledger is not exact"
            run.crew.emit(Warned(about="data", why=why))
    return ([number for number, _ in reply.skipped],)
