"""The content of cluster.yaml as pydantic models, and its JSON Schema. Importing pydantic takes 100 ms."""

import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from ddlf.cluster.config.addresses import (
    DEFAULT_PORT,
    checked_host,
    checked_port,
    parse_address,
    parse_advertised,
    quote,
    same_host,
)
from ddlf.cluster.config.positions import Where
from ddlf.errors import ConfigError
from ddlf.rpc.liveness import Timing
from ddlf.training.registry import SETTINGS
from ddlf.training.settings.checks import OneOf, Whole
from ddlf.training.settings.setting import Setting, Use

MAX_WORKERS = 4096
SMALLEST_EXAMPLE = "the smallest valid file is 'workers: [127.0.0.1:9000]'"
SHORT_FORM = r"^(\[[0-9A-Fa-f:.]+(%[^\]]+)?\]|[A-Za-z0-9_.-]+):[0-9]{1,5}$"
"""Pattern of an address, for editors. ``parse_address`` checks more and explains the mistake."""

# --- Types with their own checks --------------------------------------------------------------------------------------


def _checked_advertised(text: str) -> str:
    try:
        parse_advertised(text)
    except ConfigError as error:
        raise ConfigError(f"advertise: {error.message}") from None
    return text


def _checked_name(name: str) -> str:
    if not 1 <= len(name) <= 64 or not name.isprintable() or name != name.strip():
        raise ConfigError(f"name must be 1 to 64 printable characters without spaces around them, got {quote(name)}")
    return name


Host = Annotated[str, AfterValidator(checked_host)]
Name = Annotated[str, AfterValidator(_checked_name), Field(json_schema_extra={"minLength": 1, "maxLength": 64})]
Advertised = Annotated[str, AfterValidator(_checked_advertised)]
Port = Annotated[int, AfterValidator(checked_port), Field(json_schema_extra={"minimum": 1, "maximum": 65535})]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


# --- The models ------------------------------------------------------------------------------------------------------


class _Section(BaseModel):
    """A mapping of the file: known keys only, no silent conversion of types, and ``x-...`` keys left to the user."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, json_schema_extra={"patternProperties": {"^x-": {}}}
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out_keys_of_the_user(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {key: value for key, value in data.items() if not str(key).startswith("x-")}
        return data


class WorkerAddress(_Section):
    """Where one worker listens. Written as ``host:port``, or as a mapping."""

    host: Host = Field(description="Host name or IP address, as the master reaches it.")
    port: Port = Field(default=DEFAULT_PORT, description="The one TCP port of the worker.")
    name: Name | None = Field(default=None, description="A name for messages; host:port if not given.")
    advertise: Advertised | None = Field(
        default=None, description="Where other workers reach it, HOST or HOST:PORT; found out if not given."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, data: Any) -> Any:
        if isinstance(data, str):
            host, port = parse_address(data)
            return {"host": host, "port": port}
        return data

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class SecurityConfig(_Section):
    """What master and workers need to trust each other. The secret itself never stands in the file."""

    token_file: Annotated[Path, Field(strict=False)] | None = Field(
        default=None, description="File with the token; relative to the folder of this file, ~ is the home folder."
    )

    tls_ca: Annotated[Path, Field(strict=False)] | None = Field(
        default=None,
        description="File with the certificates that sign those of the workers; only if you have your own.",
    )
    tls_cert: Annotated[Path, Field(strict=False)] | None = Field(
        default=None, description="File with the certificate to show to workers that demand one."
    )
    tls_key: Annotated[Path, Field(strict=False)] | None = Field(default=None, description="File with its private key.")
    insecure_plaintext: bool = Field(
        default=False, description="Encrypt nothing, for workers with --insecure-plaintext on a private link."
    )
    pickle_results: bool = Field(
        default=False,
        description="Take results of methods that are no plain data, too. A worker could then run code on the master.",
    )

    @field_validator("token_file", "tls_ca", "tls_cert", "tls_key")
    @classmethod
    def _resolve(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is None:
            return None
        folder = (info.context or {}).get("folder", ".")
        resolved = Path(os.path.abspath(os.path.join(folder, os.path.expanduser(path))))
        if not os.path.exists(resolved):
            raise ConfigError(f"{info.field_name} {quote(str(path))} does not exist (looked for {str(resolved)!r})")
        return resolved

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together, give both or none")
        if self.insecure_plaintext and (self.tls_ca or self.tls_cert):
            raise ConfigError("insecure_plaintext and certificates exclude each other")
        return self


class _OfTheCluster(_Section):
    """Settings of ``ddlf run`` and ``ddlf.main``. They win over the app's own attributes, and command-line flags over them."""

    min_workers: Count | None = Field(default=None, description="Start with this many workers if some do not answer.")
    connect_timeout_s: float = Field(
        default=10.0, gt=0, allow_inf_nan=False, description="How long to try to reach all workers, in seconds."
    )
    heartbeat_s: Seconds | None = Field(default=None, description="Between two signs of life; 0.5 by default.")
    suspect_after_s: Seconds | None = Field(default=None, description="Silence that makes suspect; 2 by default.")
    dead_after_s: Seconds | None = Field(
        default=None, description="Silence after which a worker is given up, at least 3 x heartbeat_s; 4 by default."
    )


def _field(name: str, setting: Setting[Any, Any]) -> Any:
    """Return a setting as a key of the file: pydantic's type, and a field whose default is None."""
    check = setting.check
    kind: Any = Annotated[type(setting.default), AfterValidator(partial(_checked, name, setting))]
    if isinstance(check, OneOf):
        kind = Literal[check.choices]
    elif isinstance(check, Whole):
        kind = Annotated[int, Field(ge=check.low, le=check.high)]
    return kind | None, Field(default=None, description=f"{setting.help[0].upper()}{setting.help[1:]}.")


def _checked(name: str, setting: Setting[Any, Any], value: Any) -> Any:
    setting.check(name, value)
    return value


if TYPE_CHECKING:
    RunConfig = _OfTheCluster
else:
    RunConfig = create_model(
        "RunConfig",
        __base__=_OfTheCluster,
        __doc__=_OfTheCluster.__doc__,
        **{name: _field(name, setting) for name, setting in SETTINGS.items() if Use.FILE in setting.use},
    )


class ClusterConfig(_Section):
    """The content of a cluster.yaml. The same file serves on every machine."""

    version: Literal[1] = Field(default=1, description="Version of this format.")
    name: Name | None = Field(default=None, description="A name for the cluster.")
    # strict=False only concerns the container: YAML gives a list, and a frozen model holds a tuple.
    workers: Annotated[tuple[WorkerAddress, ...], Field(strict=False)] = Field(
        default=(),
        description="The workers, in the order that counts them.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_WORKERS},
    )
    launcher: str | None = Field(
        default=None, description="Instead of workers, what starts them: NAME or NAME:TEXT, of an installed package."
    )
    security: SecurityConfig = Field(default=SecurityConfig(), description="The token's file, and certificates.")
    run: RunConfig = Field(default=RunConfig(), description="Settings of a run.")

    @field_validator("version", mode="before")
    @classmethod
    def _is_an_integer(cls, version: Any) -> Any:
        return version if type(version) is int else "no integer"  # for Python, true and 1.0 equal 1

    @field_validator("workers", mode="before")
    @classmethod
    def _has_a_sensible_length(cls, workers: Any) -> Any:
        # pydantic's own min_length and max_length count only the valid entries.
        if isinstance(workers, list | tuple) and not workers:
            raise ConfigError("workers must list at least one address")
        if isinstance(workers, list | tuple) and len(workers) > MAX_WORKERS:
            raise ConfigError(f"workers: at most {MAX_WORKERS:,}, got {len(workers):,}")
        return workers

    @field_validator("security", "run", mode="before")
    @classmethod
    def _accept_a_section_without_content(cls, data: Any) -> Any:
        return {} if data is None else data  # a section whose lines are all commented out

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        listed = len(self.workers)
        for _, sentence in contradictions(dict(enumerate(self.workers)), listed, dict(self.run), self.launcher):
            raise ConfigError(sentence)
        return self


def schema() -> dict[str, Any]:
    """Return the JSON Schema of cluster.yaml. Editors use it to complete and check the file.

    The result is stored beside this file as ``cluster.schema.json``, and ``ddlf --schema`` prints that. Update it after
    a change of the models with::

        scripts/reference
    """
    result = ClusterConfig.model_json_schema()
    mapping = result["$defs"]["WorkerAddress"]
    short_form = {"type": "string", "pattern": SHORT_FORM, "examples": [f"10.0.0.11:{DEFAULT_PORT}"]}
    result["$defs"]["WorkerAddress"] = {"anyOf": [short_form, mapping]}
    for name in ("security", "run"):  # null, when all lines of the section are commented out
        section = result["properties"][name]
        section["anyOf"] = [{"$ref": section.pop("$ref")}, {"type": "null"}]
    del result["properties"]["workers"]["default"]
    result["oneOf"] = [{"required": [name]} for name in ("workers", "launcher")]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result, "title": "cluster.yaml of DDLF"}


TIMES = ("heartbeat_s", "suspect_after_s", "dead_after_s")


def contradictions(
    workers: Mapping[int, WorkerAddress], listed: int, run: Mapping[str, Any], launcher: Any
) -> Iterator[tuple[Where, str]]:
    """Yield the conflicts between values that are valid by themselves: the place, and a sentence.

    Args:
        workers: The valid workers, by their index in the file.
        listed: Number of workers in the file, valid or not.
        run: The section ``run``, whose values may be invalid.
        launcher: The value of ``launcher``, which may be invalid.
    """
    if not listed and launcher is None:
        yield ("workers",), f"key 'workers' is missing; {SMALLEST_EXAMPLE}"
    elif listed and launcher is not None:
        yield ("launcher",), "launcher and workers exclude each other"
    addresses: dict[tuple[str, int], int] = {}
    names: dict[str, int] = {}
    advertised: dict[tuple[str, int], int] = {}
    for index, worker in workers.items():
        first = addresses.setdefault((same_host(worker.host), worker.port), index)
        if first != index:
            yield ("workers", index), f"workers[{first}] and workers[{index}] are the same address, {worker}"
        if worker.name is not None and (first := names.setdefault(worker.name, index)) != index:
            where = ("workers", index, "name")
            yield where, f"workers[{first}] and workers[{index}] have the same name, {quote(worker.name)}"
        host, port = parse_advertised(worker.advertise) if worker.advertise is not None else ("", 0)
        if port and (first := advertised.setdefault((same_host(host), port), index)) != index:
            where = ("workers", index, "advertise")
            yield where, f"workers[{first}] and workers[{index}] advertise the same address, {worker.advertise}"
    min_workers = run.get("min_workers")
    if type(min_workers) is int and min_workers > listed > 0:
        yield ("run", "min_workers"), f"min_workers is {min_workers}, but workers lists only {listed}"
    right = {name: run[name] for name in TIMES if type(run.get(name)) in (int, float) and 0 < run[name] < math.inf}
    try:
        Timing.of(**{name: right.get(name) for name in TIMES})
    except ConfigError as error:
        yield ("run", error.message.split()[0]), error.message
