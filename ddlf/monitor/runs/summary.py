"""What a run was, for whoever wants to have it again: versions, settings with their origins, sources, ledger, results. Runs on the master."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from ddlf.events.record import RoundRecord, accuracy
from ddlf.training.spec import SETTINGS
from ddlf.version import __version__

PACKAGES = ("keras", "tensorflow", "tensorflow-cpu", "jax", "torch", "numpy")
SECRETS = (
    (
        re.compile(
            r"(?i)^((?:-p)?[\w.-]*(?:token|secret|password|passwd|pwd|api_?key|access_?key|credentials?)=).*", re.S
        ),
        r"\1***",
    ),
    (re.compile(r"(\w://[^/\s:@]*:)[^/\s@]+(?=@)"), r"\1***"),
)
"""What of a command line is not kept, and what stands in its place: values whose names say that they are secret, and passwords in URLs."""
GIT_S = 5.0
"""How long git may take to look at a tree of sources."""


def settings_of(app: Any, told: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Each setting of an app: its value, and where that comes from.

    Args:
        app: Class, or an object.
        told: Where those stand that were set from outside, by name.
    """
    cls = app if isinstance(app, type) else type(app)
    rows = {}
    for name in SETTINGS:
        home = next((part for part in cls.__mro__ if name in vars(part)), None)
        origin = "default" if home is None or home.__module__ == "ddlf.app" else f"class {home.__name__}"
        if cls is not app and name in vars(app):
            origin = told.get(name, f"{cls.__name__}.__init__")
        value = getattr(app, name, SETTINGS[name].default)
        rows[name] = {
            "value": value if value is None or isinstance(value, bool | int | float) else str(value),
            "origin": origin,
        }
    return rows


def environment() -> dict[str, Any]:
    """The program and what it runs on. Packages that this process has not imported are left out."""
    versions = {"ddlf": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        if name.removesuffix("-cpu") in sys.modules:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[name] = metadata.version(name)
    return {
        "versions": versions,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "command": [without_secrets(word) for word in sys.argv],
        "folder": str(Path.cwd()),
    }


def without_secrets(word: str) -> str:
    """A word of a command line, which a file that is passed on may have."""
    for pattern, instead in SECRETS:
        word = pattern.sub(instead, word)
    return word


def source_of(app: Any) -> str:
    """The file that the app's class is in, or its text if that is all of it; empty for one of a notebook's cell."""
    if getattr(app, "takes_data", False):
        return str(app.notation.file)
    module = sys.modules.get(type(app).__module__)
    return str(getattr(module, "__file__", None) or "")


def git(folder: Path) -> dict[str, Any] | None:
    """The commit of the sources, and whether nothing differs from it; None where there is no git, or nothing of it."""

    def ask(*words: str) -> str:
        return subprocess.run(
            ["git", "--no-optional-locks", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=GIT_S,
            stdin=subprocess.DEVNULL,
        ).stdout.strip()

    try:
        return {
            "commit": ask("rev-parse", "HEAD"),
            "branch": ask("rev-parse", "--abbrev-ref", "HEAD"),
            "clean": not ask("status", "--porcelain"),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def ledger_of(app: Any) -> dict[str, Any] | None:
    """How often samples were trained on: the least, the most, and the SHA-256 of all counts; None before training."""
    ledger = getattr(app, "ledger", None)
    return ledger.summary() if ledger is not None and ledger.samples else None


def results(last: RoundRecord, test: dict[str, float]) -> dict[str, Any]:
    """What a run has come to.

    Args:
        last: Last record.
        test: Metrics of the test data, measured last.
    """
    return {
        "round": last.round,
        "rounds": last.rounds,
        "version": last.version,
        "loss": last.loss,
        "accuracy": last.accuracy,
        "metrics": last.metrics,
        "test": test or last.test,
        "test_accuracy": accuracy(test or last.test),
    }
