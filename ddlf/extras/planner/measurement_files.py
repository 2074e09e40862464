"""Keeps measurements between commands: a file for each app, cluster and version. Runs on the master.

A file belongs to the source of an app's class, the settings that change the time of its rounds, its own parameters, the
workers, and the versions of DDLF, Python and Keras. A change of one of them leads to another file. The content has
fingerprints of the training data and of other imported files of the user. If one of them has changed, the measurements
do not count. Runs of the app refine the measurements.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ddlf.errors import AuthError
from ddlf.extras.planner.fingerprints import changed, data_of, hash_of
from ddlf.extras.planner.memory import Largest, Peak, Peaks
from ddlf.extras.planner.model import Measured, Setting, Way
from ddlf.monitor.runs.folder import write_json
from ddlf.rpc.tokens import state_folder
from ddlf.training.context import App, travels
from ddlf.training.registry import SETTINGS
from ddlf.version import __version__
from ddlf.worker.machine import keras_backend, packages
from ddlf.worker.status import ExecutorInfo

FORMAT = 5
OF_TIME = (
    *("threads", "deterministic", "partition", "shuffle", "data_memory", "on_bad", "class_weight"),
    *("optimizer_state", "local_rule", "precision", "tf32", "weights_codec", "update_policy", "merge", "outer"),
    *("batchnorm", "arrival", "staleness", "max_staleness", "clip", "multipliers"),
)
"""Settings that may change the time of a round, except the compared ones."""
OF_A_RUN = 5.0
"""Weight of the rounds of a run. Rounds of a short measurement have the weight 1."""
RUNS_OF_A_SETTING, MOST_RUNS = 3, 20
"""Maximum numbers of runs that are kept: of one setting, and of the others together."""
MOST_ROUNDS = 200
"""Maximum number of rounds that are kept of a run, the newest ones."""
OF_A_WORKER = ("host", "cores", "gpus", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements of an app on a cluster.

    Args:
        measured: The measured rounds.
        samples: n, the training samples.
        batch_parts: Into how many parts the cards of a worker divide each batch.
        budget_s: Seconds that the measurements were allowed to take.
        when: When they were made, in seconds since 1970.
        data: The fingerprint of the training data; empty if unknown.
        files: Imported files of the user, with their hashes.
        memory: The measured memory of a worker; None if it was not measured.
        largest: The largest batch that fits into the memory limit of the last plan with one; None without.
    """

    measured: tuple[Measured, ...]
    samples: int
    budget_s: float
    batch_parts: int = 1
    when: float = field(default_factory=time.time)
    data: str = ""
    files: dict[str, str] = field(default_factory=dict)
    memory: Peaks | None = None
    largest: Largest | None = None

    def answers(self, ways: Sequence[Way], batches: Sequence[int], budget_s: float, own_count: int = 1) -> bool:
        """Return whether these measurements suffice for a plan, or a new one would not measure more.

        Args:
            ways: The ways to compare; first the app's own.
            batches: The batch sizes to compare.
            budget_s: Seconds for new measurements.
            own_count: Number of the app's own ways: two with ``exchange="auto"``.
        """
        if not {*ways[:own_count]} <= {rounds.setting.way for rounds in self.measured}:
            return False
        own_batches = {rounds.setting.batch for rounds in self.measured if rounds.setting.way == ways[0]}
        has_ways = {*ways} <= {rounds.setting.way for rounds in self.measured}
        return own_batches >= {*batches} and (has_ways or budget_s <= self.budget_s)

    def fits(self, app: App) -> bool:
        """Return whether the user's files are unchanged, and the data of the app, if it has loaded them."""
        return not changed(self.files) and data_of(app) in ("", self.data)

    def refined(self, run: Measured) -> Measurements:
        """Return these measurements and the rounds of a run, which count more than short measurements do.

        The newest runs of each setting count, instead of the measurements of this setting before.
        """
        run = replace(run, weight=OF_A_RUN, seconds=run.seconds[-MOST_ROUNDS:], computing=run.computing[-MOST_ROUNDS:])
        same = [rounds for rounds in self.measured if rounds.setting == run.setting and rounds.weight == OF_A_RUN]
        remaining = [rounds for rounds in self.measured if rounds.setting != run.setting]
        runs = [rounds for rounds in remaining if rounds.weight == OF_A_RUN]
        dropped = runs[: max(len(runs) - MOST_RUNS, 0)]
        remaining = [rounds for rounds in remaining if rounds not in dropped]
        return replace(self, measured=(*remaining, *same[1 - RUNS_OF_A_SETTING :], run))


def read(app: App, cluster: Any = None) -> Measurements | None:
    """Return the kept measurements of an app on a connected cluster, by default its own; None without any, or if the
    user's files or data have changed."""
    path = path_of(app, cluster)
    measurements = None if path is None else read_file(path)
    return measurements if measurements is not None and measurements.fits(app) else None


def read_file(path: Path) -> Measurements | None:
    """Return the measurements in a file; None if there is no such file, or if it is damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError):  # no file, or a damaged one
        data = json.loads(path.read_text(encoding="utf-8"))
        return Measurements(
            measured=tuple(_measured(rounds) for rounds in data["measured"]),
            samples=int(data["samples"]),
            budget_s=float(data["budget_s"]),
            batch_parts=int(data["batch_parts"]),
            when=float(data["when"]),
            data=str(data["data"]),
            files={str(file): str(digest) for file, digest in data["files"].items()},
            memory=None if data.get("memory") is None else peaks_of(data["memory"]),
            largest=None if data.get("largest") is None else largest_of(data["largest"]),
        )
    return None


def write(app: App, measurements: Measurements) -> bool:
    """Keep measurements of an app for later commands, instead of older ones. Return whether that was possible."""
    path = path_of(app)
    return path is not None and write_file(path, measurements)


def write_file(path: Path, measurements: Measurements) -> bool:
    """Write measurements to a file. Return whether that was possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, measurements)
    except OSError:
        return False
    return True


def path_of(app: App, cluster: Any = None) -> Path | None:
    """Return the file for an app on a connected cluster, by default its own.

    None if the user has no home folder, if a worker is not connected, or if a class of the app has no source file, so
    that changes of it would stay unnoticed.
    """
    return path_on(app, [worker.executor for worker in (cluster or app.cluster).workers])


def path_on(app: App, executors: Sequence[ExecutorInfo]) -> Path | None:
    """Return the file for an app on workers with these executors; None as ``path_of``."""
    sources = [
        _source(kind) for kind in type(app).__mro__ if kind.__module__.partition(".")[0] not in ("ddlf", "builtins")
    ]
    if not all(executor.host for executor in executors) or not all(sources):
        return None
    parts = {
        "format": FORMAT,
        "versions": [__version__, keras_backend(), packages()],
        "sources": sources,
        "app": type(app).__qualname__,
        "notation": _notation(getattr(app, "notation", None)),
        "parameters": own_parameters(app),
        "settings": {name: _text(getattr(app, name, None)) for name in OF_TIME},
        "data": os.environ.get("DDLF_DATA", ""),
        "workers": [[_text(getattr(executor, name)) for name in OF_A_WORKER] for executor in executors],
    }
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    with suppress(AuthError):
        return state_folder() / "plans" / f"{name}.json"
    return None


def own_parameters(app: App) -> dict[str, str]:
    """Return the attributes of an app that are not settings and not of its class, as text. Measurements belong to them."""
    return {name: _text(value) for name, value in travels(app).items() if name not in SETTINGS and name[:1] != "_"}


def _source(kind: type) -> str:
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


def _notation(notation: Any) -> str:
    """Return a fingerprint of the model's text; empty if the app has none."""
    if notation is None:
        return ""
    return str(getattr(notation, "digest", "")) or hash_of(Path(str(notation))) or repr(notation)


def _text(value: Any) -> str:
    """Return a value as text that is the same in each process."""
    text = str(getattr(value, "digest", "")) or repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _measured(data: dict[str, Any]) -> Measured:
    setting = data["setting"]
    return Measured(
        setting=Setting(
            way=Way(**setting["way"]), **{name: setting[name] for name in ("slots", "batch", "steps", "balanced")}
        ),
        seconds=tuple(map(float, data["seconds"])),
        computing=tuple(map(float, data["computing"])),
        sent=float(data["sent"]),
        weight=float(data["weight"]),
        paces=tuple((int(number), float(seconds)) for number, seconds in data["paces"]),
    )


def peaks_of(data: dict[str, Any]) -> Peaks:
    """Return measured memory from its fields."""
    batches = (Peak(**{**peak, "earlier": tuple(map(int, peak["earlier"]))}) for peak in data["batches"])
    return Peaks(**{**data, "batches": tuple(batches)})


def largest_of(data: dict[str, Any]) -> Largest:
    """Return the largest batch from its fields."""
    return Largest(**{**data, "failed": tuple(map(int, data["failed"]))})
