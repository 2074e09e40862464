"""The summary of a run, to reproduce it: versions, settings, their origins, sources, ledger, results."""

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

from ddlf.data.app import UserApp
from ddlf.events.record import RoundRecord, accuracy
from ddlf.settings.declared import declared_with
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
    (re.compile(r"(\w://[^\s#]+#)\S+"), r"\1***"),
)
"""Patterns of secrets in command lines, and their replacements: values with secret names, passwords in URLs, and codes of links."""
GIT_S = 5.0
"""Maximum seconds for git to examine the sources."""


def settings_of(app: UserApp, origins: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return each setting of an app with its value and its origin.

    Args:
        app: A class or an object.
        origins: Origins of settings from outside of the app, by name.
    """
    cls = app if isinstance(app, type) else type(app)
    rows = {}
    for name, setting in declared_with(app.mode, app.exchange).items():
        home = next((part for part in cls.__mro__ if name in vars(part)), None)
        origin = "default" if home is None or home.__module__ == "ddlf.app" else f"class {home.__name__}"
        if cls is not app and name in vars(app):
            origin = origins.get(name, f"{cls.__name__}.__init__")
        value = getattr(app, name, setting.default)
        rows[name] = {
            "value": value if value is None or isinstance(value, bool | int | float) else without_secrets(str(value)),
            "origin": origin,
        }
    return rows


def environment() -> dict[str, Any]:
    """Return the versions of imported packages, and facts about the machine."""
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
    """Return a word of a command line with its secrets replaced, safe to publish."""
    for pattern, instead in SECRETS:
        word = pattern.sub(instead, word)
    return word


def source_of(app: UserApp) -> str:
    """Return the file of the app's class or model text; empty for a class from a notebook cell."""
    if getattr(app, "takes_data", False):
        return str(app.notation.file)
    module = sys.modules.get(type(app).__module__)
    return str(getattr(module, "__file__", None) or "")


def git(folder: Path) -> dict[str, Any] | None:
    """Return the commit of the sources and whether they differ from it; None without git or a repository."""

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


def ledger_of(app: UserApp) -> dict[str, Any] | None:
    """Return how often samples were trained on: minimum, maximum and hash of all counts; None before training."""
    ledger = getattr(app, "ledger", None)
    return ledger.summary() if ledger is not None and ledger.samples else None


def results(last: RoundRecord, test: dict[str, float]) -> dict[str, Any]:
    """Return the results of a run for its summary: the metrics of training and of the test.

    Args:
        last: Last record.
        test: Newest metrics of the test data.
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
