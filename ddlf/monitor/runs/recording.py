"""A run that leaves a folder, and tells trackers of others: who begins it, who is told, how it ends. Runs on the master."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ddlf.errors import ConfigError
from ddlf.monitor.runs import folder
from ddlf.monitor.runs.background import Behind, log, reason
from ddlf.monitor.runs.trackers import WRITERS, check_installed
from ddlf.monitor.runs.writer import FolderWriter
from ddlf.training.spec import SETTINGS

CLOSE_S = 20.0
"""How long the end of a run waits for a disk or a server that does not answer."""


class Recording:
    """Subscribed to an app from when it is made.

    Args:
        app: The user's ``IApp``.
        path: Folder of the run, which is there.
        told: Where settings stand that were set from outside, by name.
        trackers: Names of trackers.

    Attributes:
        path: The same folder.
        is_over: Whether the run is.

    Raises:
        OSError: The folder cannot be written to.
    """

    def __init__(self, app: Any, path: Path, told: dict[str, str], trackers: Sequence[str] = ()) -> None:
        self.path = path
        self.is_over = False
        self._writer = FolderWriter(app, path, told)
        settings = {name: getattr(app, name) for name in SETTINGS}
        self._trackers = {name: WRITERS[name][0](path, settings) for name in trackers}
        self._folder = Behind(self._writer.write, f"the run's folder {path}")
        self._behind = {name: Behind(tracker.write, f"what {name} gets") for name, tracker in self._trackers.items()}
        self._take_off: list[Callable[[], None]] = [
            app.subscribe(sink) for sink in (self._folder, *self._behind.values())
        ]

    def close(self, error: BaseException | None = None) -> None:
        """Write the rest, and how the run has ended. A test or a file of the model that is told of later is written at once.

        Args:
            error: What ended it, if that is known.
        """
        self.is_over = True
        is_written = self._folder.close(CLOSE_S)
        how, why = self._writer.ended or ("finished", "")
        if error is not None:
            how = "failed" if isinstance(error, Exception) else "stopped"
            why = f"{type(error).__name__}: {error}" if str(error) else ""
        if is_written:
            try:
                self._writer.end(how, why, self._folder.lost)
            except Exception as failed:
                self._folder.tell(failed)
        else:
            log.warning("the disk of %s does not answer; the run's folder is left as it is", self.path)
        for name, behind in self._behind.items():
            try:
                if behind.close(CLOSE_S):
                    self._trackers[name].end(how)
                else:
                    log.warning("%s does not answer, and misses the end of the run", name)
            except Exception as failed:
                behind.tell(failed)

    def leave(self) -> None:
        """Hear of nothing more."""
        for take_off in self._take_off:
            take_off()


class Unrecorded:
    """In place of a recording for a run without a folder: so what is inside of it makes none either, and the reason is said once."""

    path = None
    is_over = False

    def close(self, error: BaseException | None = None) -> None:
        """The run is over."""
        self.is_over = True

    def leave(self) -> None:
        """It hears of nothing."""


@contextlib.contextmanager
def recorded(app: Any, told: dict[str, str] | None = None) -> Iterator[Path | None]:
    """Have what an app does meanwhile in a folder of its own below ``app.out``, if that names one, and in its trackers.

    A test or a file of the model that comes later is in the folder, too, until the next run begins. Inside of itself it does nothing.

    Args:
        app: The user's ``IApp``.
        told: Where settings stand that were set from outside, by name.

    Yields:
        The folder; None if there is none, because none is wanted or none can be made.

    Raises:
        ConfigError: A setting cannot be used, or a tracker's package is not installed.
    """
    if app.run_context.recording is not None:
        if not app.run_context.recording.is_over:
            yield app.run_context.recording.path
            return
        app.run_context.recording.leave()
    recording = app.run_context.recording = _begin(app, told or {})
    try:
        yield recording.path
    except BaseException as error:
        recording.close(error)
        raise
    recording.close()


def _begin(app: Any, told: dict[str, str]) -> Recording | Unrecorded:
    out, name, trackers = (SETTINGS[key].check(key, getattr(app, key)) for key in ("out", "run_name", "trackers"))
    if trackers and not folder.is_wanted(out):
        raise ConfigError(
            f"a run without a folder cannot be logged to {' and '.join(trackers)}",
            hint=f"name one with out={folder.USUAL!r}, or --out {folder.USUAL}",
        )
    check_installed(trackers)
    if not folder.is_wanted(out):
        return Unrecorded()
    try:
        return Recording(app, folder.make(Path(out), name or type(app).__name__), told, trackers)
    except OSError as error:
        log.warning("there is no folder for this run: %s; it goes on without one", reason(error))
        return Unrecorded()
