"""Reads cluster.yaml: the workers, and the defaults of a run. Runs on the master.

How a file is read:
    1. `addresses.find_config` chooses the file: the given path, $DDLF_CONFIG, or ./cluster.yaml.
    2. `positions.compose` turns it into plain data and records the line and column of each value.
    3. The pydantic models check the data. Their errors name a place, so each becomes ``file:line:column: sentence``.
All problems are reported at once, so that you can repair a file in one go.

This file imports pydantic and yaml (150 ms), so import it only when a configuration is read.
"""

import difflib
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ddlf.cluster.config.addresses import find_config, quote
from ddlf.cluster.config.models import (
    MAX_WORKERS,
    SMALLEST_EXAMPLE,
    ClusterConfig,
    RunConfig,
    SecurityConfig,
    WorkerAddress,
    contradictions,
)
from ddlf.cluster.config.positions import MAX_FILE_BYTES, Document, Problem, Where, at, compose, shown, syntax_problem
from ddlf.errors import ConfigError

MAX_PROBLEMS_SHOWN = 20

_EXPECTED = {
    "finite_number": "a finite number > 0",
    "float_type": "a number",
    "greater_than": "a finite number > {gt:g}",
    "greater_than_equal": "at least {ge}",
    "int_type": "an integer",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "model_type": "a mapping",
    "path_type": "the path of a file",
    "string_type": "text",
    "tuple_type": "a list",
}

_SECTIONS: dict[int | str, type[BaseModel]] = {"workers": WorkerAddress, "security": SecurityConfig, "run": RunConfig}


# --- Finding and reading the file ------------------------------------------------------------------------------------


class Addresses(NamedTuple):
    """Hosts and ports of the workers, in the order of the file: ``hosts, ports = read_config()``."""

    hosts: list[str]
    ports: list[int]


def read_config(path: str | Path | None = None) -> Addresses:
    """Return the hosts and ports of the workers in a configuration file, which `load_config` reads and checks."""
    workers = load_config(path).workers
    return Addresses([worker.host for worker in workers], [worker.port for worker in workers])


def load_config(path: str | Path | None = None) -> ClusterConfig:
    """Read and check a configuration file.

    Args:
        path: The file; if None, $DDLF_CONFIG, then ./cluster.yaml.

    Raises:
        ConfigError: The file is missing, or it has problems. The message has one line with the position of each.
    """
    found = find_config(path)
    if found is None:
        raise ConfigError(
            f"no cluster configuration: DDLF_CONFIG is not set and {Path.cwd() / 'cluster.yaml'} does not exist",
            hint=SMALLEST_EXAMPLE,
        )
    text = _read_text(found, named_by="" if path is not None else " (named by DDLF_CONFIG)")
    return _config(text, found, found.parent.absolute())


@lru_cache(maxsize=1)  # one command reads the file several times
def _config(text: str, path: Path, folder: Path) -> ClusterConfig:
    config, problems = _check(text, folder)
    if config is None or problems:
        raise ConfigError(_report(path, problems))
    return config


def lines_of_run(path: Path) -> dict[str, int]:
    """Return the line, from 1, of each key in the section ``run`` of a valid file."""
    document = compose(_read_text(path, named_by=""))
    keys = document.keys if document is not None else {}
    return {str(where[1]): at(node, "").line for where, node in keys.items() if where[0] == "run" and len(where) == 2}


def _read_text(path: Path, named_by: str) -> str:
    """Return the content of a configuration file.

    Raises:
        ConfigError: The file cannot be read, is too large, or is not UTF-8 text.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        looked_in = "" if path.is_absolute() else f", looked in {Path.cwd()}"
        raise ConfigError(f"config file {path}{named_by} not found{looked_in}") from None
    except IsADirectoryError:
        raise ConfigError(f"config file {path}{named_by} is a directory", hint="name the file in it") from None
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"config file {quote(str(path))}{named_by} cannot be read: {reason}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than 1 MiB, so it is no cluster configuration")
    try:
        text = content.decode("utf-8-sig")
        broken_at = content.find(b"\0")
    except UnicodeDecodeError as error:
        broken_at = error.start
    if broken_at >= 0:
        before = content[:broken_at]
        position = before.count(b"\n") + 1, broken_at - before.rfind(b"\n")
        raise ConfigError(_report(path, [Problem(*position, "not UTF-8 text, save the file as UTF-8")]))
    return text


# --- Checking, with positions ----------------------------------------------------------------------------------------


def _report(path: Path, problems: list[Problem]) -> str:
    """Return all problems in the order of the file, one a line. Editors can jump to them, as to a compiler's errors."""
    lines = [f"{path}:{line}:{column}: {sentence}" for line, column, sentence in sorted(set(problems))]
    if len(lines) > MAX_PROBLEMS_SHOWN:
        lines[MAX_PROBLEMS_SHOWN:] = [f"... and {len(lines) - MAX_PROBLEMS_SHOWN} more problems"]
    return "\n".join(lines)


def _check(text: str, folder: Path) -> tuple[ClusterConfig | None, list[Problem]]:
    """Return the configuration in ``text`` and all its problems; relative paths are resolved against ``folder``."""
    try:
        document = compose(text)
    except yaml.YAMLError as error:
        return None, [syntax_problem(error, text)]
    if document is None:
        return None, [Problem(1, 1, f"the file is empty; {SMALLEST_EXAMPLE}")]
    if not isinstance(document.data, dict):
        what = "a list" if isinstance(document.data, list) else "a single value"  # the value may be a secret token
        sentence = f"expected a mapping at top level, got {what}; {SMALLEST_EXAMPLE}"
        return None, [*document.problems, document.at((), sentence)]
    try:
        return ClusterConfig.model_validate(document.data, context={"folder": folder}), document.problems
    except ValidationError as error:
        problems = [
            _problem(document, details) for details in error.errors() if not document.is_reported(details["loc"])
        ]
    # pydantic looks for contradictions only when every single value is valid. This check reports both at once.
    more = [document.at(where, sentence) for where, sentence in _contradictions(document)]
    return None, document.problems + problems + more


def _problem(document: Document, details: ErrorDetails) -> Problem:
    """Turn an error of pydantic into a sentence with a position."""
    where = details["loc"]
    kind = details["type"]
    name = where[-1] if isinstance(where[-1], str) else f"{where[-2]}[{where[-1]}]"
    if kind == "extra_forbidden":
        return at(document.keys[where], _unknown_key(where))
    if kind == "missing":
        return document.at(where, f"key {quote(name)} is missing")
    if kind == "value_error":
        return document.at(where, str(details["ctx"]["error"]))
    if kind not in _EXPECTED:
        return document.at(where, f"{name}: {details['msg']}")
    expected = _EXPECTED[kind].format(**details.get("ctx", {}))
    if kind == "model_type" and where[0] == "workers":
        expected = "'host:port' or a mapping"
    node = document.values[where]
    repair = ""
    if kind == "string_type" and isinstance(node, yaml.ScalarNode):
        repair = ", write it in quotes"
    elif kind in ("int_type", "float_type") and isinstance(node, yaml.ScalarNode) and node.style:
        repair = ", write it without quotes"
    return at(node, f"{name} must be {expected}, got {shown(node)}{repair}")


def _contradictions(document: Document) -> Iterator[tuple[Where, str]]:
    """Return the `contradictions` between the valid values."""
    entries = document.data.get("workers", [])
    if not isinstance(entries, list) or (not entries and "workers" in document.data):
        return iter(())  # already reported
    workers = {}
    for index, entry in enumerate(entries[:MAX_WORKERS]):
        with suppress(ValidationError):  # already reported with its position
            workers[index] = WorkerAddress.model_validate(entry)
    run = document.data.get("run")
    return contradictions(workers, len(entries), run if isinstance(run, dict) else {}, document.data.get("launcher"))


def _unknown_key(where: Where) -> str:
    """Return the sentence for an unknown key. Its value is never shown: it may be a secret."""
    key = str(where[-1])
    if key == "token":
        return "token must not be stored in this file, use token_file in security"
    section = ClusterConfig if len(where) == 1 else _SECTIONS[where[0]]
    known = list(section.model_fields)
    if similar := difflib.get_close_matches(key, known, n=1):
        return f"unknown key {quote(key)}, did you mean {quote(similar[0])}?"
    for name, other in _SECTIONS.items():
        if key in other.model_fields:
            return f"unknown key {quote(key)}, it belongs in {name!r}"
    return f"unknown key {quote(key)}, known here: {', '.join(known)}"
