"""Locates the subject of a finding in the user's Python files or model text. Reads files, but never runs them."""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ddlf.extras.advice.facts import AppFacts, LayerFacts
from ddlf.extras.advice.rule import Advice, Position
from ddlf.training.context import App

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IGNORE = re.compile(r"#\s*ddlf:\s*ignore\b(?:\[([^\]]*)\])?\s*(.*)")
OF_TRAIN = {"optimizer": ("learning_rate", "optimizer", "clipping"), "metric": ("metrics",)}
"""Keys of the block ``train`` for a subject, the most specific first."""


@dataclass(frozen=True, slots=True)
class Ignore:
    """A comment in the user's code that tells the adviser to ignore the findings of a rule.

    Args:
        position: The comment's line.
        id: The id of the rule.
        reason: The user's reason.
        lines: The lines that the comment applies to; None for the whole file.
    """

    position: Position
    id: str
    reason: str
    lines: frozenset[int] | None

    def matches(self, advice: Advice) -> bool:
        """Return whether the comment ignores a finding."""
        if self.id.upper() != advice.rule.id:
            return False
        at = advice.position
        return self.lines is None or (at is not None and at.path == self.position.path and at.line in self.lines)


class PythonFile:
    """A Python file with its text. It is parsed when its syntax tree is used: most trainings use none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text(encoding="utf-8-sig")

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; an empty one if the text is not Python, such as a notebook."""
        try:
            return ast.parse(self.text)
        except (SyntaxError, ValueError):
            return ast.Module([], [])

    @cached_property
    def calls(self) -> list[ast.Call]:
        """All calls."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]

    @cached_property
    def parents(self) -> dict[int, ast.AST]:
        """The parent of each node, by the node's ``id``."""
        return {id(child): node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def ignores(self) -> Iterator[Ignore]:
        """Yield the comments in this file that tell the adviser to ignore findings."""
        if "ddlf:" not in self.text or not self.tree.body:
            return
        classes = {node.lineno for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type != tokenize.COMMENT or (match := IGNORE.match(token.string)) is None:
                continue
            line = token.start[0]
            is_alone = not token.line[: token.start[1]].strip()
            lines = frozenset({line, line + 1} if is_alone else {line})
            for id in (match[1] or "").split(","):
                is_class = bool(lines & classes)
                yield Ignore(Position(self.path, line), id.strip(), match[2].strip(), None if is_class else lines)


class UserSources:
    """The source files of an app.

    Args:
        paths: The paths of the Python files; the file with the app's class is first.
        app: The name of the app's class.
        text: The text of the app's model, if the model is a text.
    """

    def __init__(self, paths: Iterable[Path], app: str, text: ModelText | None = None) -> None:
        self.files: list[PythonFile] = []
        for path in dict.fromkeys(paths):
            try:
                self.files.append(PythonFile(path))
            except (OSError, ValueError):  # the class is from a notebook, or the file was deleted or has no text
                continue
        self.app, self.text = app, text

    def _files_with(self, *words: str) -> list[PythonFile]:
        """Return the files that contain one of some words. Only these need to be parsed to find the words in code."""
        return [file for file in self.files if any(word in file.text for word in words)]

    def ignores(self) -> list[Ignore]:
        """Return the comments in all the user's files that tell the adviser to ignore findings."""
        ignores = [ignore for file in self.files for ignore in file.ignores()]
        return [*ignores, *self.text.ignores()] if self.text is not None else ignores

    def calls(self, of: Iterable[str]) -> bool:
        """Return whether the user's files call any of these functions, such as ``adapt``."""
        names = set(of)
        return any(_name(call.func) in names for file in self._files_with(*names) for call in file.calls)

    def position(self, subject: tuple[str, str], facts: AppFacts) -> Position | None:
        """Return the position of a finding's subject, such as a layer, in the user's code. If it is not found, return
        the position of its method or class."""
        kind, name = subject
        if self.text is not None:
            if not self.files:
                return self.text.app(kind, name)
            in_text = self.text.model(kind, name) if kind == "layer" or self.compile_call() is None else None
            if in_text is not None:
                return in_text
        location: tuple[PythonFile, Any] | None = None
        if kind == "layer" and (layer := facts.layer(name)) is not None:
            location = self.layer(layer, facts) or self.method("create_model")
        elif kind in ("loss", "metric", "optimizer"):
            location = self._compiled("metrics" if kind == "metric" else kind) or self.method("create_model")
        elif kind == "data":
            location = self._assignment_of(name.partition("[")[0]) or self.method("load_dataset")
        elif kind == "setting":
            location = self.setting(name)
        elif kind == "method":
            location = self.method(name)
        location = location or self.class_()
        return None if location is None else Position(location[0].path, location[1].lineno)

    def class_(self) -> tuple[PythonFile, ast.ClassDef] | None:
        """Return the definition of the app's class and its file; None if no file defines it."""
        return self._first_definition(self.app, ast.ClassDef)

    def method(self, name: str) -> tuple[PythonFile, Any] | None:
        """Return a method of the app's class. If the class lacks it, look in other classes."""
        if (app_class := self.class_()) is not None:
            for node in app_class[1].body:
                if isinstance(node, FUNCTIONS) and node.name == name:
                    return app_class[0], node
        return self._first_definition(name, *FUNCTIONS)

    def setting(self, name: str) -> tuple[PythonFile, Any] | None:
        """Return the statement of the app's class that assigns a setting."""
        app_class = self.class_()
        for node in app_class[1].body if app_class is not None else []:
            if app_class is not None and name in _targets(node):
                return app_class[0], node
        return None

    def value(self, name: str) -> tuple[PythonFile, ast.expr] | None:
        """Return the expression that the user's code assigns to a name, if it assigns the name only once."""
        assignments = [
            (file, value)
            for file in self._files_with(name)
            for node in ast.walk(file.tree)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target, value in _assigned(node)
            if isinstance(target, ast.Name) and target.id == name
        ]
        return assignments[0] if len(assignments) == 1 else None

    def compile_call(self) -> tuple[PythonFile, ast.Call] | None:
        """Return the call of the model's ``compile`` in the user's code."""
        compile_calls = [
            (file, call)
            for file in self._files_with("compile")
            for call in file.calls
            if isinstance(call.func, ast.Attribute)
            and call.func.attr == "compile"
            and (call.args or call.keywords)
            and not (isinstance(call.func.value, ast.Name) and call.func.value.id == "re")
        ]
        return compile_calls[0] if compile_calls else None

    def compiled(self, name: str) -> tuple[PythonFile, ast.expr] | None:
        """Return the expression that the user's code passes to ``compile`` as this argument."""
        if (compile_call := self.compile_call()) is None:
            return None
        file, call = compile_call
        value = argument(call, ("optimizer", "loss", "loss_weights", "metrics"), name)
        return None if value is None else (file, value)

    def _compiled(self, name: str) -> tuple[PythonFile, Any] | None:
        return self.compiled(name) or self.compile_call()

    def _assignment_of(self, name: str) -> tuple[PythonFile, Any] | None:
        assignments = [
            (file, node)
            for file in self._files_with(name)
            for node in ast.walk(file.tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            for part in ast.walk(target)
            if isinstance(part, ast.Attribute) and part.attr == name
        ]
        return assignments[-1] if assignments else None

    def _first_definition(self, name: str, *kinds: type[ast.AST]) -> tuple[PythonFile, Any] | None:
        """Return the first definition of a name."""
        nodes = ((file, node) for file in self._files_with(name) for node in ast.walk(file.tree))
        return next(
            (
                definition
                for definition in nodes
                if isinstance(definition[1], kinds) and getattr(definition[1], "name", "") == name
            ),
            None,
        )

    def layer(self, layer: LayerFacts, facts: AppFacts) -> tuple[PythonFile, ast.Call] | None:
        """Return the call in the user's code that creates a layer. It is found by the layer's name, its arguments, or
        its order among equal layers.
        """
        calls = [
            (file, call)
            for file in self._files_with(layer.kind)
            for call in file.calls
            if _name(call.func) == layer.kind
        ]
        calls_by_name = [
            candidate for candidate in calls if _constant(argument(candidate[1], (), "name")) == layer.name
        ]
        if calls_by_name:
            return calls_by_name[0]
        fitting = [candidate for candidate in calls if _fits(candidate[1], layer)]
        fitting.sort(
            key=lambda candidate: (self.files.index(candidate[0]), candidate[1].lineno, candidate[1].col_offset)
        )
        if len(fitting) < 2:
            return fitting[0] if fitting else None
        names = [other.name for other in facts.layers if other.kind == layer.kind and _fits(fitting[0][1], other)]
        index = names.index(layer.name) if layer.name in names else 0
        return fitting[min(index, len(fitting) - 1)]


def positions_of(kind: str) -> tuple[str, ...]:
    """Return the names of a Keras layer's positional arguments; none for another layer."""
    import keras

    layer = getattr(keras.layers, kind, None)
    parameters = inspect.signature(layer).parameters.values() if layer is not None else ()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)


def argument(call: ast.Call, positions: tuple[str, ...], name: str) -> ast.expr | None:
    """Return the expression that a call in the user's code passes as an argument; None if it lacks the argument."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if name in positions and positions.index(name) < len(call.args):
        return call.args[positions.index(name)]
    return None


def _name(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _constant(node: ast.expr | None) -> Any:
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None


def _fits(call: ast.Call, layer: LayerFacts) -> bool:
    """Return whether a call may have created a layer: the call's constants must equal the layer's arguments."""
    arguments = [(name, value) for name, value in zip(positions_of(layer.kind), call.args, strict=False)]
    arguments += [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None]
    for name, node in arguments:
        value = _constant(node)
        if value is None or (name not in layer.config and name != "activation"):
            continue
        layer_value = layer.activation if name == "activation" else layer.config[name]
        if isinstance(layer_value, list | tuple):
            value = (
                (value,) * len(layer_value)
                if isinstance(value, int)
                else tuple(value)
                if isinstance(value, list | tuple)
                else value
            )
            layer_value = tuple(layer_value)
        if value != layer_value:
            return False
    return True


def _targets(node: ast.AST) -> set[str]:
    return {target.id for target, _ in _assigned(node) if isinstance(target, ast.Name)}


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each target of an assignment statement with the expression that is assigned to it."""
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if (
                isinstance(target, ast.Tuple)
                and isinstance(node.value, ast.Tuple)
                and len(target.elts) == len(node.value.elts)
            ):
                yield from zip(target.elts, node.value.elts, strict=True)
            elif isinstance(target, ast.Tuple):
                yield from ((element, node.value) for element in target.elts)
            else:
                yield target, node.value


class ModelText:
    """The file of a model text, a model written in DDLF's notation.

    Args:
        notation: The loaded text.

    Attributes:
        path: The path of the text's file.
    """

    def __init__(self, notation: Any) -> None:
        self.path: Path = notation.path
        self._text: str = notation.parsed.text
        self._line_of: Callable[[int], int] = notation.line_of
        self._layers: Mapping[str, int] = notation.layer_positions
        self._blocks = {head.name: head.block for head in notation.parsed.graph.heads}
        self._inputs = [node.name for node in notation.parsed.graph.nodes if node.operator == "input"]
        self._statements: Mapping[tuple[str, str], int] = notation.statement_positions()

    def model(self, kind: str, name: str) -> Position | None:
        """Return the position of a layer, a loss, a metric or the optimizer; None if the text lacks it.

        Args:
            kind: The kind of the subject, such as ``"layer"`` or ``"loss"``.
            name: The name of the subject.
        """
        if kind == "layer":
            return self._position_at(self._layers.get(name))
        if kind == "loss":
            block = self._blocks.get(name) or next(iter(self._blocks.values()))
            return self._first_position((block, "loss"), ("train", "loss"), (block, "output"))
        if kind in OF_TRAIN:
            return self._first_position(*(("train", key) for key in OF_TRAIN[kind]))
        return None

    def app(self, kind: str, name: str) -> Position:
        """Return the position of a finding's subject, or of the most related line, if the model text is the whole app."""
        position = self.model(kind, name)
        if position is None and kind == "setting":
            position = self._first_position(("train", name))
        if position is None and (kind == "data" or (kind, name) == ("method", "load_dataset")):
            array, _, block = name.partition("[")
            block = block.strip("]'\"") or (
                next(iter(self._blocks.values())) if array.startswith("y") else self._inputs[0]
            )
            block = self._blocks.get(block, block)
            position = self._first_position(("train", "data"), (block, "output" if array.startswith("y") else "input"))
        if position is None and kind == "layer":  # an input, or a layer that scales an input
            position = self._first_position((name, "input"), ("train", "scaling"), (self._inputs[0], "input"))
        return position or Position(self.path, self._line(min(self._statements.values(), default=0)))

    def ignores(self) -> Iterator[Ignore]:
        """Yield the comments in this file that tell the adviser to ignore findings."""
        for number, line in enumerate(self._text.splitlines(), 1):
            if "ddlf:" not in line or (match := IGNORE.search(line)) is None:
                continue
            is_alone = not line[: match.start()].strip()
            for id in (match[1] or "").split(","):
                lines = frozenset({number, number + 1} if is_alone else {number})
                yield Ignore(Position(self.path, number), id.strip(), match[2].strip(), lines)

    def _first_position(self, *keys: tuple[str, str]) -> Position | None:
        return next((self._position_at(self._statements[key]) for key in keys if key in self._statements), None)

    def _position_at(self, at: int | None) -> Position | None:
        return None if at is None else Position(self.path, self._line(at))

    def _line(self, at: int) -> int:
        return self._line_of(at)


def text_of(app: App) -> ModelText | None:
    """Return the text of an app's model; None if it has none."""
    model = vars(app).get("model")
    texts = (
        text for text in (model, getattr(model, "notation", None), getattr(app, "notation", None)) if _is_text(text)
    )
    notation = next(texts, None)
    return None if notation is None else ModelText(notation)


def _is_text(model: Any) -> bool:
    """Return whether an object is a model text. The part for model texts may not be installed."""
    return hasattr(type(model), "statement_positions")
