"""Writes a learning rate to the user's file: to an app's class, or to the block ``train`` of a model text.

Only the number changes. A file that gets its rate in another way is refused.
"""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

from ddlf.cli.output import write_whole
from ddlf.errors import ConfigError

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
COMMENT = re.compile(r"#[^\n]*")
OPTIMIZER = re.compile(r"(?<![\w.])train\s*:\s*optimizer\b[^;]*;")
IN_BRACKETS = re.compile(rf"\blearning_rate\s*=\s*({NUMBER})(?![\w.(])")
ALONE = re.compile(rf"(?<![\w.])train\s*:\s*learning_rate\s+({NUMBER})\s*;")


def write_rate(path: Path, name: str, own_rate: float, rate: float) -> str:
    """Write a learning rate to a file, and return its place as ``path:line``.

    Args:
        path: The user's file.
        name: The name of the app's class; unused for a model text.
        own_rate: The rate that the model's optimizer has now, to check the place.
        rate: The new rate.

    Raises:
        ConfigError: The rate has no such place, or the file cannot be written. It is then unchanged.
    """
    text = path.read_bytes().decode()
    begin, end = checked_place(path, text, name, own_rate)
    added = begin == end
    number = str(float(f"{rate:g}"))  # Keras refuses an int
    line_end = "\r\n" if "\r\n" in text else "\n"
    new = f"{line_end if text and not text.endswith(chr(10)) else ''}train:learning_rate {number};{line_end}"
    write_whole(path, (text[:begin] + (new if added else number) + text[end:]).encode())
    return f"{path}:{text.count(chr(10), 0, begin) + 1}"


def checked_place(path: Path, text: str, name: str, own_rate: float) -> tuple[int, int]:
    """Return the place of the learning rate in a file, as ``place_of`` does, if its number is the optimizer's rate.

    Args:
        path: The user's file.
        text: Its text.
        name: The name of the app's class; unused for a model text.
        own_rate: The rate that the model's optimizer has now.

    Raises:
        ConfigError: The rate has no such place, or another place sets it.
    """
    begin, end = place_of(path, text, name)
    if begin != end and not math.isclose(float(text[begin:end]), own_rate, rel_tol=1e-5):
        raise ConfigError(
            f"{path} says learning_rate {text[begin:end]}, but the optimizer has {own_rate:g}, so another place sets it",
            hint="compile the model with self.learning_rate, or leave --write out",
        )
    return begin, end


def place_of(path: Path, text: str, name: str) -> tuple[int, int]:
    """Return the place of the learning rate in a file; an empty one where it is to be added.

    Args:
        path: The user's file.
        text: Its text.
        name: The name of the app's class; unused for a model text.

    Raises:
        ConfigError: The rate has no such place.
    """
    return place_in_text(path, text) if path.suffix == ".nnm" else place_in_class(path, text, name)


def place_in_class(path: Path, text: str, name: str) -> tuple[int, int]:
    """Return the place of the number that an app's class assigns to ``learning_rate``.

    Raises:
        ConfigError: The class assigns no number, or several.
    """
    mark = text.startswith("\ufeff")
    values = [
        value
        for node in ast.walk(ast.parse(text[mark:]))
        if isinstance(node, ast.ClassDef) and node.name == name
        for statement in node.body
        for value in _assigned(statement)
    ]
    if len(values) != 1 or not isinstance(values[0], ast.Constant) or isinstance(values[0].value, bool | str | None):
        raise ConfigError(
            f"{name} in {path} has no line learning_rate = NUMBER to write the rate to",
            hint="add one to the class, and compile the model with self.learning_rate",
        )
    (node,) = values
    lines = text[mark:].splitlines(keepends=True)
    at = mark + sum(map(len, lines[: node.lineno - 1]))
    line = lines[node.lineno - 1].encode()
    return at + len(line[: node.col_offset].decode()), at + len(line[: node.end_col_offset].decode())


def _assigned(node: ast.stmt) -> list[ast.expr]:
    """Return the value that a statement of a class assigns to ``learning_rate``, as a list of one or none."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    is_rate = any(isinstance(target, ast.Name) and target.id == "learning_rate" for target in targets)
    value = getattr(node, "value", None)
    return [value] if is_rate and isinstance(value, ast.expr) else []


def place_in_text(path: Path, text: str) -> tuple[int, int]:
    """Return the place of the learning rate in the block ``train`` of a model text; its end if the text has none.

    Raises:
        ConfigError: The optimizer has a schedule.
    """
    bare = COMMENT.sub(lambda match: " " * len(match[0]), text)
    if (statement := ALONE.search(bare)) is not None:
        return statement.span(1)
    if (optimizer := OPTIMIZER.search(bare)) is not None and "learning_rate" in optimizer[0]:
        numbers = list(IN_BRACKETS.finditer(bare, *optimizer.span()))
        if len(numbers) == 1:
            return numbers[0].span(1)
        raise ConfigError(
            f"the optimizer in {path} has no learning_rate=NUMBER to write the rate to",
            hint="scale its schedule yourself",
        )
    return len(text), len(text)
