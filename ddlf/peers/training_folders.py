"""Trainings by peers with a name: folders that ``ddlf peers new`` makes, and their three logs. Runs on the server.

| file | content |
|---|---|
| ``model.nnm`` | the model's text |
| ``settings.json`` | fields of the plan, such as ``batch_size`` |
| ``runs/`` | folder of the run, if it has begun |
| ``log.csv``, ``training.csv``, ``validation.csv`` | what the journal says, as WebNN (Goin, Cotton, Zhao 2018) logs it |
"""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddlf.errors import ConfigError
from ddlf.extras import provided
from ddlf.monitor.runs import folder as runs
from ddlf.peers.entries import Arrived, Entry, Left, Posted, Summed, Validated
from ddlf.peers.journal import history
from ddlf.peers.model import read_text
from ddlf.peers.plan import Plan, usual_merge
from ddlf.privacy.secure_sum import LEAST
from ddlf.training.checkpoints.durable import replace

WEBNN_RATE = 0.2
"""Learning rate of WebNN."""
WEBNN = """net:input shape=[28, 28, 1];
net:output shape=[10];
net:layers
    Conv2D(filters=8, kernel_size=5, activation=relu, kernel_initializer=VarianceScaling()),
    MaxPooling2D(pool_size=2),
    Conv2D(filters=16, kernel_size=5, activation=relu, kernel_initializer=VarianceScaling()),
    MaxPooling2D(pool_size=2),
    Flatten(),
    Dense(units=10, activation=softmax, kernel_initializer=VarianceScaling());

train:loss CCE;
train:optimizer SGD(learning_rate=0.2);
train:metrics accuracy;
"""
"""The model of WebNN."""
SETTINGS, RUNS = "settings.json", "runs"
ELSEWHERE = {"rate", "validated_by"}
"""Fields of the plan that follow from the model and from the command."""
KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "bool": ("true or false", (bool,)),
    "int": ("a whole number", (int,)),
    "float": ("a number", (int, float)),
    "str": ("a text", (str,)),
    "Literal": ("a text", (str,)),
    "tuple": ("a list of texts", (list,)),
}
"""Types of fields of the plan, in words, and the types that JSON gives them."""
HEADS = {
    "log.csv": ("Time", "Client", "Request", "Date"),
    "training.csv": ("Time", "Client", "Loss", "Accuracy"),
    "validation.csv": ("Time", "Loss", "Accuracy"),
}
"""The columns of each log."""


def make(name: str, text: str, settings: dict[str, Any]) -> Path:
    """Make the folder of a training in the current folder.

    Raises:
        ConfigError: The name or a setting cannot be used.
    """
    Plan(**settings)
    path = _new_folder(name)
    path.mkdir()
    runs.write_text(path / runs.NOTATION, text)
    replace(path / SETTINGS, json.dumps(settings, indent=2).encode() + b"\n")
    return path


def text_of(file: Path) -> str:
    """Return the text of a model for a new training.

    Raises:
        ConfigError: It is the code of an app.
        NotationError: It cannot be read as a model.
    """
    if file.suffix == ".py":
        raise ConfigError(
            f"{file} is the code of an app, and a training with a name needs a text",
            hint=f"name a model text or a file of WebNN, or serve the app without a name: ddlf peers serve {file}",
        )
    text = read_text(file, WEBNN_RATE)
    provided("Notation", "ddlf peers")(text, str(file))
    return text


def folders() -> list[Path]:
    """Return the folders of trainings in the current folder."""
    return sorted(path.parent for path in Path().glob(f"*/{SETTINGS}") if (path.parent / runs.NOTATION).is_file())


def find(name: str) -> Path:
    """Return the folder of a training.

    Raises:
        ConfigError: There is none with this name.
    """
    if (Path(name) / runs.NOTATION).is_file() and not (Path(name) / SETTINGS).is_file():
        raise ConfigError(
            f"the training {name!r} has no {SETTINGS}", hint="write one with the fields of the plan, such as {}"
        )
    if Path(name) not in folders():
        raise ConfigError(f"there is no training {name!r} in this folder", hint="ddlf peers new NAME makes one")
    return Path(name)


def settings_of(path: Path) -> dict[str, Any]:
    """Return the settings of a training.

    Raises:
        ConfigError: They cannot be read, or one is unknown or invalid.
    """
    try:
        settings = json.loads((path / SETTINGS).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise TypeError("it is not a JSON object, such as {}")
        names = [field.name for field in fields(Plan) if field.name not in ELSEWHERE]
        if unknown := sorted(settings.keys() - ELSEWHERE - set(names)):
            raise TypeError(f"{', '.join(unknown)} is none of {', '.join(names)}")
        for name in settings.keys() - ELSEWHERE:
            _check_kind(name, settings[name])
        settings.setdefault("merge", usual_merge(settings.get("way", "swap")))
        if settings.get("secure_aggregation"):
            settings.setdefault("quorum", LEAST)
        with_data: dict[str, Any] = {"validated_by": "server"}  # with data or without is known later
        Plan(**(with_data | settings))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path / SETTINGS} cannot be used: {error}") from None
    if fixed := sorted(ELSEWHERE & settings.keys()):
        raise ConfigError(
            f"{path / SETTINGS} cannot set {' and '.join(fixed)}",
            hint=f"the learning rate is in {runs.NOTATION}; --data lets the server validate",
        )
    return dict(settings)


def _check_kind(name: str, value: Any) -> None:
    """Refuse a value of another type than that of a field of the plan.

    Raises:
        TypeError: Says which type it must have.
    """
    hint = str(Plan.__annotations__[name])
    words, kinds = KINDS[re.split(r"\W", hint)[0]]
    is_flag = isinstance(value, bool) and bool not in kinds  # Python takes it for a number
    if (not isinstance(value, kinds) or is_flag) and not (value is None and "None" in hint):
        raise TypeError(f"{name} must be {words}, got {json.dumps(value)}")


def run_of(path: Path) -> Path | None:
    """Return the folder of the run of a training; None if it has not begun."""
    return next(iter(runs.runs_in(path / RUNS)), None) if (path / RUNS).is_dir() else None


def copy(name: str, new: str) -> Path:
    """Copy model and settings of a training, without weights and logs."""
    source = find(name)
    return make(new, (source / runs.NOTATION).read_text(encoding="utf-8"), settings_of(source))


def save(name: str, new: str) -> Path:
    """Copy a training with its weights and its logs."""
    source, target = find(name), _new_folder(new)
    write_logs(source)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("server.json"))
    return target


def reset(name: str) -> None:
    """Delete the weights and the logs of a training."""
    path = find(name)
    if (path / RUNS).is_dir():
        shutil.rmtree(path / RUNS)
    for log in HEADS:
        (path / log).unlink(missing_ok=True)


def write_logs(path: Path) -> None:
    """Write the three logs of a training from the journal of its run."""
    entries = [] if (run := run_of(path)) is None else list(history(run))
    for log, text in logs(entries).items():
        replace(path / log, text.encode())


def logs(entries: Iterable[Entry]) -> dict[str, str]:
    """Return the content of the three logs by file name. Times are seconds since the first entry. Pure."""
    files = {log: io.StringIO() for log in HEADS}
    writers = {log: csv.writer(file, lineterminator="\n") for log, file in files.items()}
    for log, head in HEADS.items():
        writers[log].writerow(head)
    began: float | None = None
    for entry in entries:
        began = entry.at if began is None else began
        time = f"{entry.at - began:.3f}"
        if isinstance(entry, Arrived | Posted | Left):
            date = datetime.fromtimestamp(entry.at, UTC).isoformat(timespec="milliseconds")
            request = {Arrived: "join", Posted: "post", Left: "leave"}[type(entry)]
            writers["log.csv"].writerow((time, entry.peer, request, date))
        if isinstance(entry, Summed):
            date = datetime.fromtimestamp(entry.at, UTC).isoformat(timespec="milliseconds")
            writers["log.csv"].writerows((time, peer, "post", date) for peer in entry.peers)
        if isinstance(entry, Posted):
            writers["training.csv"].writerow((time, entry.peer, entry.loss, entry.accuracy))
        if isinstance(entry, Validated):
            writers["validation.csv"].writerow((time, entry.loss, entry.accuracy))
    return {log: file.getvalue() for log, file in files.items()}


def _new_folder(name: str) -> Path:
    if not name or runs.file_name(name) != name:
        raise ConfigError(f"{name!r} cannot be the name of a training", hint="use letters, digits, . - and _")
    if Path(name).exists():
        raise ConfigError(f"{name} exists", hint="choose another name")
    return Path(name)
