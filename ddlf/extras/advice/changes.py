"""Turns the changes that a finding proposes into edits of the user's files, and edits into a unified diff. It makes
only changes that are certain.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ddlf.extras.advice.facts import AppFacts
from ddlf.extras.advice.rule import Change, Edit
from ddlf.extras.advice.source import FUNCTIONS, PythonFile, UserSources, argument, positions_of
from ddlf.training.registry import SETTINGS


def edits_of(changes: Iterable[Change], sources: UserSources, facts: AppFacts) -> list[Edit]:
    """Return the edits of the user's files that make all these changes; an empty list if one change is not possible."""
    result: list[Edit] = []
    for change in changes:
        edits = _edits(change, sources, facts)
        if not edits:
            return []
        result += edits
    return list(dict.fromkeys(result))


def diff(edits: Iterable[Edit]) -> str:
    """Return edits as a diff for ``patch -p0`` in this folder. If two edits overlap, the first one applies."""
    parts = []
    for path, text in changed(edits).items():
        before = _lines(path.read_bytes().decode())
        name = os.path.relpath(path) if not os.path.relpath(path).startswith("..") else str(path)
        parts += _marked(difflib.unified_diff(before, _lines(text), name, name))
    return "".join(parts)


def _marked(lines: Iterable[str]) -> list[str]:
    return [line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines]


def _lines(text: str) -> list[str]:
    """Split a text into lines that keep their line ends. Only a line feed ends a line, like in ``patch``."""
    return re.findall("[^\n]*\n|[^\n]+", text)


def offsets(text: str) -> list[int]:
    """Return for each character of a decoded text its offset in the file, which may begin with a byte order mark and
    have ``\\r\\n``.
    """
    return [match.start() for match in re.finditer("\r\n|(?!^\ufeff).", text, re.DOTALL)] + [len(text)]


def changed(edits: Iterable[Edit]) -> dict[Path, str]:
    """Return the text of each file after its edits, with the file's line ends. If two edits overlap, the first one
    applies."""
    by_file: dict[Path, list[Edit]] = {}
    for edit in dict.fromkeys(edits):
        kept_edits = by_file.setdefault(edit.path, [])
        if not any(edit.begin < other.end and other.begin < edit.end for other in kept_edits):
            kept_edits.append(edit)
    result = {}
    for path, kept_edits in by_file.items():
        text = path.read_bytes().decode()
        at, end = offsets(text), "\r\n" if "\r\n" in text else "\n"
        for edit in sorted(kept_edits, key=lambda other: other.begin, reverse=True):
            text = text[: at[edit.begin]] + edit.text.replace("\n", end) + text[at[edit.end] :]
        result[path] = text
    return result


def _edits(change: Change, sources: UserSources, facts: AppFacts) -> list[Edit]:
    match change.kind:
        case "loss":
            match = sources.compiled("loss")
            return _replaced(match, change.value) if match and _is_simple(match[1]) else []
        case "metric":
            match = sources.compiled("metrics")
            constants = (
                [node for node in ast.walk(match[1]) if isinstance(node, ast.Constant) and node.value == change.target]
                if match
                else []
            )
            return _replaced((match[0], constants[0]), change.value) if match and constants else []
        case "rate":
            return _optimizer(sources, "learning_rate", change.value)
        case "optimizer":
            return _optimizer(sources, change.argument, change.value)
        case "argument":
            return _argument(change, sources, facts)
        case "remove":
            return _removed(change, sources, facts)
        case "setting":
            return _setting(change, sources, facts)
        case "data":
            return _append_to_load_dataset(change, sources)


def _is_simple(node: ast.expr) -> bool:
    """Return whether an expression in the user's code names a Keras loss without further arguments, so that it is safe
    to replace.
    """
    if isinstance(node, ast.Call):
        return not node.args and all(keyword.arg in ("from_logits", "name") for keyword in node.keywords)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute))


def _replaced(target: tuple[PythonFile, ast.expr] | None, value: Any) -> list[Edit]:
    if target is None:
        return []
    file, node = target
    begin, end = span(file, node)
    return [Edit(file.path, begin, end, _written(value))]


def _written(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def span(file: PythonFile, node: ast.AST) -> tuple[int, int]:
    """Return the place of a node of the syntax tree in the file's text: the offsets of its first character and of the
    character after its last.
    """
    lines = _lines(file.text)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def character_of(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    return character_of(node.lineno, node.col_offset), character_of(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]


def _indent(file: PythonFile, node: ast.stmt) -> str:
    """Return the spaces before a statement in the user's code, to indent an added line equally."""
    return _lines(file.text)[node.lineno - 1][: node.col_offset]


def _optimizer(sources: UserSources, name: str, value: Any) -> list[Edit]:
    """Return edits that set an argument of the optimizer in the user's code. A missing argument is added, unless it is
    the learning rate.
    """
    expression = sources.compiled("optimizer")
    if expression is None:
        return []
    file, node = expression
    if isinstance(node, ast.Name) and (assigned := sources.value(node.id)) is not None:
        file, node = assigned
    if not isinstance(node, ast.Call):
        return []
    if (written := argument(node, ("learning_rate",), name)) is not None:
        return _number((file, written), sources, value)
    return [] if name == "learning_rate" else _added(file, node, name, value)


def _added(file: PythonFile, call: ast.Call, name: str, value: Any) -> list[Edit]:
    """Return edits that add an argument to a call in the user's code; none if the call has ``**``, which may contain
    it.
    """
    if any(keyword.arg is None for keyword in call.keywords):
        return []
    last = max((span(file, node)[1] for node in [*call.args, *call.keywords]), default=None)
    begin = last if last is not None else span(file, call)[1] - 1
    return [Edit(file.path, begin, begin, f"{'' if last is None else ', '}{name}={_written(value)}")]


def _number(target: tuple[PythonFile, ast.expr] | None, sources: UserSources, value: Any) -> list[Edit]:
    """Return edits that replace a literal number in the user's code, or the number that is assigned to a name."""
    if target is None:
        return []
    file, node = target
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
        return _number(sources.value(node.attr), sources, value)
    if isinstance(node, ast.Name):
        return _number(sources.value(node.id), sources, value)
    if isinstance(node, ast.UnaryOp):
        node_value: Any = node.operand
    else:
        node_value = node
    return _replaced((file, node), value) if isinstance(node_value, ast.Constant) else []


def _argument(change: Change, sources: UserSources, facts: AppFacts) -> list[Edit]:
    layer = facts.layer(change.target)
    position = sources.layer(layer, facts) if layer is not None else None
    if layer is None or position is None:
        return []
    file, call = position
    if (node := argument(call, positions_of(layer.kind), change.argument)) is not None:
        return _replaced((file, node), change.value)
    if change.argument == "trainable" or layer.kind in ("Softmax", "ReLU"):
        return []
    return _added(file, call, change.argument, change.value)


def _removed(change: Change, sources: UserSources, facts: AppFacts) -> list[Edit]:
    layer = facts.layer(change.target)
    position = sources.layer(layer, facts) if layer is not None else None
    if position is None:
        return []
    file, call = position
    parent: Any = file.parents.get(id(call))
    begin, end = span(file, call)
    if isinstance(parent, ast.List | ast.Tuple):
        while end < len(file.text) and file.text[end] in ", \t":
            end += 1
        line = file.text.rfind("\n", 0, begin) + 1
        if not file.text[line:begin].strip() and file.text[end : end + 1] == "\n":  # the statement is alone on its line
            begin, end = line, end + 1
        elif file.text[begin - 2 : begin] == ", " and file.text[end : end + 1] in "])":
            begin -= 2
        return [Edit(file.path, begin, end, "")]
    outer: Any = file.parents.get(id(parent))
    is_called_at_once = (
        isinstance(parent, ast.Call) and parent.func is call and isinstance(outer, ast.Assign) and len(parent.args) == 1
    )
    is_passed_through = (
        is_called_at_once
        and isinstance(parent.args[0], ast.Name)
        and [getattr(target, "id", None) for target in outer.targets] == [parent.args[0].id]
    )
    is_added = (
        isinstance(parent, ast.Call) and getattr(parent.func, "attr", "") == "add" and isinstance(outer, ast.Expr)
    )
    if not (is_passed_through or is_added):
        return []
    begin, end = span(file, outer)
    begin = file.text.rfind("\n", 0, begin) + 1
    end = file.text.find("\n", end) + 1 or len(file.text)
    return [Edit(file.path, begin, end, "")]


def _setting(change: Change, sources: UserSources, facts: AppFacts) -> list[Edit]:
    app_class = sources.class_()
    if app_class is None or _is_overridden(change.target, sources, facts):
        return []
    file, node = app_class
    if sources.setting(change.target) is not None:
        assigned = sources.value(change.target)
        return _number(assigned, sources, change.value)
    body = node.body
    docstring = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    after = span(file, body[0])[1] if docstring else None
    indent = _indent(file, body[0])
    if after is None:
        begin = file.text.rfind("\n", 0, span(file, body[0])[0]) + 1
        if isinstance(body[0], FUNCTIONS) and body[0].decorator_list:
            return []
        return [Edit(file.path, begin, begin, f"{indent}{change.target} = {_written(change.value)}\n")]
    return [Edit(file.path, after, after, f"\n\n{indent}{change.target} = {_written(change.value)}")]


def _is_overridden(name: str, sources: UserSources, facts: AppFacts) -> bool:
    """Return whether a change of this setting in the app's class would have no effect, because something else, such as
    cluster.yaml, overrides it.
    """
    if name not in facts.settings:
        return False
    assigned = sources.value(name) if sources.setting(name) is not None else None
    if assigned is None:
        return bool(facts.settings[name] != SETTINGS[name].default)
    return isinstance(assigned[1], ast.Constant) and bool(facts.settings[name] != assigned[1].value)


def _append_to_load_dataset(change: Change, sources: UserSources) -> list[Edit]:
    method = sources.method("load_dataset")
    if method is None:
        return []
    file, node = method
    last = node.body[-1]
    if last.lineno == node.lineno:  # the call is in one line
        return []
    indent = _indent(file, last)
    if isinstance(last, ast.Return):
        begin = file.text.rfind("\n", 0, span(file, last)[0]) + 1
        return [Edit(file.path, begin, begin, "".join(f"{indent}{line}\n" for line in change.value))]
    end = span(file, last)[1]
    end = end + len(file.text[end:].partition("\n")[0])
    return [Edit(file.path, end, end, "".join(f"\n{indent}{line}" for line in change.value))]
