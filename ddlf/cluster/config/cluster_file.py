"""Reads cluster.yaml: the workers, and the defaults of a run. Runs on the master.

How a file is read:
    1. `addresses.find_config` chooses the file: the given path, $DDLF_CONFIG, or ./cluster.yaml.
    2. `compose` turns it into plain data and records the line and column of each value.
    3. The pydantic models check the data. Their errors name a place, so each becomes ``file:line:column: sentence``.
All problems are reported at once, so that you can repair a file in one go.

This file imports pydantic and yaml (150 ms), so import it only when a configuration is read.
"""

import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from ddlf.cluster.config.addresses import (
    DEFAULT_PORT,
    checked_host,
    checked_port,
    find_config,
    parse_address,
    parse_advertised,
    quote,
    same_host,
)
from ddlf.cluster.launch.keys import PYTHON_PATH
from ddlf.cluster.launch.launcher import Launcher, Workers, from_keys, installed
from ddlf.errors import ConfigError
from ddlf.rpc.heartbeats import Timing
from ddlf.settings.checks import OneOf, RuleOf, Whole, count_of_bytes, with_names
from ddlf.settings.declared import declared
from ddlf.settings.setting import Setting, Use
from ddlf.worker.assignment import CardWish
from ddlf.worker.cards import NONE, read_names

# A configuration is small. These limits keep a hostile or broken file from using much memory or time.
MAX_FILE_BYTES = 1 << 20
MAX_ALIASES = 100
MAX_DEPTH = 20
MAX_VALUES = 50_000  # applies before and after aliases are replaced, because aliases of aliases multiply

_ALLOWED_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value", "merge")
)

KeyPath = tuple[int | str, ...]  # the path of a value: ("workers", 2, "port")


class Problem(NamedTuple):
    """A mistake in cluster.yaml to repair. Line and column count from 1."""

    line: int
    column: int
    sentence: str


def at(node: yaml.Node, sentence: str) -> Problem:
    """Return a problem whose position is the beginning of a YAML node."""
    return Problem(node.start_mark.line + 1, node.start_mark.column + 1, sentence)


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """Return the value of a YAML scalar: a text, a number, a boolean or None.

    Numbers are read as people mean them. YAML 1.1 itself reads 22:22 as 1342 and 010 as 8.
    """
    text: str = node.value
    kind = node.tag.rpartition(":")[2]
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() in ("yes", "true", "on")
    if node.style is None:  # not in quotes
        if re.fullmatch(r"[-+]?(0|[1-9][0-9]{0,18})", text):
            return int(text)
        if re.fullmatch(r"(?=.*[.eE])[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?", text):
            return float(text)
        if special := re.fullmatch(r"([-+]?)\.(inf|nan)", text, re.IGNORECASE):
            return float(special[1] + special[2])
    return text


def shown(node: yaml.Node) -> str:
    """Return a description of a YAML node for error messages, to follow the word "got"."""
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    assert isinstance(node, yaml.ScalarNode)
    kind = node.tag.rpartition(":")[2]
    if kind == "null":
        return "nothing"
    if kind == "bool":
        return f"the boolean {node.value}"
    text = quote(node.value)
    return text if node.style else text[1:-1]


class _Composer(yaml.SafeLoader):
    """Composes the YAML nodes of a file, and raises an error if aliases would turn a small file into a large structure."""

    aliases = 0
    depth = 0
    values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            self.aliases += 1
        if self.aliases > MAX_ALIASES:
            raise _too_much(f"too many aliases (> {MAX_ALIASES})", event)
        if self.depth > MAX_DEPTH:
            raise _too_much(f"nested deeper than {MAX_DEPTH} levels", event)
        self.values += 1
        if self.values > MAX_VALUES:
            raise _too_much(f"more than {MAX_VALUES:,} values", event)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _too_much(sentence: str, at: yaml.Event | yaml.Node) -> yaml.YAMLError:
    mark: Any = at.start_mark
    return yaml.MarkedYAMLError(problem=sentence, problem_mark=mark)


def syntax_problem(error: yaml.YAMLError, text: str) -> Problem:
    """Convert an error of PyYAML to a problem with one sentence."""
    if isinstance(error, yaml.reader.ReaderError):
        preceding = text[: error.position]
        sentence = f"control character U+{ord(text[error.position]):04X} is not allowed"
        return Problem(preceding.count("\n") + 1, error.position - preceding.rfind("\n"), sentence)
    assert isinstance(error, yaml.MarkedYAMLError)
    mark = error.problem_mark or error.context_mark
    if error.context_mark and error.context == "while scanning a simple key":
        mark = error.context_mark  # The position of the key without a colon. PyYAML notices the mistake a line later.
    assert mark is not None
    sentence = ", ".join(part for part in (error.context, error.problem) if part)
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if "'\\t'" in sentence:
        sentence += "; indent with spaces, not with tabs"
    elif re.search(r"\[[0-9a-fA-F:]*\]:", line):
        sentence += f"; an IPv6 address in brackets needs quotes, as in '[::1]:{DEFAULT_PORT}'"
    return Problem(mark.line + 1, mark.column + 1, sentence)


class Document:
    """The plain data of a cluster.yaml, and the YAML node of each value, for its position.

    Attributes:
        data: The content of the file as dict, list, str, int, float, bool and None.
        problems: Problems of the YAML itself: forbidden tags, duplicate keys, keys that are not text.
        values: The node of each value, by its path.
        keys: The node of each key, by the path of its value.
    """

    def __init__(self, root: yaml.Node) -> None:
        self.problems: list[Problem] = []
        self.values: dict[KeyPath, yaml.Node] = {}
        self.keys: dict[KeyPath, yaml.Node] = {}
        self._refused: set[KeyPath] = set()
        self.data = self._plain(root, ())

    def _plain(self, node: yaml.Node, path: KeyPath) -> Any:
        """Return the plain data of a YAML node and of the nodes in it. An alias is read again wherever it is used."""
        self.values[path] = node
        if len(path) > MAX_DEPTH:  # an alias can contain itself
            raise _too_much(f"nested deeper than {MAX_DEPTH} levels", node)
        if len(self.values) > MAX_VALUES:
            raise _too_much(f"more than {MAX_VALUES:,} values", node)
        if node.tag not in _ALLOWED_TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self._refused.add(path)
            self.problems.append(at(node, f"tag {quote(tag)} is not allowed"))
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return _scalar(node)

    def _mapping(self, mapping: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(at(key, f"a key must be text, got {shown(key)}"))
            elif key.tag == "tag:yaml.org,2002:merge":
                self.problems.append(at(key, "merge keys ('<<') are not supported, repeat the keys"))
            elif key.value in data:  # PyYAML's own constructor would silently use the last value
                first = self.keys[*path, key.value].start_mark.line + 1
                self.problems.append(at(key, f"key {quote(key.value)} is given twice (first at line {first})"))
            else:
                self.keys[*path, key.value] = key
                data[key.value] = self._plain(value, (*path, key.value))
        return data

    def at(self, path: KeyPath, sentence: str) -> Problem:
        """Return a problem with the value at ``path``, or with the surrounding value if there is none."""
        while path not in self.values:
            path = path[:-1]
        return at(self.values[path], sentence)

    def is_reported(self, path: KeyPath) -> bool:
        """Return whether an error about the value at ``path`` needs no second report, because the value was refused
        before pydantic saw it, or because the error concerns the whole file (``()``).
        """
        return not path or any(path[:length] in self._refused for length in range(len(path) + 1))


def compose(text: str) -> Document | None:
    """Parse the text of a cluster.yaml; return None if the text is empty.

    Raises:
        yaml.YAMLError: The text is invalid YAML or exceeds the limits; ``syntax_problem`` describes the error.
    """
    root = _Composer(text).get_single_node()
    return None if root is None else Document(root)


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


def _checked_python(path: str) -> str:
    if not re.fullmatch(PYTHON_PATH, path):
        raise ConfigError(f"python must be the path of a Python there, without quotes or $, got {quote(path)}")
    return path


def _checked_name(name: str) -> str:
    if not 1 <= len(name) <= 64 or not name.isprintable() or name != name.strip():
        raise ConfigError(f"name must be 1 to 64 printable characters without spaces around them, got {quote(name)}")
    return name


def _checked_cards(value: object) -> tuple[str, ...]:
    try:
        return read_names(value)
    except ValueError as error:
        raise ConfigError(f"gpus {error}") from None


def _checked_memory(value: object) -> int | None:
    return count_of_bytes("gpu_memory", value)


Host = Annotated[str, AfterValidator(checked_host)]
Name = Annotated[str, AfterValidator(_checked_name), Field(json_schema_extra={"minLength": 1, "maxLength": 64})]
Python = Annotated[str, AfterValidator(_checked_python)]
Advertised = Annotated[str, AfterValidator(_checked_advertised)]
CARDS_SCHEMA = {
    "anyOf": [
        {"type": "array", "items": {"type": ["integer", "string"]}, "minItems": 1, "uniqueItems": True},
        {"type": "string"},
    ]
}
MEMORY_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": r"^ *[0-9]+(\.[0-9]+)? *([KMGTkmgt][Ii]?)?[Bb]? *$"},
    ]
}
CardNames = Annotated[Any, AfterValidator(_checked_cards), WithJsonSchema(CARDS_SCHEMA)]
CardMemory = Annotated[Any, AfterValidator(_checked_memory), WithJsonSchema(MEMORY_SCHEMA)]
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

    host: Host = Field(description="Host name or IP address for the master.")
    port: Port = Field(default=DEFAULT_PORT, description="The one TCP port of the worker.")
    name: Name | None = Field(default=None, description="Name for messages; the default is host:port.")
    advertise: Advertised | None = Field(
        default=None, description="Address for other workers, HOST or HOST:PORT; by default the worker's own addresses."
    )

    python: Python | None = Field(
        default=None, description="Python on its machine, for ddlf up; ~ is the home folder there. By default python3."
    )
    gpus: CardNames | None = Field(
        default=None,
        description="Cards that it computes on, such as [0], or none; by default one that has no worker. ddlf up starts it "
        "with them, and a run refuses a worker with others.",
    )
    gpu_memory: CardMemory | None = Field(
        default=None,
        description="Limit of its memory on each card, such as 8GiB. Workers with a limit may share a card.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_short_form(cls, data: Any) -> Any:
        if isinstance(data, str):
            host, port = parse_address(data)
            return {"host": host, "port": port}
        return data

    @model_validator(mode="after")
    def _has_a_card_to_limit(self) -> Self:
        if self.gpus == (NONE,) and self.gpu_memory is not None:
            raise ConfigError("gpu_memory has no effect with gpus: none")
        return self

    @property
    def wish(self) -> CardWish:
        """The cards that it shall have."""
        return CardWish(self.gpus, self.gpu_memory)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class SecurityConfig(_Section):
    """The token and certificates. Master and workers use them to prove their identity. The file never contains the
    token itself."""

    token_file: Annotated[Path, Field(strict=False)] | None = Field(
        default=None, description="File with the token; relative to the folder of this file, ~ is the home folder."
    )

    tls_ca: Annotated[Path, Field(strict=False)] | None = Field(
        default=None,
        description="File with the certificates of an authority that signs the workers' certificates.",
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
        description="Also accept results that are not plain data. A worker could then run code on the master.",
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
    """Settings of ``ddlf run`` and ``ddlf.main``. They override attributes of the app, and command-line flags override
    them."""

    min_workers: Count | None = Field(
        default=None, description="Start with this number of workers if others do not answer."
    )
    connect_timeout_s: float = Field(
        default=10.0, gt=0, allow_inf_nan=False, description="Seconds to try to reach all workers."
    )
    heartbeat_s: Seconds | None = Field(default=None, description="Seconds between two heartbeats; 0.5 by default.")
    suspect_after_s: Seconds | None = Field(
        default=None, description="Seconds of silence until a worker is suspect; 2 by default."
    )
    dead_after_s: Seconds | None = Field(
        default=None,
        description="Seconds of silence until a worker counts as lost, at least 3 x heartbeat_s; 4 by default.",
    )


def _field(name: str, setting: Setting[Any, Any]) -> Any:
    """Return a setting as a key of the file: pydantic's type, and a field whose default is None."""
    check = setting.accepts
    checked = AfterValidator(partial(_checked, name, setting))
    kind: Any = Annotated[type(setting.default), checked]
    if setting.default is None:  # a text such as that of split or data_memory: the setting's own check knows more
        kind = Annotated[Any, checked, WithJsonSchema({"type": ["string", "integer"]})]
    if isinstance(check, OneOf):
        kind = Literal[check.names]
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
        **{name: _field(name, setting) for name, setting in declared().items() if Use.FILE in setting.use},
    )


class ClusterConfig(_Section):
    """The content of a cluster.yaml. The same file serves on every machine."""

    version: Literal[1] = Field(default=1, description="Version of this format.")
    name: Name | None = Field(default=None, description="A name for the cluster.")
    # strict=False only concerns the container: YAML gives a list, and a frozen model holds a tuple.
    workers: Annotated[tuple[WorkerAddress, ...], Field(strict=False)] = Field(
        default=(),
        description="The workers, in the order of their numbers.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_WORKERS},
    )
    launcher: str | dict[str, dict[str, Any] | None] | None = Field(
        default=None,
        description="Launcher that starts the workers, instead of a list: NAME, NAME:TEXT, or a mapping of its name to its keys.",
    )
    security: SecurityConfig = Field(default=SecurityConfig(), description="The token's file, and certificates.")
    run: RunConfig = Field(default=RunConfig(), description="Settings of a run.")

    @field_validator("version", mode="before")
    @classmethod
    def _is_an_integer(cls, version: Any) -> Any:
        return version if type(version) is int else "no integer"  # True and 1.0 would pass a comparison with 1

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

    @field_validator("launcher", mode="before")
    @classmethod
    def _names_one_launcher(cls, launcher: Any) -> Any:
        if launcher is not None and not isinstance(launcher, str | dict):
            raise ConfigError("launcher must be text, or a mapping such as {slurm: {cores: 2}}")
        if isinstance(launcher, dict) and (
            len(launcher) != 1 or not all(keys is None or isinstance(keys, dict) for keys in launcher.values())
        ):
            raise ConfigError(
                "launcher must be a mapping of one name to the launcher's keys, such as {slurm: {cores: 2}}"
            )
        return launcher

    @property
    def launcher_name(self) -> str | None:
        """Name of the launcher, if one starts the workers."""
        if isinstance(self.launcher, dict):
            return next(iter(self.launcher))
        return None if self.launcher is None else self.launcher.partition(":")[0]

    def new_launcher(self, workers: Workers | None = None) -> Launcher:
        """Make the launcher that this file names.

        Args:
            workers: The number of workers, if the file does not have it.

        Raises:
            ConfigError: There is no such launcher, or a key is invalid.
        """
        assert self.launcher is not None
        if isinstance(self.launcher, str):
            return installed(self.launcher, workers)
        ((name, keys),) = self.launcher.items()
        return from_keys(name, {**({} if workers is None else {"workers": workers}), **(keys or {})})

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

        python docs/reference
    """
    result = ClusterConfig.model_json_schema()
    mapping = result["$defs"]["WorkerAddress"]
    short_form = {"type": "string", "pattern": SHORT_FORM, "examples": [f"10.0.0.11:{DEFAULT_PORT}"]}
    result["$defs"]["WorkerAddress"] = {"anyOf": [short_form, mapping]}
    for name, described in result["$defs"]["RunConfig"]["properties"].items():
        if name in declared() and isinstance(check := declared()[name].accepts, RuleOf):
            described["description"] = f"{with_names(described['description'].removesuffix('.'), check.names)}."
    for name in ("security", "run"):  # null, when all lines of the section are commented out
        section = result["properties"][name]
        section["anyOf"] = [{"$ref": section.pop("$ref")}, {"type": "null"}]
    del result["properties"]["workers"]["default"]
    result["oneOf"] = [{"required": [name]} for name in ("workers", "launcher")]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result, "title": "cluster.yaml of DDLF"}


TIMES = ("heartbeat_s", "suspect_after_s", "dead_after_s")


def contradictions(
    workers: Mapping[int, WorkerAddress], listed: int, run: Mapping[str, Any], launcher: Any
) -> Iterator[tuple[KeyPath, str]]:
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
            path = ("workers", index, "name")
            yield path, f"workers[{first}] and workers[{index}] have the same name, {quote(worker.name)}"
        host, port = parse_advertised(worker.advertise) if worker.advertise is not None else ("", 0)
        if port and (first := advertised.setdefault((same_host(host), port), index)) != index:
            path = ("workers", index, "advertise")
            yield path, f"workers[{first}] and workers[{index}] advertise the same address, {worker.advertise}"
    min_workers = run.get("min_workers")
    if type(min_workers) is int and min_workers > listed > 0:
        yield ("run", "min_workers"), f"min_workers is {min_workers}, but workers lists only {listed}"
    right = {name: run[name] for name in TIMES if type(run.get(name)) in (int, float) and 0 < run[name] < math.inf}
    try:
        Timing.of(**{name: right.get(name) for name in TIMES})
    except ConfigError as error:
        yield ("run", error.message.split()[0]), error.message


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
    default_path = find_config(path)
    if default_path is None:
        raise ConfigError(
            f"no cluster configuration: DDLF_CONFIG is not set and {Path.cwd() / 'cluster.yaml'} does not exist",
            hint=SMALLEST_EXAMPLE,
        )
    text = _read_text(default_path, named_by="" if path is not None else " (named by DDLF_CONFIG)")
    return _config(text, default_path, default_path.parent.absolute())


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
    return {
        str(key_path[1]): at(node, "").line
        for key_path, node in keys.items()
        if key_path[0] == "run" and len(key_path) == 2
    }


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
        raise ConfigError(
            f"config file {path}{named_by} is a directory", hint="name a file in this directory"
        ) from None
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"config file {quote(str(path))}{named_by} cannot be read: {reason}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than 1 MiB, so it cannot be a cluster configuration")
    try:
        text = content.decode("utf-8-sig")
        broken_at = content.find(b"\0")
    except UnicodeDecodeError as error:
        broken_at = error.start
    if broken_at >= 0:
        preceding = content[:broken_at]
        position = preceding.count(b"\n") + 1, broken_at - preceding.rfind(b"\n")
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
        kind = "a list" if isinstance(document.data, list) else "a single value"  # the value may be a secret token
        sentence = f"expected a mapping at top level, got {kind}; {SMALLEST_EXAMPLE}"
        return None, [*document.problems, document.at((), sentence)]
    try:
        return ClusterConfig.model_validate(document.data, context={"folder": folder}), document.problems
    except ValidationError as error:
        problems = [
            _problem(document, details) for details in error.errors() if not document.is_reported(details["loc"])
        ]
    # pydantic looks for contradictions only when every single value is valid. This check reports both at once.
    contradictions = [document.at(path, sentence) for path, sentence in _contradictions(document)]
    return None, document.problems + problems + contradictions


def _problem(document: Document, details: ErrorDetails) -> Problem:
    """Convert an error of pydantic to a problem, a sentence with a position in the file."""
    path = details["loc"]
    kind = details["type"]
    name = path[-1] if isinstance(path[-1], str) else f"{path[-2]}[{path[-1]}]"
    if kind == "extra_forbidden":
        return at(document.keys[path], _unknown_key(path))
    if kind == "missing":
        return document.at(path, f"key {quote(name)} is missing")
    if kind == "value_error":
        return document.at(path, str(details["ctx"]["error"]))
    if kind not in _EXPECTED:
        return document.at(path, f"{name}: {details['msg']}")
    expected = _EXPECTED[kind].format(**details.get("ctx", {}))
    if kind == "model_type" and path[0] == "workers":
        expected = "'host:port' or a mapping"
    node = document.values[path]
    repair = ""
    if kind == "string_type" and isinstance(node, yaml.ScalarNode):
        repair = ", write it in quotes"
    elif kind in ("int_type", "float_type") and isinstance(node, yaml.ScalarNode) and node.style:
        repair = ", write it without quotes"
    return at(node, f"{name} must be {expected}, got {shown(node)}{repair}")


def _contradictions(document: Document) -> Iterator[tuple[KeyPath, str]]:
    """Yield the `contradictions` between the valid values of a document."""
    entries = document.data.get("workers", [])
    if not isinstance(entries, list) or (not entries and "workers" in document.data):
        return iter(())  # already reported
    workers = {}
    for index, entry in enumerate(entries[:MAX_WORKERS]):
        with suppress(ValidationError):  # already reported with its position
            workers[index] = WorkerAddress.model_validate(entry)
    run = document.data.get("run")
    return contradictions(workers, len(entries), run if isinstance(run, dict) else {}, document.data.get("launcher"))


def _unknown_key(path: KeyPath) -> str:
    """Return the error's sentence for an unknown key in the file. The key's value is never shown: it may be a secret."""
    key = str(path[-1])
    if key == "token":
        return "token must not be stored in this file, use token_file in security"
    if path[0] == "run" and key in declared():
        setting = declared()[key]
        flag = f"--{(setting.option or key).replace('_', '-')}" if setting.flag is not None else f"-p {key}=VALUE"
        return f"{key} is not a setting for this file: set it in the app, or with {flag}"
    section = ClusterConfig if len(path) == 1 else _SECTIONS[path[0]]
    keys = list(section.model_fields)
    if similar := difflib.get_close_matches(key, keys, n=1):
        return f"unknown key {quote(key)}, did you mean {quote(similar[0])}?"
    for name, other in _SECTIONS.items():
        if key in other.model_fields:
            return f"unknown key {quote(key)}, it belongs in {name!r}"
    return f"unknown key {quote(key)}, known here: {', '.join(keys)}"
