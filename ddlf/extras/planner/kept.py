"""Keeps measurements between commands: a file for each app, cluster and version. Runs on the master.

A file belongs to the source of an app's class, the settings that change the time of its rounds, its own parameters, the
workers, and the versions of DDLF, Python and Keras. A change of one of them leads to another file. The data are not part
of the name, because finding them out takes seconds; ``ddlf plan --again`` measures after they have changed.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddlf.errors import AuthError
from ddlf.extras.planner.model import Measured, Setting, Way
from ddlf.monitor.runs.folder import write_json
from ddlf.rpc.tokens import state_folder
from ddlf.training.context import App, travels
from ddlf.training.registry import SETTINGS
from ddlf.version import __version__
from ddlf.worker.machine import keras_backend, packages

FORMAT = 1
OF_TIME = (
    *("threads", "deterministic", "partition", "balance", "shuffle", "data_memory", "on_bad", "class_weight"),
    *("optimizer_state", "local_rule", "precision", "tf32", "weights_codec", "update_policy", "merge", "outer"),
    *("batchnorm", "arrival", "staleness", "max_staleness", "clip", "multipliers"),
)
"""Settings that may change the time of a round, except the compared ones."""
OF_A_WORKER = ("host", "cores", "gpus", "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Measurements of an app on a cluster.

    Args:
        measured: The measured rounds.
        samples: n, the training samples.
        budget_s: Seconds that the measurements were allowed to take.
        when: When they were made, in seconds since 1970.
    """

    measured: tuple[Measured, ...]
    samples: int
    budget_s: float
    when: float = field(default_factory=time.time)

    def answers(self, ways: Sequence[Way], batches: Sequence[int], budget_s: float) -> bool:
        """Return whether these measurements suffice for a plan, or a new one would not measure more.

        Args:
            ways: The ways to compare; first the app's own.
            batches: The batch sizes to compare.
            budget_s: Seconds for new measurements.
        """
        of_own = {one.setting.batch for one in self.measured if one.setting.way == ways[0]}
        has_ways = {*ways} <= {one.setting.way for one in self.measured}
        return of_own >= {*batches} and (has_ways or budget_s <= self.budget_s)


def read(app: App) -> Kept | None:
    """Return the kept measurements of an app on its connected cluster; None without any."""
    path = path_of(app)
    if path is None:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):  # no file, or a damaged one
        data = json.loads(path.read_text(encoding="utf-8"))
        return Kept(
            measured=tuple(_measured(one) for one in data["measured"]),
            samples=int(data["samples"]),
            budget_s=float(data["budget_s"]),
            when=float(data["when"]),
        )
    return None


def write(app: App, kept: Kept) -> bool:
    """Keep measurements of an app for later commands, instead of older ones. Return whether that was possible."""
    path = path_of(app)
    if path is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, kept)
    except OSError:
        return False
    return True


def path_of(app: App) -> Path | None:
    """Return the file for an app on its connected cluster.

    None if the user has no home folder, if a worker is not connected, or if a class of the app has no source file, so
    that changes of it would stay unnoticed.
    """
    facts = [worker.facts for worker in app.cluster.workers]
    sources = [
        _source(kind) for kind in type(app).__mro__ if kind.__module__.partition(".")[0] not in ("ddlf", "builtins")
    ]
    if not all(facts) or not all(sources):
        return None
    own = {name: _text(value) for name, value in travels(app).items() if name not in SETTINGS and name[:1] != "_"}
    parts = {
        "format": FORMAT,
        "versions": [__version__, keras_backend(), packages()],
        "sources": sources,
        "app": type(app).__qualname__,
        "parameters": own,
        "settings": {name: _text(getattr(app, name, None)) for name in OF_TIME},
        "data": os.environ.get("DDLF_DATA", ""),
        "workers": [[_text(one.get(name)) for name in OF_A_WORKER] for one in facts],
    }
    name = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
    with suppress(AuthError):
        return state_folder() / "plans" / f"{name}.json"
    return None


def _source(kind: type) -> str:
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()
    except (OSError, TypeError):
        return ""


def _text(value: Any) -> str:
    """Return a value as text that is the same in each process."""
    text = str(getattr(value, "digest", "")) or repr(value)
    return type(value).__qualname__ if " at 0x" in text else text


def _measured(data: dict[str, Any]) -> Measured:
    setting = data["setting"]
    return Measured(
        setting=Setting(way=Way(**setting["way"]), **{name: setting[name] for name in ("slots", "batch", "steps")}),
        seconds=tuple(map(float, data["seconds"])),
        computing=tuple(map(float, data["computing"])),
        sent=float(data["sent"]),
    )
