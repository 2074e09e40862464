"""Records a run in a folder and in external trackers, from its beginning to its end. Runs on the master."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ddlf.data.app import UserApp
from ddlf.errors import ConfigError
from ddlf.monitor.runs import folder
from ddlf.monitor.runs.background import Behind, log, reason
from ddlf.monitor.runs.trackers import WRITERS, check_installed
from ddlf.monitor.runs.writer import FolderWriter
from ddlf.settings.declared import declared, declared_with

CLOSE_S = 20.0
"""Maximum seconds that the end of a run waits for a slow disk or server."""


class Recording:
    """Writes a run's folder and trackers. It subscribes to the app when it is created.

    Args:
        app: The user's ``IApp``.
        path: Existing folder of the run.
        origins: Origins of settings from outside of the app, by name.
        trackers: Names of trackers.

    Attributes:
        path: The folder.
        is_over: Whether the run is over.

    Raises:
        OSError: The folder cannot be written to.
    """

    def __init__(self, app: UserApp, path: Path, origins: dict[str, str], trackers: Sequence[str] = ()) -> None:
        self.path = path
        self.is_over = False
        self._writer = FolderWriter(app, path, origins)
        known = declared_with(app.mode, app.exchange)
        settings = {name: getattr(app, name, setting.default) for name, setting in known.items()}
        self._trackers = {name: WRITERS[name][0](path, settings) for name in trackers}
        self._folder = Behind(self._writer.write, f"the run's folder {path}")
        self._behind = {name: Behind(tracker.write, f"the data for {name}") for name, tracker in self._trackers.items()}
        self._take_off: list[Callable[[], None]] = [
            app.subscribe(sink) for sink in (self._folder, *self._behind.values())
        ]

    def close(self, error: BaseException | None = None) -> None:
        """Write the remaining events and how the run ended. Later tests and model files are written at once.

        Args:
            error: The error that ended the run, if known.
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
                    log.warning("%s does not answer, so it does not receive the end of the run", name)
            except Exception as failed:
                behind.tell(failed)

    def leave(self) -> None:
        """Unsubscribe from the app."""
        for take_off in self._take_off:
            take_off()


class Unrecorded:
    """A recording without a folder. Nested runs create no folder either, and the reason is logged only once."""

    path = None
    is_over = False

    def close(self, error: BaseException | None = None) -> None:
        """Record that the run is over."""
        self.is_over = True

    def leave(self) -> None:
        """Do nothing: there is no subscription."""


@contextlib.contextmanager
def recorded(app: UserApp, origins: dict[str, str] | None = None) -> Iterator[Path | None]:
    """Record the app's run in a new folder below ``app.out``, if that names one, and in the app's trackers.

    Later tests and model files go to the same folder until the next run begins. A nested call does nothing.

    Args:
        app: The user's ``IApp``.
        origins: Origins of settings from outside of the app, by name.

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
    recording = app.run_context.recording = _begin(app, origins or {})
    try:
        yield recording.path
    except BaseException as error:
        recording.close(error)
        raise
    recording.close()


def _begin(app: UserApp, origins: dict[str, str]) -> Recording | Unrecorded:
    out, name, trackers = (declared()[key].check(key, getattr(app, key)) for key in ("out", "run_name", "trackers"))
    if trackers and not folder.is_wanted(out):
        raise ConfigError(
            f"a run without a folder cannot be logged to {' and '.join(trackers)}",
            hint=f"name one with out={folder.USUAL!r}, or --out {folder.USUAL}",
        )
    check_installed(trackers)
    if not folder.is_wanted(out):
        return Unrecorded()
    try:
        return Recording(app, folder.make(Path(out), name or type(app).__name__), origins, trackers)
    except OSError as error:
        log.warning("there is no folder for this run: %s; it continues without one", reason(error))
        return Unrecorded()
