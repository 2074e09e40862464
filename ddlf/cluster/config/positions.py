"""YAML as plain data, with the line and column of every value.

This module composes YAML nodes only. It never constructs an object from a file.
"""

import re
from typing import Any, NamedTuple

import yaml

from ddlf.cluster.config.addresses import DEFAULT_PORT, quote

# A configuration is small. These limits keep a hostile or broken file from using much memory or time.
MAX_FILE_BYTES = 1 << 20
MAX_ALIASES = 100
MAX_DEPTH = 20
MAX_VALUES = 50_000  # before and after following aliases, because aliases of aliases multiply

_ALLOWED_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}"
    for kind in ("map", "seq", "str", "int", "float", "bool", "null", "timestamp", "value", "merge")
)

Where = tuple[int | str, ...]  # the path of a value: ("workers", 2, "port")


class Problem(NamedTuple):
    """A problem to repair. Line and column count from 1."""

    line: int
    column: int
    sentence: str


def at(node: yaml.Node, sentence: str) -> Problem:
    """Return a problem at the beginning of a node."""
    return Problem(node.start_mark.line + 1, node.start_mark.column + 1, sentence)


def _scalar(node: yaml.ScalarNode) -> str | int | float | bool | None:
    """Return the value of a scalar.

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
    """Return a description of a node for error messages, after "got"."""
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
    """Composes nodes only, and stops before a small file becomes a large structure."""

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
    """Turn an error of PyYAML into one sentence."""
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        sentence = f"control character U+{ord(text[error.position]):04X} is not allowed"
        return Problem(before.count("\n") + 1, error.position - before.rfind("\n"), sentence)
    assert isinstance(error, yaml.MarkedYAMLError)
    mark = error.problem_mark or error.context_mark
    if error.context_mark and error.context == "while scanning a simple key":
        mark = error.context_mark  # the key without a colon; PyYAML notices it a line later
    assert mark is not None
    sentence = ", ".join(part for part in (error.context, error.problem) if part)
    line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if "'\\t'" in sentence:
        sentence += "; indent with spaces, not with tabs"
    elif re.search(r"\[[0-9a-fA-F:]*\]:", line):
        sentence += f"; an IPv6 address in brackets needs quotes, as in '[::1]:{DEFAULT_PORT}'"
    return Problem(mark.line + 1, mark.column + 1, sentence)


class Document:
    """The plain data of a file, and the node of each value.

    Attributes:
        data: The content of the file as dict, list, str, int, float, bool and None.
        problems: Problems of the YAML itself: forbidden tags, duplicate keys, keys that are not text.
        values: The node of each value, by its path.
        keys: The node of each key, by the path of its value.
    """

    def __init__(self, root: yaml.Node) -> None:
        self.problems: list[Problem] = []
        self.values: dict[Where, yaml.Node] = {}
        self.keys: dict[Where, yaml.Node] = {}
        self._refused: set[Where] = set()
        self.data = self._plain(root, ())

    def _plain(self, node: yaml.Node, where: Where) -> Any:
        """Return the data below ``node``. An alias is read again at each place that uses it."""
        self.values[where] = node
        if len(where) > MAX_DEPTH:  # an alias can contain itself
            raise _too_much(f"nested deeper than {MAX_DEPTH} levels", node)
        if len(self.values) > MAX_VALUES:
            raise _too_much(f"more than {MAX_VALUES:,} values", node)
        if node.tag not in _ALLOWED_TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            self._refused.add(where)
            self.problems.append(at(node, f"tag {quote(tag)} is not allowed"))
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
                self.problems.append(at(key, f"a key must be text, got {shown(key)}"))
            elif key.tag == "tag:yaml.org,2002:merge":
                self.problems.append(at(key, "merge keys ('<<') are not supported, repeat the keys"))
            elif key.value in data:  # PyYAML's own constructor would silently use the last value
                first = self.keys[*where, key.value].start_mark.line + 1
                self.problems.append(at(key, f"key {quote(key.value)} is given twice (first at line {first})"))
            else:
                self.keys[*where, key.value] = key
                data[key.value] = self._plain(value, (*where, key.value))
        return data

    def at(self, where: Where, sentence: str) -> Problem:
        """Return a problem with the value at ``where``, or with the surrounding value if there is none."""
        while where not in self.values:
            where = where[:-1]
        return at(self.values[where], sentence)

    def is_reported(self, where: Where) -> bool:
        """Return whether a value was refused before pydantic saw it, or the error concerns the whole file (``()``)."""
        return not where or any(where[:length] in self._refused for length in range(len(where) + 1))


def compose(text: str) -> Document | None:
    """Return the document of a text; None if the text is empty.

    Raises:
        yaml.YAMLError: The text is invalid YAML or exceeds the limits; ``syntax_problem`` describes the error.
    """
    root = _Composer(text).get_single_node()
    return None if root is None else Document(root)
