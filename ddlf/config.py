"""Reading cluster.yaml: which workers there are, and the defaults of a run. Runs on the master.

How a file is read:
    1. `find_config` decides which file it is: the one named, $DDLF_CONFIG, or ./cluster.yaml.
    2. PyYAML composes it into nodes, which know their line and column. No object is ever constructed from them.
    3. `_Document` turns the nodes into plain data and remembers which node stands at which place.
    4. The pydantic models check the data. Their errors name a place, so each becomes ``file:line:column: sentence``.
All problems are collected and reported at once, so that a file is repaired in one go.

This file imports pydantic and yaml (150 ms): import it only when a configuration is read.
"""

import difflib
import ipaddress
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from ddlf.errors import ConfigError
from ddlf.liveness import Timing

DEFAULT_PORT = 9000
MAX_WORKERS = 4096
SHORT_FORM = r"^(\[[0-9A-Fa-f:.]+(%[^\]]+)?\]|[A-Za-z0-9_.-]+):[0-9]{1,5}$"
"""Of an address, for editors. ``parse_address`` knows better, and says what is wrong."""

# A configuration is small. These limits keep a hostile or mistaken file from costing memory or minutes.
MAX_FILE_BYTES = 1 << 20
MAX_ALIASES = 100
MAX_DEPTH = 20
MAX_VALUES = 50_000  # before and after aliases are followed: aliases of aliases multiply
MAX_PROBLEMS_SHOWN = 20

SMALLEST_EXAMPLE = "the smallest valid file is 'workers: [127.0.0.1:9000]'"


# --- Values with rules of their own ----------------------------------------------------------------------------------


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[IPv6 address]:port``.

    Raises:
        ConfigError: Says what is wrong with which part.
    """
    if "//" in text:
        raise ConfigError(f"an address is host:port without a protocol, got {_quote(text)}")
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", text)
    if bracketed:
        host, port = bracketed[1], bracketed[2]
        if ":" not in host:
            raise ConfigError(f"only an IPv6 address is written in brackets, got {_quote(text)}")
    elif text.count(":") > 1:
        raise ConfigError(f"an IPv6 address needs brackets, as in '[::1]:{DEFAULT_PORT}', got {_quote(text)}")
    else:
        host, _, port = text.partition(":")
    if not port:
        with_port = f"{text.rstrip(':')}:{DEFAULT_PORT}"
        raise ConfigError(f"{_quote(text)} has no port, write {_quote(with_port)}")
    if not re.fullmatch(r"-?[0-9]+", port):
        raise ConfigError(f"port must be an integer, got {_quote(port)}")
    if len(port) > 10:  # int() refuses thousands of digits with an error of its own
        raise ConfigError(f"port must be 1-65535, got {_quote(port)}")
    return _checked_host(host), _checked_port(int(port))


def _checked_port(port: int) -> int:
    if not 1 <= port <= 65535:
        raise ConfigError(f"port must be 1-65535, got {port}")
    return port


def _checked_host(host: str) -> str:
    """Return ``host`` if it is an IP address or can be a host name (RFC 1123, with underscores)."""
    if ":" in host or re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigError(f"{_quote(host)} is not a valid IP address") from None
        return host
    label = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})"
    if len(host) > 253 or not re.fullmatch(rf"{label}(\.{label})*\.?", host):
        raise ConfigError(f"host must be a host name or an IP address, got {_quote(host)}")
    return host


def _checked_name(name: str) -> str:
    if not 1 <= len(name) <= 64 or not name.isprintable() or name != name.strip():
        raise ConfigError(f"name must be 1 to 64 printable characters without spaces around them, got {_quote(name)}")
    return name


def _quote(text: str) -> str:
    """Return ``text`` in quotes, on one line, without control characters, and not too long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


Host = Annotated[str, AfterValidator(_checked_host)]
Name = Annotated[str, AfterValidator(_checked_name), Field(json_schema_extra={"minLength": 1, "maxLength": 64})]
Port = Annotated[int, AfterValidator(_checked_port), Field(json_schema_extra={"minimum": 1, "maximum": 65535})]
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
            raise ConfigError(f"{info.field_name} {_quote(str(path))} does not exist (looked for {str(resolved)!r})")
        return resolved

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert and tls_key belong together, give both or none")
        if self.insecure_plaintext and (self.tls_ca or self.tls_cert):
            raise ConfigError("insecure_plaintext and certificates exclude each other")
        return self


class RunConfig(_Section):
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
    mode: Literal["sync", "async"] | None = Field(default=None, description="In rounds, or each worker on its own.")
    master_epochs: Count | None = Field(default=None, description="Total of local epochs.")
    worker_epochs: Count | None = Field(default=None, description="Local epochs of a worker in one round.")
    batch_size: Count | None = Field(default=None, description="Samples in a batch of one worker.")
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = Field(default=None, description="Seed of all randomness.")
    slots: Count | None = Field(
        default=None, description="Parts of each round, which any worker can compute; as many as workers by default."
    )
    optimizer_state: Literal["kept", "fresh"] | None = Field(
        default=None, description="Optimizers go on from round to round, or begin anew in each."
    )
    evaluate_every: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Evaluate the test data after every so many rounds; 0 for at the end only."
    )


class ClusterConfig(_Section):
    """The content of a cluster.yaml. The same file serves on every machine."""

    version: Literal[1] = Field(default=1, description="Version of this format.")
    name: Name | None = Field(default=None, description="A name for the cluster.")
    # Lax about the container only: YAML gives a list, and a frozen model holds a tuple.
    workers: Annotated[tuple[WorkerAddress, ...], Field(strict=False)] = Field(
        description="The workers, in the order that counts them.",
        json_schema_extra={"minItems": 1, "maxItems": MAX_WORKERS},
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
        # Not pydantic's min_length and max_length: those count only the entries that are right by themselves.
        if isinstance(workers, list | tuple) and not workers:
            raise ConfigError("workers must list at least one address")
        if isinstance(workers, list | tuple) and len(workers) > MAX_WORKERS:
            raise ConfigError(f"workers: at most {MAX_WORKERS:,}, got {len(workers):,}")
        return workers

    @field_validator("security", "run", mode="before")
    @classmethod
    def _accept_a_section_without_content(cls, data: Any) -> Any:
        return {} if data is None else data  # what remains when all its lines are commented out

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        times = {name: getattr(self.run, name) for name in TIMES}
        found = _contradictions(dict(enumerate(self.workers)), len(self.workers), self.run.min_workers, times)
        for _, sentence in found:
            raise ConfigError(sentence)
        return self


def schema() -> dict[str, Any]:
    """Return the JSON Schema of cluster.yaml, with which editors complete and check it.

    ``cluster.schema.json`` beside this file is what it returns; ``ddlf --schema`` prints that. After a change of the models::

        python -c "import ddlf.config as c, json; print(json.dumps(c.schema(), indent=2))" > ddlf/cluster.schema.json
    """
    result = ClusterConfig.model_json_schema()
    mapping = result["$defs"]["WorkerAddress"]
    short_form = {"type": "string", "pattern": SHORT_FORM, "examples": [f"10.0.0.11:{DEFAULT_PORT}"]}
    result["$defs"]["WorkerAddress"] = {"anyOf": [short_form, mapping]}
    for name in ("security", "run"):  # or nothing, when all their lines are commented out
        section = result["properties"][name]
        section["anyOf"] = [{"$ref": section.pop("$ref")}, {"type": "null"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result, "title": "cluster.yaml of DDLF"}


TIMES = ("heartbeat_s", "suspect_after_s", "dead_after_s")

Where = tuple[int | str, ...]  # the way to a value: ("workers", 2, "port")


def _contradictions(
    workers: Mapping[int, WorkerAddress], listed: int, min_workers: int | None, times: Mapping[str, float | None]
) -> Iterator[tuple[Where, str]]:
    """Yield what is wrong between values that are right by themselves: the place, and a sentence.

    Args:
        workers: The workers that are right by themselves, by their index in the file.
        listed: How many workers the file lists, right or wrong.
        min_workers: ``run.min_workers``, if it is given and right by itself.
        times: Those of ``TIMES`` that are given and right by themselves.
    """
    addresses: dict[tuple[str, int], int] = {}
    names: dict[str, int] = {}
    for index, worker in workers.items():
        first = addresses.setdefault((_same_host(worker.host), worker.port), index)
        if first != index:
            yield ("workers", index), f"workers[{first}] and workers[{index}] are the same address, {worker}"
        if worker.name is not None and (first := names.setdefault(worker.name, index)) != index:
            where = ("workers", index, "name")
            yield where, f"workers[{first}] and workers[{index}] have the same name, {_quote(worker.name)}"
    if min_workers is not None and min_workers > listed:
        yield ("run", "min_workers"), f"min_workers is {min_workers}, but workers lists only {listed}"
    try:
        Timing.of(**times)
    except ConfigError as error:
        yield ("run", error.message.split()[0]), error.message


def _same_host(host: str) -> str:
    """Return one spelling for all spellings of a host. Names are not looked up."""
    return ipaddress.ip_address(host).compressed if ":" in host else host.lower().rstrip(".")


# --- Finding and reading the file ------------------------------------------------------------------------------------


class Addresses(NamedTuple):
    """Hosts and ports of the workers, in the order of the file: ``hosts, ports = read_config()``."""

    hosts: list[str]
    ports: list[int]


def find_config(path: str | Path | None = None) -> Path | None:
    """Return the configuration file to read: ``path``, else $DDLF_CONFIG, else ./cluster.yaml if it exists, else None.

    A file that is named (by the first two) is returned whether it exists or not, since naming a missing file is a
    mistake to report and no reason to take another.
    """
    if path is not None:
        return Path(os.path.expanduser(path))
    if named := os.environ.get("DDLF_CONFIG"):
        return Path(os.path.expanduser(named))
    return Path("cluster.yaml") if os.path.lexists("cluster.yaml") else None


def read_config(path: str | Path | None = None) -> Addresses:
    """Return the workers' hosts and ports; see `load_config`."""
    workers = load_config(path).workers
    return Addresses([worker.host for worker in workers], [worker.port for worker in workers])


def load_config(path: str | Path | None = None) -> ClusterConfig:
    """Read and check a configuration file.

    Args:
        path: The file; if None, $DDLF_CONFIG, then ./cluster.yaml.

    Raises:
        ConfigError: There is no such file, or it has problems: each on a line of its own, with its position.
    """
    found = find_config(path)
    if found is None:
        raise ConfigError(
            f"no cluster configuration: DDLF_CONFIG is not set and {Path.cwd() / 'cluster.yaml'} does not exist",
            hint=SMALLEST_EXAMPLE,
        )
    text = _read_text(found, named_by="" if path is not None else " (named by DDLF_CONFIG)")
    config, problems = _check(text, found.parent)
    if config is None or problems:
        raise ConfigError(_report(found, problems))
    return config


def _read_text(path: Path, named_by: str) -> str:
    """Return the content of a configuration file.

    Raises:
        ConfigError: It cannot be read, is too large, or is not UTF-8 text.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        looked_in = "" if path.is_absolute() else f", looked in {Path.cwd()}"
        raise ConfigError(f"config file {path}{named_by} not found{looked_in}") from None
    except IsADirectoryError:
        raise ConfigError(f"config file {path}{named_by} is a directory", hint="name the file in it") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"config file {_quote(str(path))}{named_by} cannot be read: {reason}") from error
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


class Problem(NamedTuple):
    """Something to repair: line and column count from 1."""

    line: int
    column: int
    sentence: str


def _report(path: Path, problems: list[Problem]) -> str:
    """Return all problems in the order of the file, one per line, as compilers do: editors can jump to them."""
    lines = [f"{path}:{line}:{column}: {sentence}" for line, column, sentence in sorted(set(problems))]
    if len(lines) > MAX_PROBLEMS_SHOWN:
        lines[MAX_PROBLEMS_SHOWN:] = [f"... and {len(lines) - MAX_PROBLEMS_SHOWN} more problems"]
    return "\n".join(lines)


def _check(text: str, folder: Path) -> tuple[ClusterConfig | None, list[Problem]]:
    """Return the configuration in ``text`` and all its problems; relative paths are resolved against ``folder``."""
    try:
        root = _Composer(text).get_single_node()
        if root is None:
            return None, [Problem(1, 1, f"the file is empty; {SMALLEST_EXAMPLE}")]
        document = _Document(root)
    except yaml.YAMLError as error:
        return None, [_syntax_problem(error, text)]
    if not isinstance(document.data, dict):
        what = "a list" if isinstance(document.data, list) else "a single value"  # not shown: it may be a token
        return None, [*document.problems, _at(root, f"expected a mapping at top level, got {what}; {SMALLEST_EXAMPLE}")]
    try:
        return ClusterConfig.model_validate(document.data, context={"folder": folder}), document.problems
    except ValidationError as error:
        problems = [document.problem(details) for details in error.errors() if not document.is_reported(details["loc"])]
    # pydantic looks for contradictions only when each value is right by itself; a user wants to know both at once.
    contradictions = [document.at(where, sentence) for where, sentence in document.contradictions()]
    return None, document.problems + problems + contradictions


class _Composer(yaml.SafeLoader):
    """Composes nodes only, and gives up before a small file can become a large structure."""

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


def _syntax_problem(error: yaml.YAMLError, text: str) -> Problem:
    """Turn PyYAML's own errors into one sentence."""
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        sentence = f"control character U+{ord(text[error.position]):04X} is not allowed"
        return Problem(before.count("\n") + 1, error.position - before.rfind("\n"), sentence)
    assert isinstance(error, yaml.MarkedYAMLError)
    mark = error.problem_mark or error.context_mark
    if error.context_mark and error.context == "while scanning a simple key":
        mark = error.context_mark  # the key without a colon; the problem is noticed a line later
    assert mark is not None
    sentence = ", ".join(part for part in (error.context, error.problem) if part)
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if "'\\t'" in sentence:
        sentence += "; indent with spaces, not with tabs"
    elif re.search(r"\[[0-9a-fA-F:]*\]:", line):
        sentence += f"; an IPv6 address in brackets needs quotes, as in '[::1]:{DEFAULT_PORT}'"
    return Problem(mark.line + 1, mark.column + 1, sentence)


class _Document:
    """The plain data of a file, and the node at each place of it.

    Attributes:
        data: What the file says, as dict, list, str, int, float, bool and None.
        problems: What is wrong with the YAML itself: forbidden tags, duplicate keys, keys that are no text.
    """

    def __init__(self, root: yaml.Node) -> None:
        self.problems: list[Problem] = []
        self._values: dict[Where, yaml.Node] = {}
        self._keys: dict[Where, yaml.Node] = {}
        self._refused: set[Where] = set()
        self.data = self._plain(root, ())

    def _plain(self, node: yaml.Node, where: Where) -> Any:
        """Return the data below ``node``. An alias is read again at each place where it stands."""
        self._values[where] = node
        if len(where) > MAX_DEPTH:  # an alias can contain itself
            raise _too_much(f"nested deeper than {MAX_DEPTH} levels", node)
        if len(self._values) > MAX_VALUES:
            raise _too_much(f"more than {MAX_VALUES:,} values", node)
        if node.tag not in _ALLOWED_TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self._refused.add(where)
            self.problems.append(_at(node, f"tag {_quote(tag)} is not allowed"))
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, where)
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*where, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return _scalar(node)

    def _mapping(self, mapping: yaml.MappingNode, where: Where) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(_at(key, f"a key must be text, got {_shown(key)}"))
            elif key.tag == "tag:yaml.org,2002:merge":
                self.problems.append(_at(key, "merge keys ('<<') are not supported, repeat the keys"))
            elif key.value in data:  # PyYAML's own constructor would silently take the last one
                first = self._keys[*where, key.value].start_mark.line + 1
                self.problems.append(_at(key, f"key {_quote(key.value)} is given twice (first at line {first})"))
            else:
                self._keys[*where, key.value] = key
                data[key.value] = self._plain(value, (*where, key.value))
        return data

    def at(self, where: Where, sentence: str) -> Problem:
        """Return a problem with the value at ``where``, or with what surrounds it if there is none."""
        while where not in self._values:
            where = where[:-1]
        return _at(self._values[where], sentence)

    def problem(self, details: ErrorDetails) -> Problem:
        """Turn one of pydantic's errors into a sentence with a position."""
        where = details["loc"]
        kind = details["type"]
        name = where[-1] if isinstance(where[-1], str) else f"{where[-2]}[{where[-1]}]"
        if kind == "extra_forbidden":
            return _at(self._keys[where], _unknown_key(where))
        if kind == "missing":
            example = f"; {SMALLEST_EXAMPLE}" if name == "workers" else ""
            return self.at(where, f"key {_quote(name)} is missing{example}")
        if kind == "value_error":
            return self.at(where, str(details["ctx"]["error"]))
        if kind not in _EXPECTED:
            return self.at(where, f"{name}: {details['msg']}")
        expected = _EXPECTED[kind].format(**details.get("ctx", {}))
        if kind == "model_type" and where[0] == "workers":
            expected = "'host:port' or a mapping"
        node = self._values[where]
        repair = ""
        if kind == "string_type" and isinstance(node, yaml.ScalarNode):
            repair = ", write it in quotes"
        elif kind in ("int_type", "float_type") and isinstance(node, yaml.ScalarNode) and node.style:
            repair = ", write it without quotes"
        return _at(node, f"{name} must be {expected}, got {_shown(node)}{repair}")

    def is_reported(self, where: Where) -> bool:
        """Return whether the value was refused before pydantic saw it, or pydantic looked at the whole (``()``)."""
        return not where or any(where[:length] in self._refused for length in range(len(where) + 1))

    def contradictions(self) -> Iterator[tuple[Where, str]]:
        """Return the `_contradictions` between those values that are right by themselves."""
        entries = self.data.get("workers")
        if not isinstance(entries, list) or not entries:
            return iter(())  # has been reported; nothing to compare
        workers = {}
        for index, entry in enumerate(entries[:MAX_WORKERS]):
            with suppress(ValidationError):  # has been reported with its position
                workers[index] = WorkerAddress.model_validate(entry)
        run = self.data.get("run")
        min_workers = run.get("min_workers") if isinstance(run, dict) else None
        times: dict[str, float | None] = dict.fromkeys(TIMES)
        if isinstance(run, dict):
            for name in TIMES:
                value = run.get(name)
                if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
                    times[name] = value
        return _contradictions(workers, len(entries), min_workers if type(min_workers) is int else None, times)


_ALLOWED_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value", "merge")
)

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


def _unknown_key(where: Where) -> str:
    """Return the sentence for an unknown key. Its value is never shown: it may be a secret."""
    key = str(where[-1])
    if key == "token":
        return "token must not be stored in this file, use token_file in security"
    section = ClusterConfig if len(where) == 1 else _SECTIONS[where[0]]
    known = list(section.model_fields)
    if similar := difflib.get_close_matches(key, known, n=1):
        return f"unknown key {_quote(key)}, did you mean {_quote(similar[0])}?"
    for name, other in _SECTIONS.items():
        if key in other.model_fields:
            return f"unknown key {_quote(key)}, it belongs in {name!r}"
    return f"unknown key {_quote(key)}, known here: {', '.join(known)}"


_SECTIONS: dict[int | str, type[_Section]] = {"workers": WorkerAddress, "security": SecurityConfig, "run": RunConfig}


def _at(node: yaml.Node, sentence: str) -> Problem:
    return Problem(node.start_mark.line + 1, node.start_mark.column + 1, sentence)


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """Return the value of a scalar. Numbers are what people mean by them: YAML 1.1 reads 22:22 as 1342 and 010 as 8."""
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


def _shown(node: yaml.Node) -> str:
    """Return what stands in the file, for "got ..."."""
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
    text = _quote(node.value)
    return text if node.style else text[1:-1]
