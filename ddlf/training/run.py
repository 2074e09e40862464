"""How a run is made out of what a user wrote: settings checked, crew and checkpoints opened, the algorithm let go. Runs on the master."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import numpy as np

from ddlf.algorithms.merge import rule
from ddlf.algorithms.weights import is_float_type
from ddlf.errors import AppError, ConfigError
from ddlf.training import callbacks
from ddlf.training.checkpoint import CheckpointFolder
from ddlf.training.crew import Crew
from ddlf.training.early import check_app, check_backend, check_folders, check_same_model
from ddlf.training.evaluation import check_test_data, to_its_end
from ddlf.training.exchange import WeightsOut
from ddlf.training.ledger import Ledger
from ddlf.training.metrics import MetricMerge
from ddlf.training.opening import crew_of
from ddlf.training.optimizer_state import final_weights, keeps_averages
from ddlf.training.progress import Keeper, Progress, check_settings
from ddlf.training.record import History, TrainingEvent
from ddlf.training.replica import describe_weights
from ddlf.training.reporting import Reporter
from ddlf.training.settings import MAX_SEED, check_callbacks, check_values, outer_of, whole
from ddlf.training.slots import Job


def check(app: Any, mode: str, *given: int | None) -> dict[str, int]:
    """Refuse what can be seen to be wrong before anything is started: settings, methods, folders.

    Args:
        app: The user's ``IApp``.
        mode: ``"sync"`` or ``"async"``.
        given: ``master_epochs``, ``worker_epochs``, ``batch_size`` and ``seed``; None for the app's own.

    Returns:
        These four by name.

    Raises:
        ConfigError: A setting cannot be used.
        AppError: The app lacks something.
    """
    check_app(app)
    names = ("master_epochs", "worker_epochs", "batch_size", "seed")
    given = given or (None,) * len(names)
    settings = {name: getattr(app, name) if value is None else value for name, value in zip(names, given, strict=True)}
    checked = {name: whole(name, value, 1) for name, value in settings.items() if name != "seed"}
    checked["seed"] = whole("seed", settings["seed"], 0, MAX_SEED)
    check_values(app, mode)
    check_folders(app)
    check_backend()
    return checked


async def train(app: Any, algorithm: Any, backups: bool, *given: int | None) -> History:
    """Check the settings, prepare the nodes and run an algorithm; what it has come to is on the app, however it ends.

    Args:
        app: The user's ``IApp``.
        algorithm: ``sync.train`` or ``asynchronous.train``.
        backups: Whether stragglers' slots are given to a second worker; only synchronous training does.
        given: ``master_epochs``, ``worker_epochs``, ``batch_size`` and ``seed``; None for the app's own.
    """
    mode = "sync" if backups else "async"
    settings = check(app, mode, *given)
    async with crew_of(app, settings["seed"], backups=backups) as (crew, samples):
        check_callbacks(app)
        for sentence in callbacks.warnings(app.callbacks):
            app.say(f"callback  WARNING {sentence}")
        check_test_data(app)
        job = await _job(app, samples, crew, mode, settings)
        progress = job.progress
        app.optimizers, app.ledger = progress.optimizers, progress.ledger
        app.history = History(progress.records)  # those that were reported
        app._stop = False  # a wish to stop that can be heard now
        try:
            return History(await algorithm(job))
        finally:
            try:
                await job.reporter.close()
            finally:  # also when that is cancelled
                app._stop = app._weights = None
                app.history = History(progress.records)
                app.model.set_weights(final_weights(app.model, progress.weights, progress.optimizers))
                if job.keeper is not None:
                    await to_its_end(job.keeper.last(progress))


async def _job(app: Any, samples: int, crew: Crew, mode: str, settings: dict[str, Any]) -> Job:
    for weight in app.model.trainable_weights:
        if not is_float_type(np.dtype(weight.dtype)):
            raise AppError(
                f"the weight {weight.path!r} is of type {weight.dtype} and trainable, but only floats can be merged",
                hint="make it a float, or add it with trainable=False: then it stays what it is on the master",
            )
    if keeps_averages(app.model) and app.optimizer_state != "kept":
        raise ConfigError(
            f"optimizer_state is {app.optimizer_state!r}, but the optimizer keeps averages of the weights over the run (use_ema)",
            hint="use optimizer_state='kept', or an optimizer without use_ema",
        )
    trained = {id(weight) for weight in app.model.trainable_weights}
    trainable = [id(weight) in trained for weight in app.model.weights]
    keeper, progress = await _open_checkpoints(app, mode, samples, settings)
    if progress is None:
        slots = app.slots or app.cluster.N
        progress = Progress(weights=app.model.get_weights(), ledger=Ledger(samples), optimizers=[None] * slots)
    weights_out = WeightsOut(app.weights_codec, [not flag for flag in trainable])
    weights_out.held = dict(progress.held)
    progress.records = History(progress.records)
    return Job(
        run=app._run,
        cluster=app.cluster,
        crew=crew,
        slots=len(progress.optimizers),
        progress=progress,
        keeper=keeper,
        lost_of=progress.lost,
        keep_optimizer=app.optimizer_state == "kept",
        trainable=trainable,
        samples=samples,
        names=[weight.path for weight in app.model.weights],
        rule=rule(app.merge),
        update_policy=app.update_policy,
        outer=outer_of(app),
        codec=app.codec,
        weights_out=weights_out,
        balance=app.balance,
        merge_metrics=MetricMerge(app),
        reporter=Reporter(app, progress.records, settings["batch_size"]),
        **settings,
    )


async def _open_checkpoints(
    app: Any, mode: str, samples: int, settings: dict[str, Any]
) -> tuple[Keeper | None, Progress | None]:
    """What writes checkpoints, and what the run goes on from; None for each that is not wanted or not there."""
    where = app.checkpoint if app.resume in (None, "auto") else app.resume
    if where is None:
        if app.resume:
            raise ConfigError("resume='auto' needs a folder of checkpoints", hint="set checkpoint, too")
        return None, None
    described = describe_weights(app.model)
    now = {
        "mode": mode,
        "samples": samples,
        "data": app._content,
        "model": hashlib.sha256(json.dumps([row[1:] for row in described]).encode()).hexdigest()[:16],
        "optimizer": type(app.model.optimizer).__name__,
        "outer": repr(None if app.outer is None else outer_of(app)),
        **{name: settings[name] for name in ("worker_epochs", "batch_size", "seed")},
        **{
            name: getattr(app, name)
            for name in (
                "precision",
                "balance",
                "codec",
                "weights_codec",
                "optimizer_state",
                "merge",
                "update_policy",
            )
        },
    }
    folder = CheckpointFolder(where, keep=app.checkpoint_keep)
    await asyncio.to_thread(folder.open, type(app).__name__, takeover=app.takeover)
    try:
        found = await asyncio.to_thread(folder.newest, required=app.resume not in (None, "auto"), report=app.say)
        if found is not None and not app.resume:
            raise ConfigError(
                f"{where} has checkpoints already, the newest of round {found.round}",
                hint="go on from there with resume='auto' (--resume auto), or choose another folder",
            )
        progress = None
        if found is not None:
            check_same_model(found.arrays["weights"], described)
            check_settings(dict(found.facts["settings"]), now)
            progress = Progress.from_checkpoint(found)
            if app.slots not in (None, len(progress.optimizers)):
                check_settings({"slots": len(progress.optimizers)}, {"slots": app.slots})
            app.say(f"resumed   after {'round' if mode == 'sync' else 'update'} {found.round}, from {where}")
    except BaseException:
        await asyncio.to_thread(folder.close)
        raise

    def report(text: str) -> None:
        app.on_event(TrainingEvent(kind="checkpoint", round=len(app.history), text=text))

    keeper = Keeper(folder, app.checkpoint_every, [row[0] for row in described], now, report)
    if found is not None:
        keeper.resumed_at(found.round)
    return keeper, progress
