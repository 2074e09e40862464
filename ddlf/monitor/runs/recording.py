"""Records a run in a folder and in external trackers, from its beginning to its end. Runs on the master.

The folder is written on its own thread, and is readable at any moment, however the run ends. Each event is a line of
``events.jsonl``, and the report is computed from these lines.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ddlf import events as e
from ddlf.data.app import UserApp
from ddlf.errors import AuthError, ConfigError, ConnectError, LeaseError, VersionError
from ddlf.events.facts import to_data
from ddlf.events.record import RoundRecord, row
from ddlf.events.sinks import to_json
from ddlf.monitor.card_use import CardUse
from ddlf.monitor.runs import folder, summary
from ddlf.monitor.runs.background import BackgroundWriter, Timed, log, reason
from ddlf.monitor.runs.logs import OF_USER_CODE, OF_WORKER, STAMP
from ddlf.monitor.runs.trackers import WRITERS, check_installed
from ddlf.settings.declared import declared, declared_with

ELSEWHERE = (e.SlotMoved, e.PhaseMoved, e.WorkerWrote, e.WorkerLogged)
"""Events that ``events.jsonl`` does not contain: two are frequent and not needed later, and workers' output has its own
files."""
MOST_LOG_BYTES = 32 * 1024**2
"""Maximum size of a worker's log. Then a new file is begun, and only the previous one is kept."""
OF_A_WORKER = ("host", "python", "cores", "threads", "gpus")
"""Facts about a worker for the summary."""
CLOSE_S = 20.0
"""Maximum seconds that the end of a run waits for a slow disk or server."""
NOT_BEGUN = (ConfigError, ConnectError, LeaseError, AuthError, VersionError)
"""Errors of a run whose settings were refused, or which could use no worker."""


class FolderWriter:
    """Writes the folder of one run.

    Args:
        app: The user's ``IApp``, or an object with its attributes; None if a subclass writes its own summary.
        path: Existing folder.
        origins: Origins of settings from outside of the app, by name.
        job: The engine's name of the job that may run the command again; empty without one. If the folder has an earlier
            part of the run already, this one continues it.
        name: Name of the run's app, if it is not the class of ``app``.
        continues: Whether the folder has an earlier part of the run.

    Attributes:
        ended: How and why training ended, as the run reported it; None before the end.
        is_over: Whether the run is over. Later events are written with a new summary and report.
        has_begun: Whether training has begun, now or in an earlier start of the command.

    Raises:
        OSError: The folder cannot be written to.
    """

    def __init__(
        self,
        app: UserApp | None,
        path: Path,
        origins: dict[str, str],
        job: str = "",
        *,
        name: str = "",
        continues: bool = False,
    ) -> None:
        self.ended: tuple[folder.How, str] | None = None
        self.is_over = False
        self._app = app
        self._path = path
        self._origins = origins
        self._state = folder.begun(name or type(app).__name__)
        self._summary: dict[str, Any] = {"run": path.name, "app": self._state.app}
        self._test: dict[str, float] = {}
        self._last: RoundRecord | None = None
        self._columns: list[str] = []
        self._begun: dict[str, str] = {}  # the first line of a worker's new incarnation, until it writes something
        self._incarnations: dict[str, int] = {}
        self._cards = CardUse()
        self._is_torn = False
        if job and app is not None:
            self._state = replace(self._state, job=job, checkpoint=_checkpoint_of(app))
        if job or continues:
            self._continue()
        self.has_begun = self._state.restarts > 0
        self._write_state()

    def _continue(self) -> None:
        """Continue what an earlier start of the command has written, if there was one."""
        if not (self._path / folder.STATE).exists():
            return
        before = folder.read_state(self._path)
        self._state = replace(self._state, began=before.began, restarts=before.restarts + 1)
        self._summary = folder.read_json(self._path / folder.SUMMARY) | self._summary
        self._summary.pop("git", None)  # this start may have other settings and sources
        with contextlib.suppress(OSError), (self._path / folder.METRICS).open(newline="", encoding="utf-8") as file:
            self._columns = list(csv.DictReader(file).fieldnames or ())
        with contextlib.suppress(OSError):
            self._is_torn = not (self._path / folder.EVENTS).read_bytes().endswith(b"\n")

    def write(self, batch: list[Timed]) -> None:
        """Write a batch of events to the run's folder.

        Raises:
            OSError: Some of them could not be written.
        """
        for when, event in batch:
            self._look(when, event)
        self._write_events([(when, event) for when, event in batch if not isinstance(event, ELSEWHERE)])
        self._write_logs(batch)
        if rows := [
            {"time": round(when, 3), **to_data(row(event.record))}
            for when, event in batch
            if isinstance(event, e.Committed)
        ]:
            self._write_metrics(without_replaced(rows))
        if any(isinstance(event, e.RunBegan | e.TrainingBegan) for _, event in batch):
            self.has_begun = True
            self._write_summary()
            model = None if self._app is None else vars(self._app).get("model")
            if (notation := getattr(model, "notation", None)) is not None:
                (self._path / folder.NOTATION).write_text(notation.text, encoding="utf-8")
        if self.is_over:
            self._write_end()

    def end(self, how: folder.How, cause: str, lost: int) -> None:
        """Write the end of the run: how it ended, the summary and the report.

        Args:
            how: How it ended.
            cause: The reason why the run ended early, if it did.
            lost: Number of events that could not be written.

        Raises:
            OSError: Something could not be written.
        """
        self.is_over = True
        self._state = replace(self._state, state=how, why=cause, ended=time.time())
        try:
            self._write_state()
        except OSError:
            folder.write_json_over(self._path / folder.STATE, self._state)
        if lost:
            self._summary["events_lost"] = self._summary.get("events_lost", 0) + lost
        self._write_end()

    def _write_end(self) -> None:
        from ddlf.monitor.runs.report import write

        self._write_summary()
        write(self._path)

    def _write_state(self) -> None:
        folder.write_json(self._path / folder.STATE, self._state)

    def _look(self, when: float, event: e.Event) -> None:
        """Store those facts of an event that the run's summary will contain."""
        match event:
            case e.Committed():
                if self._last is not None and event.record.version <= self._last.version:  # the run has gone back
                    self._remove_metrics_after(event.record.version - 1)
                self._last = event.record
            case e.Evaluated():
                self._test = event.metrics
            case e.ModelSaved():
                self._summary["model"] = str(Path(event.path).resolve())
            case e.CheckpointWritten():
                self._summary["checkpoints"] = str(Path(event.path).resolve())
            case e.CardRead():
                self._cards.add(event)
            case e.TrainingBegan() if self._state.restarts:
                self._remove_metrics_after(event.version)
            case e.TrainingBegan():
                if event.version:
                    self._summary["goes_on_from"] = {"version": event.version, "checkpoints": event.source}
            case e.RunEnded():
                ends: dict[str, folder.How] = {"complete": "finished", "converged": "finished", "failed": "failed"}
                self.ended = ends.get(event.how, "stopped"), event.why

    def _append(self, name: str, text: str) -> None:
        with open(self._path / name, "ab", buffering=0) as file:
            data, size = memoryview(text.encode("utf-8", "backslashreplace")), file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:  # a full disk took a part
                file.truncate(size)
                raise

    def _write_events(self, batch: list[Timed]) -> None:
        lines = [json.dumps({"time": round(when, 3), **to_json(event)}, separators=(",", ":")) for when, event in batch]
        torn, self._is_torn = self._is_torn, True  # an interrupted write leaves an incomplete line
        self._append(folder.EVENTS, "\n" * torn + "".join(f"{line}\n" for line in lines))
        self._is_torn = False

    def _write_logs(self, batch: list[Timed]) -> None:
        """Append workers' output to their log files, with the time of its arrival. Before the first line of each
        incarnation, a line says which it is.
        """
        texts: dict[str, str] = {}
        for when, event in batch:
            stamp = datetime.fromtimestamp(when).isoformat(" ", "milliseconds")
            match event:
                case e.WorkerConnected():
                    if self._incarnations.get(event.name) != event.incarnation or not event.incarnation:
                        self._begun[event.name] = f"{stamp}{OF_WORKER}{_begins(event)}\n"
                    self._incarnations[event.name] = event.incarnation
                    continue
                case e.WorkerWrote():
                    missing = [f"({event.dropped:,} lines came too fast and were dropped)"] * bool(event.dropped)
                    lines, mark = (*missing, *event.lines), OF_USER_CODE
                case e.WorkerLogged():
                    missing = [f"({event.left_out:,} bytes came too fast and were left out)"] * bool(event.left_out)
                    lines, mark = (*missing, *event.lines), OF_WORKER
                case _:
                    continue
            text = self._begun.pop(event.name, "") + "".join(f"{stamp}{mark}{line}\n" for line in lines)
            texts[event.name] = texts.get(event.name, "") + text
        for name, text in texts.items():
            (self._path / folder.LOGS).mkdir(exist_ok=True)
            log = f"{folder.LOGS}/{folder.file_name(name)}.log"
            if (path := self._path / log).exists() and path.stat().st_size > MOST_LOG_BYTES:
                before = path.with_name(path.name + folder.BEFORE)
                if before.exists():
                    notice = f"(older lines were removed: the log keeps {2 * MOST_LOG_BYTES:,} bytes of each worker)"
                    text = f"{text[:STAMP]}{OF_USER_CODE}{notice}\n{text}"
                path.replace(before)
            self._append(log, text)

    def _write_metrics(self, rows: list[dict[str, Any]]) -> None:
        path = self._path / folder.METRICS
        if new := [name for name in dict.fromkeys(name for row in rows for name in row) if name not in self._columns]:
            before: list[dict[str, Any]] = []
            if path.exists():  # the first record does not have this metric
                with path.open(newline="", encoding="utf-8") as file:
                    before = list(csv.DictReader(file))
            columns = [*self._columns, *new]
            head = dict(zip(columns, columns, strict=True))
            folder.write_text(path, _spelled(columns, [head, *before]))
            self._columns = columns
        self._append(folder.METRICS, _spelled(self._columns, rows))

    def _remove_metrics_after(self, version: int) -> None:
        """Remove the rows of rounds that come again, because a killed process has written no checkpoint after them."""
        path = self._path / folder.METRICS
        if path.exists():
            with path.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.DictReader(file) if int(row["version"]) <= version]
            head = dict(zip(self._columns, self._columns, strict=True))
            folder.write_text(path, _spelled(self._columns, [head, *rows]))

    def _write_summary(self) -> None:
        app, facts = self._app, self._summary
        assert app is not None
        if "git" not in facts:  # the first time: record the settings at the beginning of the run
            facts["settings"] = summary.settings_of(app, self._origins)
            facts["source"] = summary.source_of(app)
            facts["git"] = summary.git(Path(facts["source"]).parent if facts["source"] else Path.cwd())
        cluster = getattr(app, "cluster", None)
        workers = cluster.workers if cluster is not None else ()
        facts |= {
            **summary.environment(),
            "workers": [
                {
                    "worker": worker.id,
                    "name": worker.name,
                    **({n: getattr(worker.executor, n) for n in OF_A_WORKER} if worker.executor.host else {}),
                }
                for worker in workers
            ],
            "ledger": summary.ledger_of(app),
        }
        if cards := self._cards.rows():
            facts["cards"] = cards
        if self._last is not None:
            facts["results"] = summary.results(self._last, self._test)
        folder.write_json(self._path / folder.SUMMARY, facts)


def _spelled(columns: Sequence[str], rows: list[dict[str, Any]]) -> str:
    """Return rows as lines of CSV."""
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()


class Recording:
    """Writes a run's folder and trackers. It subscribes to the app when it is created.

    Args:
        app: The user's ``IApp``.
        path: Existing folder of the run.
        origins: Origins of settings from outside of the app, by name.
        trackers: Names of trackers.
        job: The argument of ``FolderWriter``.

    Attributes:
        path: The folder.
        is_over: Whether the run is over.

    Raises:
        OSError: The folder cannot be written to.
    """

    def __init__(
        self, app: UserApp, path: Path, origins: dict[str, str], trackers: Sequence[str] = (), job: str = ""
    ) -> None:
        self.path = path
        self.is_over = False
        self._writer = FolderWriter(app, path, origins, job)
        declared = declared_with(app.mode, app.exchange)
        settings = {name: getattr(app, name, setting.default) for name, setting in declared.items()}
        self._trackers = {name: WRITERS[name][0](path, settings) for name in trackers}
        self._folder = BackgroundWriter(self._writer.write, f"the run's folder {path}")
        self._behind = {
            name: BackgroundWriter(tracker.write, f"the data for {name}") for name, tracker in self._trackers.items()
        }
        self._take_off: list[Callable[[], None]] = [
            app.subscribe(sink) for sink in (self._folder, *self._behind.values())
        ]

    def close(self, error: BaseException | None = None) -> None:
        """Write the remaining events and how the run ended. Later tests and model files are written at once.

        The folder of a run that ended before training began is removed, if its settings were refused or no worker could
        be used. It stays if workers have written something.

        Args:
            error: The error that ended the run, if known.
        """
        self.is_over = True
        is_written = self._folder.close(CLOSE_S)
        how, cause = self._writer.ended or ("finished", "")
        if error is not None:
            how = "failed" if isinstance(error, Exception) else "stopped"
            cause = f"{type(error).__name__}: {error}" if str(error) else ""
        is_refused = isinstance(error, NOT_BEGUN) and not self._writer.has_begun
        if is_written and is_refused and not (self.path / folder.LOGS).exists():
            self.leave()
            shutil.rmtree(self.path, ignore_errors=True)
        elif is_written:
            try:
                self._writer.end(how, cause, self._folder.lost)
            except Exception as failed:
                self._folder.tell(failed)
        else:
            log.warning("the disk of %s does not answer; the run's folder is left as it is", self.path)
        for name, behind in self._behind.items():
            try:
                if behind.close(CLOSE_S):
                    self._trackers[name].end(how)
                else:
                    log.warning("%s does not answer, so it does not receive the end of the run", name)
            except Exception as failed:
                behind.tell(failed)

    def leave(self) -> None:
        """Stop receiving the events of the app."""
        for take_off in self._take_off:
            take_off()


class Unrecorded:
    """The recording of a run whose folder cannot be created; it writes nothing. Nested runs get no folder either, so
    the reason is logged only once.
    """

    path = None
    is_over = False

    def close(self, error: BaseException | None = None) -> None:
        """Record that the run is over; there is no folder to write to."""
        self.is_over = True

    def leave(self) -> None:
        """Do nothing: there is no subscription."""


@contextlib.contextmanager
def recorded(app: UserApp, origins: dict[str, str] | None = None, job: str = "") -> Iterator[Path | None]:
    """Record the app's run in a new folder below ``app.out``, if that names one, and in the app's trackers.

    Later tests and model files go to the same folder until the next run begins. A nested call does nothing.

    Args:
        app: The user's ``IApp``.
        origins: Origins of settings from outside of the app, by name.
        job: The engine's name of the job that may run the command again. The run then continues in the folder of the
            newest run with the same checkpoints, unless that has finished.

    Yields:
        The folder; None if the app disables folders, or if the folder cannot be created.

    Raises:
        ConfigError: A setting cannot be used, or a tracker's package is not installed.
    """
    if app.run_context.recording is not None:
        if not app.run_context.recording.is_over:
            yield app.run_context.recording.path
            return
        app.run_context.recording.leave()
    origins = {} if origins is None else origins
    recording = app.run_context.recording = _begin(app, origins, job)
    in_folder = app.checkpoint is None and app.resume is None and _asks_for_checkpoints(app)
    if in_folder and recording.path is not None:
        app.checkpoint, origins["checkpoint"] = recording.path / folder.CHECKPOINTS, "the run's folder"
    try:
        if in_folder and recording.path is None and folder.is_wanted(app.out):
            raise ConfigError("there is no folder for checkpoints", hint="name one with --checkpoint DIR")
        yield recording.path
    except BaseException as error:
        recording.close(error)
        raise
    finally:
        if in_folder:
            app.checkpoint = None
    recording.close()


def _begins(event: e.WorkerConnected) -> str:
    title = f"incarnation {event.incarnation} of {event.name}" if event.incarnation else event.name
    return f"{title} on {event.host}" + (f" ({event.engine})" if event.engine else "")


def without_replaced(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of rounds that are not trained again later, because the run has gone back."""
    remaining: list[dict[str, Any]] = []
    for record in rows:
        while remaining and remaining[-1]["version"] >= record["version"]:
            remaining.pop()
        remaining.append(record)
    return remaining


def _asks_for_checkpoints(app: UserApp) -> bool:
    """Return whether the user has set how often to write checkpoints, or how many to keep."""
    namespaces = [vars(app), *(vars(kind) for kind in type(app).__mro__)]
    return any(name in namespace for name in ("checkpoint_every", "checkpoint_keep") for namespace in namespaces)


def _checkpoint_of(app: UserApp) -> str:
    return str(Path(app.checkpoint).resolve())


def _begin(app: UserApp, origins: dict[str, str], job: str) -> Recording | Unrecorded:
    out, name, trackers = (declared()[key].check(key, getattr(app, key)) for key in ("out", "run_name", "trackers"))
    if trackers and not folder.is_wanted(out):
        raise ConfigError(
            f"a run without a folder cannot be logged to {' and '.join(trackers)}",
            hint=f"name one with out={folder.USUAL!r}, or --out {folder.USUAL}",
        )
    check_installed(trackers)
    if not folder.is_wanted(out):
        return Unrecorded()
    before = folder.unfinished(Path(out), _checkpoint_of(app), job) if job else None
    if before is not None:
        app.takeover = app.takeover or before[1]  # of the checkpoints, from the process that was lost
    try:
        path = folder.make(Path(out), name or type(app).__name__) if before is None else before[0]
        return Recording(app, path, origins, trackers, job)
    except OSError as error:
        raise ConfigError(
            f"there is no folder for this run: {reason(error)}",
            hint="name one that you may write to with --out DIR, or make none with --out none, which saves no model without --save",
        ) from None
