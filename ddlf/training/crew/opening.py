"""Prepares all nodes for training: connects them, loads the data, builds the model, and compares both everywhere.

Runs on the master. Every node does the same in the same order: ``load_dataset``, then ``create_model``. The app is
pickled before the master itself loads and builds. So all nodes work at the same time, and attributes that
``load_dataset`` or ``create_model`` set on the master do not travel.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ddlf.cluster.cluster import default_cluster
from ddlf.cluster.proxy import ProxyWorker
from ddlf.data import app_data
from ddlf.data.datasets import not_finite
from ddlf.errors import AppError, DDLFError, ProtocolError
from ddlf.events import DataLoaded, Event, ModelBuilt, Warned
from ddlf.events.phases import Phase, PhasesInTurn
from ddlf.extras import hooks
from ddlf.rpc.code import PickleOnce
from ddlf.rpc.iworker import awaited
from ddlf.training.context import App, travels
from ddlf.training.crew.crew import Crew
from ddlf.training.crew.threads import chosen_threads, given_threads, unused_cores
from ddlf.training.reporter import hooked
from ddlf.training.roles import PRELOADED, REPLICA, have_keras
from ddlf.training.samples.files import check_all_present, files_of, unpacked_files
from ddlf.training.samples.policy import CommonData, DataDescription, data_of
from ddlf.training.slot.arithmetic import (
    Arithmetic,
    arithmetic_warnings,
    mixed,
    mixed_backends,
    prepare_master,
    set_arithmetic,
    unused,
)
from ddlf.training.slot.build import ModelReport, NumberFormat, describe_weights, number_format, ready_model
from ddlf.training.slot.replica import LoadReport, Replica, no_exit
from ddlf.worker.source import Source, other_source, source

ASKED_S = 10.0
"""Maximum seconds that the master delays its own loading, until workers confirm that they have the app."""
TOLD = ("importing", "loading", "building")
"""The phases that a worker reports while it loads."""
CLOSE_S = 30.0
"""Time limit for a worker to receive the end of a run: it may be busy with something else."""


class Opening:
    """Sends the app and the requests of a run to each worker.

    The messages are made once, so a worker that returns gets the same ones.

    Args:
        app: The user's ``IApp``, before the master loads data and builds the model.
        run: Name of the training run on the workers.
        replica: The class of the role that trains on the workers.

    Attributes:
        data: The policy of the training data.
        content: Future with the fingerprint of the master's training data, "" if it has none.
        watches: Context managers of optional parts of DDLF, open during the run.
        fingerprints: The fingerprint of each array, if ``load_dataset`` sets only arrays. A worker that holds these arrays
            need not load them.
        opened: The report of each opened worker, by its number.
        threads: Number of threads of each worker; None leaves each its own number.
        arithmetic: How the master computes.
        checked: Whether the workers have been compared with the master. Later workers are compared when they open.

    Raises:
        NotPicklable: The app holds something that cannot be sent.
    """

    def __init__(self, app: App, run: str, replica: type[Replica] = Replica) -> None:
        self.app = app
        app.run_context.local_files = {}
        self.data = app.run_context.data = data_of(app)
        self.run = run
        self._replica = replica
        self._role = (run, REPLICA)
        format = number_format()
        self._format = None if format in (None, NumberFormat("float32")) else format
        self.content: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.fingerprints: dict[str, str] = {}
        self.watches: list[AbstractContextManager[None]] = []
        self.opened: dict[int, LoadReport] = {}
        self.threads: int | None = None
        self.arithmetic = Arithmetic()
        self._backends: dict[int, str] = {}  # of the workers so far, by number
        self._kinds: set[str] = set()  # the kinds of cards of the workers so far
        self._sources: dict[int, Source] = {}  # the other source of DDLF that workers were said to have, by number
        self.checked = False
        self._requested: set[int] = set()
        self._telling: set[asyncio.Future[Any]] = set()
        self._news = asyncio.Event()
        self._pickle = PickleOnce()
        self._size = len(self._pickle(app))
        self._is_over = False

    async def open(self, worker: ProxyWorker) -> None:
        """Send the app to a worker, and have it load the data and build the model. Repeat all of it after a loss.

        Raises:
            RemoteError: The app raised an error there.
            AppError: The model there is different.
            DatasetMismatch: The data there is different.
        """
        with PhasesInTurn(self._tell, worker.id, worker.nickname) as phases:
            await self._open(worker, phases)

    def _tell(self, event: Event) -> None:
        """Emit an event, unless the run is over: late events of workers are dropped."""
        if not self._is_over:
            self.app.run_context.emit(event)

    async def _open(self, worker: ProxyWorker, phases: PhasesInTurn) -> None:
        self.opened.pop(worker.id, None)
        try:
            phases.begin("importing")
            comparison = [self.compare_sources([worker])] if self.checked else []  # it has come later than the others
            await asyncio.gather(worker.preload(*PRELOADED), *comparison)
            await self._use_threads(worker)
            await self._use_determinism(worker)
            phases.begin("sending", total=self._size, unit="bytes")
            await worker.call(self._role, "open", self._replica, self.app, self.run, pickle=self._pickle)
            fingerprints = self.fingerprints if self.content.done() else None
            asking = asyncio.ensure_future(self._load(worker, fingerprints, phases))
            await asyncio.sleep(0)  # let the event loop send the request
        finally:
            self._requested.add(worker.id)
            self._news.set()
        try:
            report = await asking
        except BaseException:
            asking.cancel()
            raise
        if report is None:
            await self.content
            report = await self._load(worker, self.fingerprints, phases)
            assert report is not None
        if self.checked:
            self._check_backend(worker.id, report.model.backend)
            _check_models(self.app, {worker.id: report.model})
            self.data.accept(worker.id, report.data.description)
            self._warn_of_kind(worker, report.model.arithmetic)
        self.opened[worker.id] = report
        if self.checked:  # before this point, the master may not have its data
            self.app.run_context.local_files[worker.id] = unpacked_files(report.data.files, files_of(self.app))

    async def compare_sources(self, workers: list[ProxyWorker]) -> None:
        """Say which of these workers have other source of DDLF than this machine. Leave out workers that are lost."""
        source_here = await asyncio.to_thread(source)
        answers = await asyncio.gather(*map(_source_of, workers))
        names: dict[Source, list[str]] = {}
        for worker, source_there in zip(workers, answers, strict=True):
            if source_there is not None and source_there not in (source_here, self._sources.get(worker.id)):
                names.setdefault(source_there, []).append(worker.name)
                self._sources[worker.id] = source_there
        for source_there in names:
            self._tell(Warned(about="source", why=other_source(names[source_there], source_there, source_here)))

    def _check_backend(self, number: int, backend: str) -> None:
        """Warn once that workers compute with different backends of Keras, or refuse it."""
        is_new = backend not in self._backends.values()
        self._backends[number] = backend
        if (sentence := mixed_backends(self.app, self._backends)) and is_new:
            self._tell(Warned(about="backend", why=sentence))

    def _warn_of_kind(self, worker: ProxyWorker, arithmetic: Arithmetic) -> None:
        """Warn once that a worker which has come later computes on another kind of card."""
        if arithmetic.kind not in self._kinds:
            self._tell(Warned(about="cards", why=mixed({worker.name: arithmetic}, sorted(self._kinds))))
            self._kinds.add(arithmetic.kind)
        if arithmetic.unused:
            self._tell(Warned(about="cards", why=unused(worker.name, arithmetic)))

    async def _use_threads(self, worker: ProxyWorker) -> None:
        if self.threads is None:
            return
        await worker.use_threads(self.threads)
        if worker.executor.threads != self.threads:  # workers of earlier releases use their environment's number
            sentence = f"{worker.name} computes with {worker.executor.threads} threads, not {self.threads}: its results may differ in bits"
            self._tell(Warned(about="threads", why=f"{sentence}. Unset OMP_NUM_THREADS there, or update DDLF"))

    async def _use_determinism(self, worker: ProxyWorker) -> None:
        if not await worker.use_determinism(self.app.deterministic):  # a worker of an earlier release
            sentence = (
                f"{worker.name} cannot compute equal bits in each run, as deterministic=True demands: update DDLF there"
            )
            self._tell(Warned(about="deterministic", why=sentence))

    def choose_threads(self, *, equal: bool, fresh: bool) -> None:
        """Choose the number of threads of all workers, after they are connected."""
        app, workers = self.app, self.app.cluster.workers
        self.threads = given_threads(app, fresh=fresh)
        if self.threads is None and equal:
            executors = [worker.executor for worker in workers]
            self.threads = chosen_threads(executors, app.slots or app.cluster.places, app.cluster.places)
            if sentence := unused_cores(executors, self.threads):
                app.run_context.emit(Warned(about="threads", why=sentence))
        app.run_context.threads = self.threads

    async def _load(
        self, worker: ProxyWorker, fingerprints: dict[str, str] | None, phases: PhasesInTurn
    ) -> LoadReport | None:
        """Have a worker load the data and build the model, and pass on its reports of progress."""

        def hear(facts: dict[str, Any]) -> None:
            if facts["what"] in TOLD:
                phases.begin(facts["what"])

        arguments = [] if self._format is None else [list(self._format)]  # earlier releases know no other argument
        report: LoadReport | None = await worker.call(self._role, "load", fingerprints, *arguments, hear=hear)
        return report

    async def load_on_master(self, seed: int) -> None:
        """Load the data and build the model on the master, in parallel with the workers."""
        app = self.app
        prepare_master(app)
        # First, and on a thread: meanwhile the event loop can send the app to workers that have imported Keras, too.
        with Phase(app.run_context.emit, "importing"):
            await asyncio.gather(self._have_requested(app.cluster.workers), have_keras())
            self.arithmetic = set_arithmetic(app)
        if not self.data.is_loaded(app):
            attributes_before = dict(vars(app))
            with Phase(app.run_context.emit, "loading"):
                await _make(app, partial(_load, app, self.data))
            created = {
                name for name, value in vars(app).items() if attributes_before.get(name, attributes_before) is not value
            }
            app.run_context.arrays_only = created <= {*app_data.NAMES}
        fingerprints: dict[str, str] = {}
        if hasattr(app, "x_train") or hasattr(app, "train_data"):
            app_data.check_data(app)
            fingerprints = await asyncio.to_thread(app_data.contents, app)
        all_found = all(name in fingerprints for name in app_data.NAMES if getattr(app, name, None) is not None)
        self.fingerprints = fingerprints if app.run_context.arrays_only and all_found else {}
        self.content.set_result(app_data.content(fingerprints) if fingerprints else "")
        if hasattr(app, "model"):
            ready_model(app)
        else:
            with Phase(app.run_context.emit, "building"):
                await self._replica.build_on_master(app, seed, partial(_make, app, app.create_model))
        self.watches = [await watch(app) for watch in hooks("watch_run")]

    async def _have_requested(self, workers: list[ProxyWorker]) -> None:
        """Wait until these workers have the app or have failed. After that, the master may block the event loop."""
        try:
            async with asyncio.timeout(ASKED_S):
                while not self._requested.issuperset(worker.id for worker in workers):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return

    def close(self, workers: list[ProxyWorker]) -> None:
        """Ask these workers to free the data and models of this run, without waiting.

        A worker that misses this frees it when the next run opens.
        """
        self._is_over = True
        for worker in workers:
            if worker.id in self._requested and worker.connected:
                telling = asyncio.ensure_future(worker.call(self._role, "close", timeout_s=CLOSE_S))
                self._telling.add(telling)
                telling.add_done_callback(self._finish_telling)

    def _finish_telling(self, telling: asyncio.Future[Any]) -> None:
        self._telling.discard(telling)
        if not telling.cancelled():
            telling.exception()

    def check(self) -> int:
        """Compare the models and data of all workers that are ready with the master's.

        Returns:
            The number of training samples.
        """
        app, opened = self.app, dict(sorted(self.opened.items()))
        for number, report in opened.items():
            self._check_backend(number, report.model.backend)
        _check_models(app, {number: report.model for number, report in opened.items()})
        self.data.compare(self.content.result(), self.descriptions())
        for number, report in opened.items():
            app.run_context.local_files[number] = unpacked_files(report.data.files, files_of(app))
        check_all_present(files_of(app), app.run_context.local_files)
        self.checked = True
        self._kinds = {report.model.arithmetic.kind for report in opened.values()}
        first = next(iter(opened.values()))
        app.run_context.content, app.run_context.optimizer = self.data.content, first.model.optimizer
        return self.data.samples

    def descriptions(self) -> dict[int, DataDescription]:
        """Return the data of each opened worker, by its number, in this order."""
        return {number: report.data.description for number, report in sorted(self.opened.items())}


async def _source_of(worker: ProxyWorker) -> Source | None:
    """Return a worker's source of DDLF; None if the worker is lost, which the crew will notice."""
    try:
        return Source(**await worker.ask("source"))
    except ProtocolError:  # an earlier source, which does not know the question
        return Source("", "")
    except DDLFError:
        return None


@contextlib.asynccontextmanager
async def crew_of(
    app: App,
    seed: int | None = None,
    *,
    backups: bool = True,
    run: str | None = None,
    replica: type[Replica] = Replica,
    equal_threads: bool = True,
    fresh: bool = False,
) -> AsyncIterator[tuple[Crew, int]]:
    """Connect the workers, and prepare all nodes for training: load the data, build the model, and compare both.

    Args:
        app: The user's ``IApp``.
        seed: Seed of the initial weights, if the model is made here; by default the app's ``seed``.
        backups: Whether a second worker also gets the slot of a straggler.
        run: Name of the run; by default a new unique name.
        replica: The class of the role that trains on the workers.
        equal_threads: Whether all workers compute with the same number of threads, even if the user sets none.
        fresh: Whether to ignore the app's earlier training.

    Yields:
        The crew, and the number of training samples.
    """
    begin = time.perf_counter()
    opening = Opening(app, run or secrets.token_hex(8), replica)
    app.cluster = app.cluster or default_cluster()
    stop_hearing = app.cluster.subscribe(app.run_context.emit)
    try:
        await app.connect()
        await opening.compare_sources(app.cluster.workers)  # other source may be the reason of the next error
        opening.choose_threads(equal=equal_threads, fresh=fresh)
        async with (
            Crew(
                app.cluster,
                opening.open,
                app.run_context.emit,
                backups=backups and opening.data.homes is None,
                homes=opening.data.homes,
                wait_s=app.wait_for_workers_s,
            ) as crew,
            hooked(app, crew.end),
        ):
            # do this only now: if another run of this app was active, the crew has failed
            app.run_context.name = opening.run
            seed = app.seed if seed is None else seed
            await _run_both(opening.load_on_master(seed), crew.ready())
            samples = opening.check()
            _tell(app, opening, time.perf_counter() - begin)
            with contextlib.ExitStack() as stack:
                for watch in opening.watches:
                    stack.enter_context(watch)
                yield crew, samples
    finally:
        opening.content.cancel()  # nobody will set this future any more
        opening.close(app.cluster.workers)
        try:
            await asyncio.gather(*(worker.flush() for worker in app.cluster.workers))
        finally:
            stop_hearing()  # do this only now, because the last lines of output belong to this run


async def _run_both(on_master: Coroutine[Any, Any, None], on_workers: Coroutine[Any, Any, None]) -> None:
    """Run two coroutines, of the master and of the workers.

    If one fails, cancel the other. The master's error counts more.
    """
    tasks = [asyncio.ensure_future(on_master), asyncio.ensure_future(on_workers)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            task.result()


async def prepare(app: App, seed: int | None = None) -> int:
    """Prepare every node for training, but do not train.

    Args:
        app: The user's ``IApp``.
        seed: Seed of the initial weights; by default the app's ``seed``.

    Returns:
        The number of training samples.
    """
    async with crew_of(app, seed) as (_, samples):
        return samples


async def _load(app: App, data: CommonData) -> None:
    """Load the data of the master, and convert it to the form that training uses."""
    await data.load(app)
    await asyncio.to_thread(app_data.take_made, app)


async def _make(app: App, method: Callable[[], Any]) -> None:
    """Call a user's method that sets attributes, and note these attributes, since they are not sent to workers."""
    attributes_before, absent = dict(vars(app)), object()
    try:
        with no_exit(getattr(method, "__name__", "load_dataset")):
            await awaited(method())
    finally:
        created = dict(app.run_context.created)
        for name in travels(app):  # other attributes never travel
            value, old = vars(app)[name], attributes_before.get(name, absent)
            if old is not value:
                values = created.get(name)
                # the attribute was set twice: keep the value from before the first time
                if values is not None and values[0] is old:
                    created[name] = (value, *values[1:])
                else:
                    created[name] = (value,) if old is absent else (value, old)
        app.run_context.created = created


def _tell(app: App, opening: Opening, seconds: float) -> None:
    opened = opening.opened
    first = next(iter(opened.values()))
    computed = {f"worker {number}": report.model.arithmetic for number, report in sorted(opened.items())}
    app.run_context.emit(
        ModelBuilt(
            name=app.model.name,
            parameters=app.model.count_params(),
            keras=first.model.keras,
            backends=tuple(sorted({report.model.backend for report in opened.values()})),
            threads=tuple(sorted({worker.executor.threads for worker in app.cluster.workers if worker.id in opened})),
            seconds=seconds,
            bfloat16_gain=max(report.model.gain for report in opened.values()),
            tf32=next((arithmetic.tf32 for arithmetic in computed.values() if arithmetic.tf32), ""),
            batch_parts=max(report.model.batch_parts for report in opened.values()),
        )
    )
    for about, sentence in arithmetic_warnings(app, computed, opening.arithmetic):
        app.run_context.emit(Warned(about=about, why=sentence))
    for name in app_data.NAMES:
        if getattr(app, name, None) is not None and (values := not_finite(getattr(app, name))):
            app.run_context.emit(Warned(about="data", why=f"{values} of {name} are NaN or infinite"))
    if (data := app_data.data_set_of(app, "train")) is not None:
        for sentence in filter(None, (data.inexact, *data.notes)):
            app.run_context.emit(Warned(about="data", why=sentence))
    for sentence in app_data.look_alikes(app):
        app.run_context.emit(Warned(about="data", why=sentence))
    app.run_context.emit(
        DataLoaded(
            samples=opening.data.samples,
            shape=opening.data.shape(opening.descriptions()),
            content=opening.data.content,
            workers=len(opened),
            loaded=sum(report.data.loaded for report in opened.values()),
            seconds=max(report.data.seconds for report in opened.values()),
        )
    )


def _check_models(app: App, models: Mapping[int, ModelReport]) -> None:
    # do not use app.model, which would fetch remote weights
    own_weights = [tuple(row[1:]) for row in describe_weights(vars(app)["model"])]
    for number, model in models.items():
        text = getattr(vars(app)["model"], "notation", None)
        if text is not None and model.text != text.digest:
            raise AppError(
                f"worker {number} reads another model text from {text.file} than the master",
                hint="run it again: if the file was changed meanwhile, both now read the same text",
            )
        if (worker_weights := [tuple(row[1:]) for row in model.weights]) != own_weights:
            differing = next(
                (pair for pair in zip(worker_weights, own_weights, strict=False) if pair[0] != pair[1]), None
            )
            worker_words, own_words = (
                (f"{len(worker_weights)} weights", f"{len(own_weights)}")
                if differing is None
                else (f"a weight of shape {tuple(shape)}, {kind}" for shape, kind in differing)
            )
            raise AppError(
                f"create_model makes another model on worker {number} ({worker_words}) than on the master ({own_words})",
                hint="it must not depend on the machine it runs on",
            )
