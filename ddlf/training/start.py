"""How a run is made out of what a user wrote: settings checked, crew and checkpoints opened, the algorithm let go. Runs on the master."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from ddlf.algorithms.outer import Streaming
from ddlf.algorithms.rate_decay import Never
from ddlf.algorithms.weights import digest, is_float_type
from ddlf.errors import AppError, BadUpdate, ConfigError, LeaseError
from ddlf.events import ExchangeChosen, How, NothingToTrain, RunBegan, RunEnded, TrainingBegan, Warned
from ddlf.events.history import History
from ddlf.training.asynchronous import Asynchronous
from ddlf.training.callbacks import Callbacks
from ddlf.training.crew import Crew
from ddlf.training.downpour.master import Downpour
from ddlf.training.downpour.stepper import check_optimizer
from ddlf.training.early import (
    check_app,
    check_backend,
    check_effect,
    check_exchange,
    check_sharded,
    check_slots,
    check_together,
)
from ddlf.training.early_downpour import check_downpour, check_machines
from ddlf.training.evaluation import check_test_data, to_its_end
from ddlf.training.evaluation_there import EvaluationThere
from ddlf.training.exchange import Exchange, Outwards, WeightsOut
from ddlf.training.exchanges.gradient import Step, check_model
from ddlf.training.exchanges.members import ShardsThere, WeightsThere, chosen
from ddlf.training.nearby import Nearby
from ddlf.training.opening import crew_of
from ddlf.training.parts import partitioned
from ddlf.training.reading import check_rounds, files_of, settle
from ddlf.training.recalibration import norms_of
from ddlf.training.reporting import Reporter, check_convergence
from ddlf.training.resume import begin, check_folders
from ddlf.training.roles import REPLICA
from ddlf.training.roles.build import left_behind
from ddlf.training.roles.metrics import MetricMerge
from ddlf.training.roles.optimizer_state import final_weights, keeps_averages
from ddlf.training.roles.run_position import followers
from ddlf.training.rounds import Ended, Facts, come_home
from ddlf.training.run import Run
from ddlf.training.settings.chosen import read
from ddlf.training.slot.parts.batchnorm import batch_norms, warning
from ddlf.training.slot.parts.callbacks import warnings
from ddlf.training.slot.task import HELD
from ddlf.training.states import states_of
from ddlf.training.steps import PlannedSteps
from ddlf.training.sync import Synchronous
from ddlf.training.threads import given_threads

ALGORITHMS: dict[str, Any] = {"sync": Synchronous, "async": Asynchronous, "downpour": Downpour}
NUMBERS = ("master_epochs", "worker_epochs", "batch_size", "seed")
"""Settings that are arguments of ``train_sync`` and ``train_async``, too."""


def check(app: Any, mode: str, *given: int | None, fresh: bool = False) -> dict[str, Any]:
    """Refuse what can be seen to be wrong before anything is started: settings, methods, folders.

    Args:
        app: The user's ``IApp``.
        mode: ``"sync"``, ``"async"`` or ``"downpour"``.
        given: ``master_epochs``, ``worker_epochs``, ``batch_size`` and ``seed``; None for the app's own.
        fresh: Whether what the app was trained to before is left behind.

    Returns:
        Every setting as it is used, by name.

    Raises:
        ConfigError: A setting cannot be used.
        AppError: The app lacks something.
    """
    check_app(app)
    settings = read(app, mode, dict(zip(NUMBERS, given, strict=False)))
    check_together(settings)
    check_sharded(settings)
    check_downpour(settings)
    check_machines(settings, app.cluster)
    check_exchange(app, settings["exchange"])
    check_folders(app, fresh)
    goes_on = app.resume is not None or (app._progress is not None and not fresh)
    check_slots(settings, settings["slots"] or (0 if goes_on or app.cluster is None else app.cluster.N))
    check_backend()
    given_threads(app, fresh=fresh)
    return settings


async def train(app: Any, mode: str, *given: int | None, fresh: bool = False, crew_of: Any = crew_of) -> History:
    """Check the settings, prepare the nodes and run an algorithm; what it has come to is on the app, however it ends.

    Args:
        app: The user's ``IApp``.
        mode: ``"sync"``, ``"async"`` or ``"downpour"``.
        given: ``master_epochs``, ``worker_epochs``, ``batch_size`` and ``seed``; None for the app's own.
        fresh: Whether what the app was trained to before is left behind, but for the model's weights.
        crew_of: Brings the workers to where training can begin.

    Returns:
        The records of this run; the app's ``history`` has those of the runs that it goes on from, too.

    Raises:
        LeaseError: The app is being trained already; nothing is told of this one.
    """
    settings, rule = check(app, mode, *given, fresh=fresh), ALGORITHMS[mode]
    async with (
        _told(app, settings) as name,
        crew_of(app, settings["seed"], backups=rule.backups, run=name, mode=mode, fresh=fresh) as (crew, samples),
    ):
        settings = read(app, mode, dict(zip(NUMBERS, given, strict=True)))  # callbacks are made in create_model
        settings["threads"] = app._threads
        check_machines(settings, app.cluster)  # with min_workers fewer may have answered
        settle(app, settings)
        if settings["exchange"] == "auto":
            settings["local_rule"].check_optimizer(app._optimizer)  # what ends the run is said before what it would do
            settings["exchange"], why = await chosen(app, crew, settings)
            app._tell(ExchangeChosen(exchange=settings["exchange"], why=why))
        algorithm = rule(**{field.name: settings[field.name] for field in dataclasses.fields(rule)})
        if settings["exchange"] == "gradient":
            check_model(app)
            algorithm = dataclasses.replace(algorithm, outer=Step(app.model))
        decays = not isinstance(settings["rate_decay"], Never)
        callbacks = Callbacks(app, settings) if app.callbacks or decays else None
        for sentence in warnings(app.worker_callbacks):
            app._tell(Warned(about="callback", why=sentence))
        for sentence in left_behind(app.model):
            app._tell(Warned(about="model", why=sentence))
        if mode == "downpour":
            check_optimizer(app.model.optimizer)
        check_test_data(app)
        check_convergence(app)
        run = await _run(app, samples, crew, settings, fresh, callbacks)
        progress = app._progress = run.progress
        if settings["exchange"] == "gradient":
            algorithm.outer.plan(len(progress.epochs), progress.starts[-1])
        before = len(progress.records)
        app.ledger = progress.ledger
        app.history = History(progress.records)  # those that were reported
        app._stop = False  # a wish to stop that can be heard now
        try:
            if progress.converged or progress.is_complete:
                asked = progress.asked if progress.converged else progress.starts[-1]
                app._tell(NothingToTrain(round=progress.reached, epochs=asked, converged=progress.converged))
            else:
                await _train(run, algorithm, callbacks)
            return History(progress.records[before:])
        finally:
            try:
                await run.close()
            finally:  # also when that is cancelled
                app._stop = app._weights = None
                progress.converged = progress.converged or run.converged
                app.history = History(progress.records)
                final = callbacks.final if callbacks is not None else None
                if keeps_averages(app.model):  # which may be on the workers
                    await to_its_end(_bring_states(run))
                stepped = [progress.state.get("outer")] if settings["exchange"] == "gradient" else progress.optimizers
                app.model.set_weights(final or final_weights(app.model, progress.weights, stepped))
                await to_its_end(run.keep_last(again=final is not None))


async def _train(run: Run, algorithm: Any, callbacks: Callbacks | None) -> None:
    """Let the algorithm go, between the beginning and the end of the callbacks."""
    if callbacks is not None:
        if callbacks.need_weights:
            come_home(run.progress)
        if hasattr(algorithm, "outer") and "outer" not in run.state:
            run.state["outer"] = algorithm.outer.init(run.weights)  # what they set is to be found in it
        await callbacks.begin(run.progress)
    try:
        await algorithm.train(run)
    except Ended:
        pass
    except BadUpdate as error:
        if callbacks is None or not callbacks.terminate(error):
            raise
        run.progress.converged = True
    await run.finish()
    if callbacks is not None:
        await callbacks.end(whole=run.converged or run.progress.converged or run.progress.is_complete)


async def _bring_states(run: Run) -> None:
    run.progress.states = await run.exchange.states.all()


@contextlib.asynccontextmanager
async def _told(app: Any, settings: dict[str, Any]) -> AsyncIterator[str]:
    """Tell that a run begins, and how it has ended; yields its name."""
    if app._is_training:
        raise LeaseError(
            "this app is in another training run of this program",
            hint="wait until that has ended, or train another object",
        )
    run, before = secrets.token_hex(8), app._progress
    app._is_training = True
    told = ("mode", "worker_epochs", "worker_steps", "round_samples", "batch_size", "seed")
    facts = {name: settings[name] for name in told}
    app._tell(RunBegan(run=run, app=type(app).__name__, epochs=settings["master_epochs"], **facts))
    how: How = "failed"
    why = ""
    try:
        yield run
        how = "converged" if app._progress.converged else "complete" if app._progress.is_complete else "stopped"
    except BaseException as error:
        how = "failed" if isinstance(error, Exception) else "cancelled"
        why = str(error)
        if isinstance(error, asyncio.CancelledError):
            vars(error)["_render_traceback_"] = lambda: [_interrupted(app)]
        raise
    finally:
        app._is_training = False
        trained = None if app._progress is before else app._progress
        # Of synchronous training nobody asks: equal seeds give equal bits.
        weights = digest(trained.weights) if trained is not None and settings["mode"] != "sync" else ""
        version = 0 if trained is None else trained.version
        found = app.history.staleness if version and settings["mode"] != "sync" else {}
        staleness = tuple(found.get(tau, 0) for tau in range(max(found, default=-1) + 1))
        app._tell(RunEnded(run=run, how=how, version=version, why=why, staleness=staleness, weights=weights))


def _interrupted(app: Any) -> str:
    """What a notebook shows instead of where training was interrupted."""
    if not app.history:
        return "interrupted: training ended before its first round"
    last = app.history[-1]
    reached = f"round {last.round}" if last.slot is None else f"update {last.version}"
    return f"interrupted: training ended after {reached}; app.model and app.history are those of then, and the next train_sync goes on from there"


async def _run(
    app: Any,
    samples: int,
    crew: Crew,
    settings: dict[str, Any],
    fresh: bool,
    callbacks: Callbacks | None,
) -> Run:
    for weight in app.model.trainable_weights:
        if not is_float_type(np.dtype(weight.dtype)):
            raise AppError(
                f"the weight {weight.path!r} is of type {weight.dtype} and trainable, but only floats can be merged",
                hint="make it a float, or add it with trainable=False: then it stays what it is on the master",
            )
    if keeps_averages(app.model) and app.optimizer_state in ("fresh", "stays"):
        raise ConfigError(
            f"optimizer_state is {app.optimizer_state!r}, but the optimizer keeps averages of the weights over the run (use_ema)",
            hint="use optimizer_state='kept', or an optimizer without use_ema",
        )
    settings["local_rule"].check_optimizer(app._optimizer)
    trained = {id(weight) for weight in app.model.trainable_weights}
    norms = norms_of(app, settings["batchnorm"])
    apart = norms.get("apart", ())
    trainable = [id(weight) in trained and place not in apart for place, weight in enumerate(app.model.weights)]
    if why := check_effect(settings, app.model.get_weights(), trainable):
        app._tell(Warned(about="codec", why=why))
    fragments = isinstance(settings["outer"], Streaming)
    exact = [not flag for flag in trainable]
    weights_out: Outwards = WeightsOut(str(settings["weights_codec"]), exact, fragments=fragments)
    downpour = settings["mode"] == "downpour"
    if downpour or settings["exchange"] == "sharded":
        there = ShardsThere if downpour else WeightsThere
        weights_out = there(app._run, crew, app.cluster, exact, *([] if downpour else [str(settings["weights_codec"])]))
    means = settings["optimizer_state"] == "averaged" or settings["local_rule"].steers
    # Where slots begin with means, or with weights of their own, the master gives them what these are made of.
    restoring = None if means or fragments else weights_out.restoring
    progress, keeper, source = await begin(app, samples, settings, fresh=fresh, restoring=restoring)
    check_rounds(settings, samples, len(progress.states))
    weights_out.held = {slot: state[HELD] for slot, state in enumerate(progress.states) if HELD in state}
    if settings["evaluate_on"] == "workers":
        weights_out.evaluation = EvaluationThere(app, crew, (app._run, REPLICA))
    progress.records = History(progress.records)
    paced = settings["mode"] == "async" and settings["balance"] == "speed"
    fixed = app.slots is not None or progress.owners is not None or paced or downpour
    crew.fixed_slots = len(progress.states) if fixed else None
    app._tell(
        TrainingBegan(
            mode=settings["mode"],
            samples=samples,
            slots=len(progress.states),
            fixed=fixed,
            workers=app.cluster.N,
            version=progress.version,
            rounds=len(progress.epochs),
            reached=progress.reached,
            source=None if source is None else str(source),
            facts={name: json.dumps(value) for name, value in progress.settings.items()},
            shard_workers=settings["shard_workers"] or 0,
        )
    )
    if progress.owners is not None:
        app._tell(partitioned(app, settings["partition"], progress.owners, len(progress.states)))
    if batch_norms(app.model):
        least = samples // len(progress.states) if progress.owners is None else int(np.bincount(progress.owners).min())
        differ = progress.owners is not None and settings["partition"].goes_by_labels
        if why := warning(min(least, settings["batch_size"]), differ, settings["batchnorm"]):
            app._tell(Warned(about="model", why=why))
    if settings["mode"] == "sync" and len(progress.states) < (useful := settings["merge"].useful):
        said = f"merge={str(settings['merge'])!r} of {len(progress.states)} slot{'s' * (len(progress.states) > 1)}"
        why = f"{said} cannot tell a bad update from a good one: it takes {useful} slots or more"
        app._tell(Warned(about="merge", why=why))
    facts = Facts(
        samples=samples,
        names=[weight.path for weight in app.model.weights],
        trainable=trainable,
        batch_size=settings["batch_size"],
        seed=settings["seed"],
        update_policy=settings["update_policy"],
        local=settings["local_rule"],
        grows=not fixed,
        files=files_of(app),
        shuffle=str(settings["shuffle"]),
        **norms,
    )
    states = states_of(app, crew, progress, settings, weights_out)
    reporter = Reporter(app, progress.records, settings["batch_size"], callbacks, weights_out.evaluation)
    planned = PlannedSteps(progress, settings["batch_size"]) if followers(app.model.optimizer) else None
    exchange = Exchange(app._run, samples, settings["codec"].name, weights_out, states, app._tell, planned)
    nearby = Nearby(app, facts.files, crew, app.cluster, introduces=not weights_out.stays)
    return Run(facts, app.cluster, crew, progress, exchange, nearby, MetricMerge(app), reporter, keeper)
