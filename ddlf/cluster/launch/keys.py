"""The keys of a launcher: what the engine gives each place, and how the launcher works. Runs on the master.

The same keys come from a text (``--launcher slurm:cores=2,time=1h``), from a mapping in cluster.yaml, and from
``Cluster.on("slurm", cores=2)``. A launcher declares the keys that it knows as the fields of a class, and refuses others
by name. This file imports pydantic, so import it only when a launcher is made.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ddlf.cluster.launch.launcher import Workers
from ddlf.errors import ConfigError

SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
PYTHON_PATH = r"[\w ~./+@:,=-]+"
"""Paths that mean the same between double quotes in each shell."""
BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _measured(value: object, units: Mapping[str, int], example: str) -> float:
    parts = (
        re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower()) if not isinstance(value, bool) else None
    )
    if parts is None or parts[2] not in units or not float(parts[1]) > 0:
        raise ValueError(f"must be above 0 and such as {example}, got {value!r}")
    return float(parts[1]) * units[parts[2]]


def _seconds(value: object) -> float:
    return _measured(value, SECONDS, "90, 90s, 10m or 2h")


def _bytes(value: object) -> int:
    return int(_measured(value, BYTES, "2GiB or 800MB"))


def _network(value: str) -> str:
    if "/" in value:
        ipaddress.ip_network(value, strict=False)
    elif not re.fullmatch(r"[\w.:-]{1,15}", value):
        raise ValueError(f"must be an interface such as ib0, or a network such as 10.1.0.0/16, got {value!r}")
    return value


def _python(path: str) -> str:
    if not re.fullmatch(PYTHON_PATH, path):
        raise ValueError(f"must be the path of a Python there, without quotes and signs of a shell, got {path!r}")
    return path


def _names(value: object) -> object:
    return tuple(filter(None, (part.strip() for part in value.split(",")))) if isinstance(value, str) else value


def _env(values: dict[str, str]) -> dict[str, str]:
    for name in values:
        if name == "DDLF_TOKEN":
            raise ValueError(
                "must not contain DDLF_TOKEN, because everybody who can see the pods sees it, and a job's record keeps it"
            )
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"must have names of environment variables, got {name!r}")
    return values


Seconds = Annotated[float, BeforeValidator(_seconds)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
WorkersKey = Annotated[Workers, BeforeValidator(Workers.of)]
Network = Annotated[str, AfterValidator(_network)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
"""Several names: a list, or one text with commas."""
Python = Annotated[str, AfterValidator(_python)]
"""Path of a Python on another machine, also for a shell there."""
Env = Annotated[dict[str, str], AfterValidator(_env)]
"""Environment variables, by names that each shell takes. Engines keep them where others can read them, so a token is
refused.
"""
Cores = Annotated[int, Field(ge=1, le=4096)]
Gpus = Annotated[int, Field(ge=0, le=64)]
"""Number of cards that an engine gives each worker. The engine chooses which, and sets the mask of each worker. Where no engine
does, ``ddlf/worker/assignment.py`` gives each worker its cards.
"""


class WorkersKeys(BaseModel):
    """The keys that all engines have."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)
    example: ClassVar[str] = "start_timeout=60"
    """A key with a value, for messages."""

    workers: WorkersKey | None = Field(default=None, description="Number of workers, such as 4, or 2..8.")
    start_timeout: Seconds = Field(default=600.0, description="How long to wait for the workers.")


class Keys(WorkersKeys):
    """The keys of engines whose workers dial an address of the master. An engine adds its own as fields of a subclass."""

    network: Network | None = Field(
        default=None, description="Interface or network of the master that workers dial, such as ib0 or 10.1.0.0/16."
    )


LIMITS = {
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
}
"""Sentences about wrong numbers, by pydantic's kind of the error."""

K = TypeVar("K", bound=WorkersKeys)


def read_keys(model: type[K], launcher: str, values: Mapping[str, Any], workers: Workers | None = None) -> K:
    """Check the keys of a launcher.

    Args:
        model: The class with the launcher's keys.
        launcher: Name of the launcher, for messages.
        values: The values by key.
        workers: The number of workers from another place, such as ``--workers``.

    Raises:
        ConfigError: A key is unknown, a value is invalid, or the number of workers is given twice.
    """
    values = dict(values)
    if workers is not None:
        if "workers" in values and values["workers"] != str(workers):
            raise ConfigError(
                f"launcher {launcher}: workers={values['workers']}, but --workers is {workers}",
                hint="leave one of them out",
            )
        values["workers"] = workers
    try:
        return model.model_validate(values)
    except ValidationError as error:
        entry = min(error.errors(), key=lambda entry: entry["type"] == "missing")  # a typo explains a missing key
        key = str(entry["loc"][0])
        if entry["type"] == "extra_forbidden":
            similar = difflib.get_close_matches(key, model.model_fields, 1)
            hint = f"did you mean {similar[0]!r}?" if similar else f"it has: {', '.join(sorted(model.model_fields))}"
            raise ConfigError(f"launcher {launcher} has no key {key!r}", hint=hint) from None
        if entry["type"] == "missing":
            raise ConfigError(
                f"launcher {launcher} needs the key {key!r}", hint=f"--launcher {launcher}:{key}=VALUE"
            ) from None
        if entry["type"] == "value_error":
            problem = str(entry["ctx"]["error"])
        else:
            form = LIMITS.get(entry["type"], entry["msg"].lower().replace("input should be", "must be"))
            problem = f"{form.format(**entry.get('ctx', {}))}, got {entry['input']!r}"
        raise ConfigError(f"launcher {launcher}: {key} {problem}") from None


def parse_keys(text: str, launcher: str, example: str = WorkersKeys.example) -> dict[str, Any]:
    """Parse the text of a launcher: ``"cores=2,time=1h,env.NAME=VALUE"``. A part without ``=`` continues the value before
    it, as in ``"hosts=pc01,pc02"``.

    Args:
        text: The text.
        launcher: Name of the launcher, for messages.
        example: A key with a value, for the error.

    Raises:
        ConfigError: The text does not begin with a key, or a key stands there twice.
    """
    values: dict[str, Any] = {}
    last = ""
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        if not equals and last:
            values[last] += f",{part}"
            continue
        key = key.strip()
        if not equals or not key:
            raise ConfigError(
                f"launcher {launcher}: {part.strip()!r} is not KEY=VALUE",
                hint=f"as in: --launcher {launcher}:{example}",
            )
        if key in values:
            raise ConfigError(f"launcher {launcher}: {key} is given twice", hint="leave one of them out")
        last, values[key] = key, value
    mappings = [key for key in values if "." in key]
    for key in mappings:
        name, _, inner = key.partition(".")
        if not isinstance(values.setdefault(name, {}), dict):
            raise ConfigError(f"launcher {launcher}: {name} is given twice", hint=f"write {name}.NAME=VALUE for each")
        values[name][inner] = values.pop(key)
    return values
