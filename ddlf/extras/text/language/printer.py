"""Writes a model text in the standard form: one statement per line, long ones with one layer per line. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ddlf.extras.text.language.model import statements
from ddlf.extras.text.language.values import Arg, Call, Items, Number, Statement, String, Value, Word

WIDTH = 100
"""Maximum characters of a statement in one line."""
INDENT = " " * 4


def format(text: str | bytes, file: str = "model.nnm") -> str:
    """Return a model text in the standard form, with its comments. Formatting twice gives the same text.

    Raises:
        NotationError: A statement cannot be read.
    """
    _, parsed, problems = statements(text, file)
    problems.check()
    lines = [line for statement in parsed.statements for line in _statement(statement)]
    lines += list(_comments(parsed.comments_below))
    return "".join(f"{line}\n" for line in lines).lstrip("\n")


def changed(text: str, values: Mapping[tuple[str, str], str], *, without: str = "") -> str:
    """Return a model text in the standard form with some values replaced. Missing statements are added at the end.

    Args:
        text: A text without errors.
        values: The new values, by block and property.
        without: A block to leave out, together with all comments, to compare texts by their meaning.
    """
    _, parsed, _ = statements(text, "")
    remaining: dict[tuple[str, str], str] = dict(values)
    lines: list[str] = []
    for statement in parsed.statements:
        key_path = statement.block.name, statement.property.name
        if key_path in remaining:
            statement = replace(statement, items=_items(*key_path, remaining.pop(key_path)))
        if not without:
            lines += _statement(statement)
        elif statement.block.name != without:
            lines += _statement(replace(statement, comments_above=(), comment_beside="", gap=False))
    for (block, key), value in remaining.items():
        lines += _statement(Statement(Word(block, 0), Word(key, 0), _items(block, key, value), 0))
    if not without:
        lines += _comments(parsed.comments_below)
    return "".join(f"{line}\n" for line in lines).lstrip("\n")


def _items(block: str, key: str, value: str) -> tuple[tuple[Arg, ...], ...]:
    _, parsed, problems = statements(f"{block}:{key} {value};", key)
    problems.check()
    return parsed.statements[0].items


def _statement(statement: Statement) -> Iterator[str]:
    yield from _comments(statement.comments_above)
    if statement.gap:
        yield ""
    head = f"{statement.block.name}:{statement.property.name}"
    items = [" ".join(map(_arg, args)) for args in statement.items]
    comment = f"  {statement.comment_beside}" if statement.comment_beside else ""
    line = f"{head} {', '.join(items)}".rstrip() + ";"
    if len(line) <= WIDTH or len(items) < 2:
        yield line + comment
        return
    yield head
    yield from (f"{INDENT}{item}," for item in items[:-1])
    yield f"{INDENT}{items[-1]};{comment}"


def _comments(comments: tuple[str, ...]) -> Iterator[str]:
    for comment in comments:
        if comment.startswith("\n"):
            yield ""
        yield comment.strip()


def _arg(arg: Arg) -> str:
    return f"{arg.key}={spelled(arg.value)}" if arg.key else spelled(arg.value)


def spelled(value: Value) -> str:
    """Return a value in the notation of a model text."""
    if isinstance(value, Number):
        return value.written
    if isinstance(value, String):
        return '"' + value.value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, Items):
        return f"[{', '.join(map(spelled, value.values))}]"
    # the value is a word, or a tensor with a name
    return f"{value.name}({', '.join(map(_arg, value.args))})" if isinstance(value, Call) else value.name
