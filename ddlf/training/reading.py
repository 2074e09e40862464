"""Decides whether a run can train on partition files, and how it reads them. Runs on the master."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ddlf.algorithms.reading_order import SHUFFLE, Portion
from ddlf.events import Event, Warned
from ddlf.training.context import App
from ddlf.training.refusals import USUAL_SHUFFLE, check_arrays, check_files

if TYPE_CHECKING:
    from ddlf.data.data_set import DataSet
    from ddlf.training.slot.task import Reply
    from ddlf.training.spec import RunSpec


def files_of(app: App) -> DataSet | None:
    """Return the data set at a place that an app trains on; None for arrays."""
    found: DataSet | None = getattr(app, "train_data", None)
    return found


def settled(app: App, spec: RunSpec) -> RunSpec:
    """Return the spec with the shuffle rule for partition files; refuse settings that do not fit the kind of data.

    Args:
        app: The user's ``IApp``, with its data.
        spec: The run.

    Raises:
        ConfigError: Names the setting.
    """
    data = files_of(app)
    if data is None:
        some = any(getattr(app, f"{part}_data", None) is not None for part in ("val", "test"))
        check_arrays(spec, other_files=some)
        return spec
    rule = spec.data.shuffle or SHUFFLE.read("none" if data.in_order else USUAL_SHUFFLE)
    spec = replace(spec, data=replace(spec.data, shuffle=rule))
    check_files(spec, data)
    return spec


def left_out(
    reply: Reply, data: DataSet, warned: set[tuple[int, int]], emit: Callable[[Event], None]
) -> tuple[list[int], ...]:
    """Return the numbers of the damaged files that a worker left out, for the ledger.

    Args:
        reply: The worker's reply, which names them.
        data: The data set.
        warned: Version and number of the files that a warning has named; receives those of the reply.
        emit: Receives a warning for each other file.
    """
    assert isinstance(reply.task.indices, Portion)  # the reply was checked when it was decoded
    version = reply.task.indices.version
    files = data.at(version).manifest.files
    for number, _ in reply.skipped:
        if (version, number) not in warned:
            warned.add((version, number))
            file = files[number]
            ids = f"{file.first:,} to {file.first + file.samples - 1:,}"
            why = f"{file.name} cannot be used, and is left out (on_bad='skip'): samples {ids}; the ledger is not exact"
            emit(Warned(about="data", why=why))
    return ([number for number, _ in reply.skipped],)
