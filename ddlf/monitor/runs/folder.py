"""Folders of runs: their names, their states, and how to find them. Runs on the master; uses small files only.

A folder is ``DIR/YYYYMMDD-HHMMSS-NAME``. The file ``state.json`` has the state of the run and its process. If that
process has ended without writing the end of the run, it was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import unicodedata
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from ddlf.errors import ConfigError
from ddlf.events import facts

USUAL = "runs"
"""The default parent folder of ``ddlf run``."""
NONE = "none"
"""Setting of ``out`` that disables run folders."""
EVENTS = "events.jsonl"
STATE = "state.json"
SUMMARY = "summary.json"
METRICS = "metrics.csv"
REPORT = "report.html"
MODEL = "model.keras"
NOTATION = "model.nnm"
"""The model text with all decisions, if the run has one."""
CHECKPOINTS = "checkpoints"
PEERS = "plan.json"
"""The plan of a training by peers. Other runs have none."""
LOGS = "logs"
BEFORE = ".1"
"""The suffix of the older part of a log that became too long."""
MOST_NAME_BYTES = 100
"""Maximum length of a run's name in the name of its folder. File names have at most 255 bytes."""
STAMP = re.compile(r"\d{8}-\d{6}-")

How = Literal["running", "finished", "failed", "stopped"]


@dataclass(frozen=True, kw_only=True)
class Status:
    """The status of a run (running, finished, failed or stopped), as in the file ``state.json`` of its folder.

    Args:
        state: ``"running"``, ``"finished"``, ``"failed"`` or ``"stopped"`` (by the user, or killed).
        app: Name of the app's class.
        began: Time of its beginning, in seconds since 1970.
        host: Machine of the process.
        pid: Number of the process.
        started: Start time of the process, as text of its system, because process numbers are reused.
        ended: Time of its end; None if it has not ended, or was killed.
        why: The reason why the run ended early, if it did.
        restarts: How often the command was started again for this run (``--requeue``).
        checkpoint: The folder for the checkpoints of a run that may be started again; empty for other runs.
        job: The engine's name of the job that runs it; empty without one.
    """

    state: How
    app: str
    began: float
    host: str
    pid: int
    started: str = ""
    ended: float | None = None
    why: str = ""
    restarts: int = 0
    checkpoint: str = ""
    job: str = ""


def usual_out() -> str:
    """Return the default parent folder of runs: ``$DDLF_RUN_DIR``, else ``./runs``."""
    return os.environ.get("DDLF_RUN_DIR") or USUAL


def is_wanted(out: str | Path | None) -> bool:
    """Return whether the value of the setting ``out`` asks for a folder of the run."""
    return out is not None and str(out) != NONE


def begun(app: str) -> Status:
    """Return the status of a run that this process begins now, with the facts that identify the process."""
    pid = os.getpid()
    return Status(
        state="running",
        app=app,
        began=time.time(),
        host=socket.gethostname(),
        pid=pid,
        started=process_started(pid) or "",
    )


def make(out: Path, name: str) -> Path:
    """Create a folder for a run that starts now. A number is added if another run started in the same second.

    Raises:
        OSError: The folder cannot be created.
    """
    with contextlib.suppress(FileExistsError):  # another run may create it at the same time
        out.mkdir(parents=True)
        # Then git does not report the sources of the next run as changed.
        (out / ".gitignore").write_text("*\n", encoding="utf-8")
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{file_name(name) or 'run'}"
    for number in range(1, 1000):
        path = out / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise FileExistsError(f"{out / stem} and 998 folders with similar names exist already")


def file_name(name: str) -> str:
    """Return a name without the characters that are unfit for file names. Letters of all languages stay, and long names
    are cut.
    """
    clean = re.sub(r"[^\w.-]+", "-", unicodedata.normalize("NFC", name)).strip("-.")
    return clean.encode()[:MOST_NAME_BYTES].decode(errors="ignore").rstrip("-.")


def write_json(path: Path, data: Any) -> None:
    """Replace the content of a JSON file atomically: a reader sees the old or the new one, even after a kill.

    Raises:
        OSError: It cannot be written.
    """
    write_text(path, _as_json(data))


def write_json_over(path: Path, data: Any) -> None:
    """Overwrite a JSON file in place, for a full disk. The change is not atomic.

    Raises:
        OSError: It cannot be written.
    """
    with path.open("r+", encoding="utf-8") as file:
        file.write(_as_json(data))
        file.truncate()


def _as_json(data: Any) -> str:
    return json.dumps(facts.to_data(data), indent=1, ensure_ascii=False) + "\n"


def write_text(path: Path, text: str) -> None:
    """Replace the content of a text file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file; empty if it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def read_state(path: Path) -> Status:
    """Return the current state of a run. A run whose process is gone is stopped, whatever its folder says."""
    try:
        state = facts.from_data(Status, read_json(path / STATE))
    except (TypeError, ValueError):
        began = path.stat().st_mtime
        return Status(
            state="stopped", app="", began=began, host="", pid=0, why="the folder does not show how the run ended"
        )
    if state.state != "running" or state.host != socket.gethostname():
        return state
    if process_started(state.pid) == (state.started or None):
        return state
    return replace(state, state="stopped", why=f"its process {state.pid} was killed")


def process_started(pid: int) -> str | None:
    """Return the start time of a process, as a text in the form of its operating system; None if there is no such
    process. It distinguishes processes with the same number.
    """
    if Path("/proc/self/stat").exists():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            return None if fields[0] in "ZX" else fields[19]
        return None
    listing = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return listing.stdout.strip() or None


def runs_in(out: Path) -> list[Path]:
    """Return the folders of all runs in a folder, newest first."""
    try:
        folders = [path for path in out.iterdir() if STAMP.match(path.name) and path.is_dir()]
    except OSError:
        return []
    return sorted(folders, key=lambda path: (path.name[:15], _began(path), path.name), reverse=True)


def _began(path: Path) -> float:
    began = read_json(path / STATE).get("began", 0.0)
    return began if isinstance(began, float) else 0.0


def unfinished(out: Path, checkpoint: str, job: str) -> tuple[Path, bool] | None:
    """Return the folder of the newest run with these checkpoints, and whether its process was lost with its machine;
    None if there is no such run, or if it has finished or still runs.

    Args:
        out: The parent folder of the runs.
        checkpoint: The folder for the run's checkpoints.
        job: The engine's name of the job that runs this command. A job runs only once at a time, so an earlier process of
            the same job on another machine has ended.
    """
    for path in runs_in(out):
        if read_json(path / STATE).get("checkpoint") == checkpoint:
            status = read_state(path)
            is_lost = status.state == "running" and status.job == job and status.host != socket.gethostname()
            return (path, is_lost) if is_lost or status.state in ("stopped", "failed") else None
    return None


def find(out: Path, name: str = "last") -> Path:
    """Return the folder of the run that a name means.

    Args:
        out: The parent folder of the runs.
        name: Its path, the beginning of its name, with or without the time, or ``"last"``.

    Raises:
        ConfigError: No run has this name, or several runs have it.
    """
    if "/" in name or name.startswith("."):
        if Path(name).is_dir() and ((path := Path(name)) / STATE).exists():
            return path
        raise ConfigError(f"{name!r} is not the folder of a run", hint="list the runs with: ddlf runs")
    runs = runs_in(out)
    if not runs:
        raise ConfigError(
            f"there are no runs in {str(out)!r}", hint="start one with ddlf run, or name their folder with --out DIR"
        )
    if name == "last":
        return runs[0]
    matches = [path for path in runs if path.name == name] or [
        path for path in runs if path.name.startswith(name) or STAMP.sub("", path.name).startswith(name)
    ]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        raise ConfigError(f"no run in {str(out)!r} begins with {name!r}", hint="list the runs with: ddlf runs")
    names = ", ".join(path.name for path in matches[:5]) + ", ..." * (len(matches) > 5)
    raise ConfigError(
        f"{len(matches)} runs in {str(out)!r} begin with {name!r}: {names}", hint="give more letters of the name"
    )


def prune(out: Path, keep: int) -> tuple[list[Path], dict[Path, str], dict[Path, str]]:
    """Remove the folders of the oldest runs that are over.

    Args:
        out: The parent folder of the runs.
        keep: The number of newest runs to keep.

    Returns:
        The removed folders, the older folders that stay, and the folders that could not be removed, with reasons.
    """
    removed: list[Path] = []
    stay: dict[Path, str] = {}
    failed: dict[Path, str] = {}
    runs = runs_in(out)
    going_on = [path for path in runs[keep:] if read_state(path).state == "running"]
    stay.update(dict.fromkeys(going_on, "it is still running"))
    used = {home: path.name for path in (*runs[:keep], *going_on) for home in checkpoints_of(path)}
    for path in runs[keep:]:
        if path in stay:
            continue
        if (user := used.get(path.resolve())) is not None:
            stay[path] = f"it has the checkpoints of {user}"
            continue
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # another process removes it, too
        except OSError as error:
            failed[path] = error.strerror or str(error)
        else:
            removed.append(path)
    return removed, stay, failed


def checkpoints_of(path: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, or, while it has none, of the checkpoints that it resumed from."""
    summary = read_json(path / SUMMARY)
    earlier = summary.get("goes_on_from", {}).get("checkpoints")
    return [Path(checkpoint).resolve().parent for checkpoint in (summary.get("checkpoints") or earlier,) if checkpoint]
