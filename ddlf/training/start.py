"""Starts a run: checks the app and its settings, opens the crew and the checkpoints, and calls the strategy's loop.

Runs on the master.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal

import numpy as np

from ddlf.algorithms.outer import Streaming
from ddlf.algorithms.rate_decay import Never
from ddlf.algorithms.weights import Weights, digest, is_float_type
from ddlf.errors import AppError, BadUpdate, LeaseError
from ddlf.events import ExchangeChosen, How, NothingToTrain, RunBegan, RunEnded, TrainingBegan, Warned
from ddlf.events.record import History
from ddlf.extras import hooks
from ddlf.privacy import contradictions
from ddlf.privacy.accountant import DELTA, check_delta
from ddlf.training.callbacks.checks import warnings
from ddlf.training.callbacks.master import Callbacks
from ddlf.training.checkpoints.contents import is_checkpoint
from ddlf.training.checkpoints.releases import RELEASES, ReleaseAccount, Terms
from ddlf.training.checkpoints.resume import begin, check_folders, checkpoint_folders
from ddlf.training.context import App
from ddlf.training.crew.crew import Crew
from ddlf.training.crew.opening import crew_of
from ddlf.training.crew.threads import given_threads
from ddlf.training.evaluation.master import check_test_data, to_its_end
from ddlf.training.evaluation.metrics import MetricMerge
from ddlf.training.evaluation.private import PrivateEvaluation
from ddlf.training.evaluation.workers import WorkerEvaluation
from ddlf.training.exchanges.carrier import Carrier
from ddlf.training.exchanges.recalibration import norms_of
from ddlf.training.external_weights import outside
from ddlf.training.progress import Progress, is_unmade, local
from ddlf.training.refusals import (
    check_app,
    check_averages,
    check_backend,
    check_effect,
    check_evaluation,
    check_rounds,
    check_slots,
    check_spec,
    check_takeover,
    check_workers,
    privacy_choice,
)
from ddlf.training.registry import spec_of
from ddlf.training.reporter import Reporter
from ddlf.training.roles import REPLICA
from ddlf.training.run import Facts, Run, RunMustEnd
from ddlf.training.samples.files import Nearby, files_of, settled
from ddlf.training.samples.partitions import PlannedSteps, partitioned
from ddlf.training.slot.batchnorm import batch_norms, warning
from ddlf.training.slot.build import left_behind
from ddlf.training.slot.optimizers import final_weights, followers, keeps_averages, restarts
from ddlf.training.slot.parts import SlotPlan, keeps_little, kept_parts
from ddlf.training.slot.task import HELD
from ddlf.training.slot.variables import set_weights, shapes_of
from ddlf.training.spec import RunSpec
from ddlf.training.strategy import Loop, WeightContext, strategy_and_exchange

NUMBERS = ("master_epochs", "worker_epochs", "batch_size", "seed")
"""Settings that are also arguments of ``train_sync`` and ``train_async``."""


async def choose_settings(app: App) -> None:
    """Let optional parts of DDLF set attributes of an app before training. You may call this again."""
    for choose in hooks("choose_settings"):
        await choose(app)


def check(app: App, mode: str, *numbers: int | None, fresh: bool = False) -> RunSpec:
    """Raise an error for wrong settings, methods and folders that can be found before anything starts.

    Args:
        app: The user's ``IApp``.
        mode: The name of the strategy.
        numbers: ``master_epochs``, ``worker_epochs``, ``batch_size`` and ``seed``; None for the app's own.
        fresh: Whether to ignore the app's earlier training.

    Returns:
        The spec of the run.

    Raises:
        ConfigError: A setting cannot be used.
        AppError: The app lacks something.
    """
    check_app(app)
    spec = spec_of(app, mode, dict(zip(NUMBERS, numbers, strict=False)))
    check_spec(spec)
    _check_workers(spec, app.cluster)
    spec.exchange.check_app(app)
    check_folders(app, fresh)
    continues = app.resume is not None or (app.run_context.progress is not None and not fresh)
    slots_unknown = continues or app.cluster is None
    check_slots(spec, spec.slots or (0 if slots_unknown else spec.slots_on(app.cluster.places)))
    check_backend()
    given_threads(app, fresh=fresh)
    return spec


def _check_workers(spec: RunSpec, cluster: Any) -> None:
    if cluster is not None:
        check_workers(spec, cluster.N, one_at_a_time=getattr(cluster, "one_thing_at_a_time", False))
        check_takeover(spec, of_workers=getattr(cluster, "takeover", False))


async def train(app: App, mode: str, *numbers: int | None, fresh: bool = False, crew_of: Any = crew_of) -> History:
    """Train an app with a strategy: check its settings, prepare all nodes, and run the strategy's loop.

    The app has the result, also after an error.

    Args:
        app: The user's ``IApp``.
        mode: The name of the strategy.
        numbers: ``master_epochs``, ``worker_epochs``, ``batch_size`` and ``seed``; None for the app's own.
        fresh: Whether to ignore the app's earlier training, except for the model's weights.
        crew_of: Prepares the workers.

    Returns:
        The records of this run. The app's ``history`` also has the records of the runs that it continues.

    Raises:
        LeaseError: The app is being trained already; no event is emitted for this run.
    """
    spec = check(app, mode, *numbers, fresh=fresh)
    replica = resolve_name(spec.role)
    async with (
        _announced(app, spec) as name,
        crew_of(
            app,
            spec.seed,
            backups=spec.train.backups and not spec.exchange.spans_workers,
            run=name,
            replica=replica,
            equal_threads=spec.train.in_rounds,
            fresh=fresh,
        ) as (crew, samples),
    ):
        spec = spec_of(app, mode, dict(zip(NUMBERS, numbers, strict=True)))  # create_model may have set callbacks
        check_spec(spec)
        _check_workers(spec, app.cluster)  # with min_workers, fewer workers may have answered
        spec = settled(app, replace(spec, threads=app.run_context.threads))
        spec.local.rule.check_optimizer(app.run_context.optimizer)  # raise errors before warnings about the run
        strategy, exchange = strategy_and_exchange(spec)
        exchange, reason = await exchange.chosen(app, crew, spec)
        if reason:
            spec = replace(spec, exchange=exchange)
            app.run_context.emit(ExchangeChosen(exchange=exchange.name, why=reason))
        step = exchange.step(app)
        loop = strategy.loop(spec, step)
        decays = not isinstance(spec.local.rate_decay, Never)
        callbacks = Callbacks(app, spec) if app.callbacks or decays else None
        for sentence in warnings(app.worker_callbacks):
            app.run_context.emit(Warned(about="callback", why=sentence))
        for sentence in left_behind(app.model):
            app.run_context.emit(Warned(about="model", why=sentence))
        strategy.check_model(app)
        data = app.run_context.data
        if not data.is_elsewhere(app, "test"):  # a worker checks its own test data
            check_test_data(app)
        check_evaluation(spec, validates=data.has_data(app, "val"), method=data.evaluated_in)
        run = await _make_run(app, samples, crew, spec, fresh, callbacks)
        progress = app.run_context.progress = run.progress
        if step is not None:
            step.plan(len(progress.epochs), progress.starts[-1])
        before = len(progress.records)
        app.ledger = progress.ledger
        app.history = History(progress.records)  # the reported records
        records = History()  # the records of this training
        posted = False  # whether peers have got the weights after the last commit
        app.run_context.stop = False  # from now on the app can ask the run to stop
        try:
            if progress.converged or progress.is_complete:
                epochs = progress.planned_epochs if progress.converged else progress.starts[-1]
                app.run_context.emit(
                    NothingToTrain(round=progress.reached, epochs=epochs, converged=progress.converged)
                )
            else:
                run.outside = outside(app.peer, app, spec, progress, run.reporter.tested)
                if run.outside is not None:
                    await run.outside.join()
                await _train(run, loop, callbacks)
                posted = run.outside is not None and await run.outside.leave(local(progress.weights))
            records += progress.records[before:]
            return records
        finally:
            try:
                await run.close()
            finally:  # also if the close is cancelled
                final = callbacks.final if callbacks is not None else None
                await _store_result(app, run, final, has_common_step=step is not None)
                records.ended = progress.ended
                await to_its_end(run.keep_last(again=final is not None or posted))


async def _train(run: Run, loop: Loop, callbacks: Callbacks | None) -> None:
    """Run the strategy's training loop, between ``on_train_begin`` and ``on_train_end`` of the callbacks."""
    if callbacks is not None:
        if callbacks.need_weights:
            run.progress.fetch()
        loop.begin(run)  # creates the state that callbacks may change
        await callbacks.begin(run.progress)
    try:
        await loop.train(run)
    except RunMustEnd:
        pass
    except BadUpdate as error:
        if callbacks is None or not callbacks.terminate(error):
            raise
        run.progress.converged = True
    await run.finish()
    if callbacks is not None:
        await callbacks.end(whole=run.converged or run.progress.converged or run.progress.is_complete)


async def _store_result(app: App, run: Run, final: Weights | None, *, has_common_step: bool) -> None:
    """Give the app the history and the weights of a run that has ended in any way.

    Args:
        app: The user's ``IApp``.
        run: The run, which is closed.
        final: Weights that a callback has chosen, instead of the last ones.
        has_common_step: Whether all slots share the state of one optimizer.
    """
    progress = run.progress
    app.run_context.stop = app.run_context.weights = None
    progress.converged = progress.converged or run.converged
    app.history = History(progress.records)
    app.history.ended = progress.ended
    if keeps_averages(app.model):  # the averages may be on the workers
        await to_its_end(_bring_states(run))
    stepped = [progress.state.get("outer")] if has_common_step else progress.optimizers
    if is_unmade(progress.weights):  # the run has ended before its first round
        del app.model
    else:
        set_weights(app.model, final or final_weights(app.model, local(progress.weights), stepped))
    app.run_context.first = None


async def _bring_states(run: Run) -> None:
    """Fetch the states of all slots to the master."""
    run.progress.states = await run.exchange.states.fetch_all()


@contextlib.asynccontextmanager
async def _announced(app: App, spec: RunSpec) -> AsyncIterator[str]:
    """Emit the events at the beginning and at the end of a run, around a ``with`` block. Yield the name of the run."""
    if app.run_context.is_training:
        raise LeaseError(
            "this app is in another training run of this program",
            hint="wait until that run has ended, or train another app",
        )
    run, progress_before = secrets.token_hex(8), app.run_context.progress
    app.run_context.is_training = True
    app.run_context.emit(
        RunBegan(
            run=run,
            app=type(app).__name__,
            mode=spec.train.name,
            in_rounds=spec.train.in_rounds,
            epochs=spec.epochs,
            worker_epochs=spec.local.epochs,
            worker_steps=spec.local.steps,
            round_samples=spec.local.round_samples,
            batch_size=spec.data.batch_size,
            seed=spec.seed,
        )
    )
    outcome: How = "failed"
    reason = ""
    try:
        yield run
        ended = app.run_context.progress
        assert ended is not None
        outcome = "converged" if ended.converged else "complete" if ended.is_complete else "stopped"
        reason = ended.reason
    except BaseException as error:
        outcome = "failed" if isinstance(error, Exception) else "cancelled"
        reason = str(error)
        if isinstance(error, asyncio.CancelledError):
            vars(error)["_render_traceback_"] = lambda: [_interrupted(app)]
        raise
    finally:
        app.run_context.is_training = False
        trained = None if app.run_context.progress is progress_before else app.run_context.progress
        # Not needed for synchronous training: equal seeds give equal bits.
        weights = digest(local(trained.weights)) if trained is not None and not spec.train.in_rounds else ""
        version = 0 if trained is None else trained.version
        counts = app.history.staleness if version and not spec.train.in_rounds else {}
        staleness = tuple(counts.get(tau, 0) for tau in range(max(counts, default=-1) + 1))
        app.run_context.emit(
            RunEnded(run=run, how=outcome, version=version, why=reason, staleness=staleness, weights=weights)
        )


def _interrupted(app: App) -> str:
    """Return the text that a notebook shows instead of a traceback when training is interrupted."""
    if not app.history:
        return "interrupted: training ended before its first round"
    last = app.history[-1]
    reached = f"round {last.round}" if last.slot is None else f"update {last.version}"
    return f"interrupted: training ended after {reached}; app.model and app.history are from that moment, and the next train_sync continues there"


async def _make_run(
    app: App,
    samples: int,
    crew: Crew,
    spec: RunSpec,
    fresh: bool,
    callbacks: Callbacks | None,
) -> Run:
    """Return the run, with its progress from a checkpoint or from the beginning, and emit the events of its beginning.

    Args:
        app: The user's ``IApp``, with data and model.
        samples: n, the number of samples of the training data.
        crew: The workers of the run.
        spec: The settings of the run.
        fresh: Whether to ignore the app's earlier training.
        callbacks: The app's callbacks on the master; None without any.
    """
    _check_weights(app, spec)
    norms = norms_of(app, spec.batchnorm)
    trainable = _trainable(app, spec, norms.get("local_weights", ()))
    weight_context = WeightContext(
        app.run_context.name,
        crew,
        app.cluster,
        [not is_trained for is_trained in trainable],
        spec,
        isinstance(spec.outer, Streaming),
    )
    strategy, exchange = strategy_and_exchange(spec)
    weights_out = strategy.weights(weight_context) or exchange.weights(weight_context)
    progress, keeper, source = await begin(app, samples, spec, fresh=fresh, restoring=weights_out.restoring)
    samples = progress.samples  # with private data, a worker of the training before may be away
    check_rounds(spec, samples, len(progress.states))
    weights_out.slot_weights = {slot: state[HELD] for slot, state in enumerate(progress.states) if HELD in state}
    if app.run_context.data.homes is not None:
        crew.carries = "own slot"
        weights_out.evaluation = PrivateEvaluation(app, crew, (app.run_context.name, REPLICA))
    elif spec.evaluation.on == "workers":
        weights_out.evaluation = WorkerEvaluation(app, crew, (app.run_context.name, REPLICA))
    progress.records = History(progress.records)
    fixed = spec.slots is not None or progress.owners is not None or spec.train.has_fixed_slots(spec)
    fixed = fixed or spec.exchange.spans_workers
    crew.fixed_slots = len(progress.states) if fixed else None
    crew.carries = "part" if spec.exchange.spans_workers else crew.carries
    _report_beginning(app, spec, progress, source, fixed=fixed)
    facts = Facts(
        samples=samples,
        names=[weight.path for weight in app.model.weights],
        trainable=trainable,
        batch_size=spec.data.batch_size,
        seed=spec.seed,
        update_policy=spec.exchange.update_policy,
        local=str(spec.local.rule),
        grows=not fixed,
        files=files_of(app),
        shuffle=str(spec.data.shuffle),
        data=app.run_context.data,
        **norms,
    )
    plan = SlotPlan(
        spec=spec,
        optimizer=app.run_context.optimizer,
        differences=weights_out.differences,
        callbacks=bool(app.worker_callbacks),
    )
    carrier = Carrier(
        app.run_context.name,
        facts.data.numbers(),
        spec.exchange.codec.name,
        weights_out,
        exchange.states(weight_context, weights_out, progress.states, kept_parts(plan)),
        app.run_context.emit,
        PlannedSteps(progress, spec.data.batch_size) if _follows_steps(app, spec) else None,
    )
    on_disks = facts.files is not None and facts.files.manifest.hosts > 0
    introduces = not weights_out.stays
    nearby = Nearby(app, facts.files, crew, app.cluster, introduces=introduces) if on_disks else None
    merge_metrics = left_out_metrics if spec.data.hides_metrics else MetricMerge(app)
    reporter = Reporter(app, progress.records, spec, callbacks, weights_out.evaluation)
    run = Run(facts, app.cluster, crew, progress, carrier, nearby, merge_metrics, reporter, keeper)
    if spec.data.noise_multiplier is not None:
        try:
            run.account = await asyncio.to_thread(_account, app, spec, progress, source)
        except BaseException:
            if keeper is not None:
                await keeper.close()
            raise
    return run


def _check_weights(app: App, spec: RunSpec) -> None:
    """Raise an error for a model whose weights cannot be merged, or contradict the settings.

    Raises:
        AppError: A trained weight has a type that cannot be merged.
        ConfigError: Settings contradict the model.
    """
    for weight in app.model.trainable_weights:
        if not is_float_type(np.dtype(weight.dtype)):
            raise AppError(
                f"the weight {weight.path!r} is of type {weight.dtype} and trainable, but only floats can be merged",
                hint="make it a float, or add it with trainable=False: then it keeps its value on the master",
            )
    averages, momenta = keeps_averages(app.model), not keeps_little(app.run_context.optimizer)
    if averages:
        check_averages(spec)
    contradictions.check(privacy_choice(spec, averages=averages, momenta=momenta))


def _trainable(app: App, spec: RunSpec, local_weights: Sequence[int]) -> list[bool]:
    """Return for each weight whether it is trained and exchanged. Warn about settings that have no effect on the others.

    Args:
        app: The user's ``IApp``, with its model.
        spec: The settings of the run.
        local_weights: Indices of the weights that each slot keeps to itself.
    """
    weights = app.model.weights
    trained = {id(weight) for weight in app.model.trainable_weights}
    trainable = [id(weight) in trained and index not in local_weights for index, weight in enumerate(weights)]
    if spec.data.noises_updates and not all(trainable):
        untrained = [weight.path for weight, is_trained in zip(weights, trainable, strict=True) if not is_trained]
        names = ", ".join(untrained[:3]) + ", .." * (len(untrained) > 3)
        reason = f"{names}: not trained, so left out of the noised sum; they stay as they are"
        app.run_context.emit(Warned(about="noise", why=reason))
    if reason := check_effect(spec, shapes_of(weights), trainable):
        app.run_context.emit(Warned(about="codec", why=reason))
    return trainable


def _report_beginning(app: App, spec: RunSpec, progress: Progress, source: Path | None, *, fixed: bool) -> None:
    """Emit the event that training begins, and warnings that depend on the number of slots.

    Args:
        app: The user's ``IApp``.
        spec: The settings of the run.
        progress: Where the training begins.
        source: The checkpoint that it continues from; None for the memory or the beginning.
        fixed: Whether the number of slots stays the same.
    """
    emit, slots, owners = app.run_context.emit, len(progress.states), progress.owners
    emit(
        TrainingBegan(
            mode=spec.train.name,
            in_rounds=spec.train.in_rounds,
            samples=progress.samples,
            slots=slots,
            fixed=fixed and not spec.exchange.spans_workers,  # no worker is spare by its slot
            workers=app.cluster.N,
            version=progress.version,
            rounds=len(progress.epochs),
            reached=progress.reached,
            source=None if source is None else str(source),
            facts={name: json.dumps(value) for name, value in progress.settings.items()},
            shard_workers=spec.train.extra_workers,
        )
    )
    if owners is not None:
        emit(partitioned(app, spec.data.partition, owners, slots))
    if batch_norms(app.model):
        least = progress.samples // slots if owners is None else int(np.bincount(owners).min())
        differ = owners is not None and spec.data.partition.goes_by_labels
        if reason := warning(min(least, spec.data.batch_size), differ, spec.batchnorm):
            emit(Warned(about="model", why=reason))
    if reason := spec.train.slot_warning(slots):
        emit(Warned(about="merge", why=reason))


def _follows_steps(app: App, spec: RunSpec) -> bool:
    """Return whether a slot's optimizer must know its position in the run, because its steps depend on it."""
    optimizer = app.model.optimizer
    return bool(followers(optimizer)) or (spec.local.optimizer_state == "fresh" and restarts(optimizer))


def _account(app: App, spec: RunSpec, progress: Progress, source: Path | None) -> ReleaseAccount:
    """Return the account of the releases of a run, which continues that of the training before."""
    context, budget = app.run_context, spec.data.privacy_budget
    unit: Literal["peer", "sample"] = "sample" if spec.data.protects_samples else "peer"
    terms = Terms(
        unit=unit, clip=spec.data.update_clip or 0.0, delta=DELTA if spec.data.delta is None else spec.data.delta
    )
    most = max(share.samples for share in context.data.shares)
    check_delta(terms.delta, most if unit == "sample" else len(progress.states))
    target, _ = checkpoint_folders(app)
    folder = target or (None if context.recording is None else context.recording.path)
    earlier_folder = folder if source is None else source.absolute().parent if is_checkpoint(source) else source
    counted = [record for record in progress.records if record.epsilons]
    releases = sum(len(record.workers) for record in counted) if unit == "sample" else len(counted)
    if source is None and context.account is not None:  # this process has trained these weights before
        account = context.account.continue_with(terms, budget)
    elif earlier_folder is not None and (source is not None or (earlier_folder / RELEASES).exists()):
        account = ReleaseAccount.resume(earlier_folder, terms, budget, least=releases)
    else:
        account = ReleaseAccount.begin(folder, terms, budget)
    if folder is not None:
        account.copy_to(folder)
    account.check_next()
    context.account = account
    return account


def left_out_metrics(rows: Sequence[Any]) -> dict[str, float]:
    """Return no metrics: metrics of single workers have neither noise nor masks, so they are left out with these."""
    return {}
