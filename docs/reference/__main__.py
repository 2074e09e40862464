"""Writes what follows from the code's own declarations: ``python docs/reference`` after a change of them."""

import argparse
import ast
import inspect
import json
import re
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path

import shtab

from ddlf.cli import verbs
from ddlf.cli.completion import FOLDER as COMPLETIONS
from ddlf.cli.completion import SHELLS
from ddlf.config.models import schema
from ddlf.events import KINDS
from ddlf.record import RoundRecord
from ddlf.settings import SETTINGS, Settings, Use, option

ROOT = Path(__file__).parents[2]


def settings() -> str:
    """The page of the settings."""
    body = ast.parse(inspect.getsource(Settings)).body[0].body
    more = {
        line.target.id: " ".join(text.value.value.split())
        for line, text in pairwise(body)
        if isinstance(line, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    return "\n".join([HEAD, *(_setting(name, more.get(name, "")) for name in SETTINGS)])


def _setting(name: str, more: str) -> str:
    setting, usual = SETTINGS[name], getattr(Settings, name)
    values = inspect.getdoc(setting.check) if inspect.isfunction(setting.check) else str(setting.check)
    facts = [f"default `{usual!r}`", values]
    if setting.flag is not None:
        facts.append(f"`{option(name)}{' ' * bool(setting.flag)}{setting.flag}`")
    if Use.FILE in setting.use:
        facts.append("in `run:`")
    if Use.FACT in setting.use:
        facts.append("compared with a checkpoint")
    if setting.only:
        facts.append(f"{setting.only} only")
    text = f"{setting.help[0].upper()}{setting.help[1:]}. {more}".strip().replace("``", "`")
    return f"## {name}\n\n{text}\n\n*{'; '.join(facts)}*\n".replace("``", "`")


def events() -> str:
    """The page of the events."""
    return "\n".join([EVENTS, *map(_facts, KINDS.values()), _facts(RoundRecord)]).rstrip() + "\n"


def _facts(kind: type) -> str:
    """When it comes, and a table of its facts, those of its bases first."""
    texts = {}
    for cls in reversed(kind.__mro__):
        arguments = inspect.getdoc(cls).partition("Args:\n")[2]
        texts |= re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    rows = [
        f"| `{field.name}` | {field.type.replace(' |', ' or')} | {' '.join(texts[field.name].split())} |"
        for field in fields(kind)
    ]
    when = inspect.getdoc(kind).partition("Args:")[0].strip()
    head = f"## {kind.__name__}\n\n{when}\n\n| fact | type | what |\n|---|---|---|"
    return "\n".join([head, *rows, ""]).replace("``", "`")


HEAD = """\
# Settings

Made from `ddlf/settings.py` by `python docs/reference`.

Settings are attributes of an app's class or object. Those of the object win over those of the class, `run:` of cluster.yaml over both, and options of
`ddlf run` and arguments of `train_sync` over all; `-p NAME=VALUE` sets any of them. `ddlf config show app.py --origin` says which values a run would
have, and from where. All are checked before anything is connected or started, and what a mode has no use for is refused.
"""
EVENTS = """\
# Events

Made from `ddlf/events/` by `python docs/reference`.

What happens in a run is told as values, to all that `app.subscribe(sink)` was called with, in the order in which it happens, on the master. Those on
workers as such, from `WorkerConnected` on, go to all that `cluster.subscribe(sink)` was called with, and to the app's during its run. Rounds, slots
and workers count from 1. `ddlf.sinks.to_json` and `from_json` turn each into JSON data and back; numbers that JSON lacks are the texts `"NaN"`,
`"Infinity"` and `"-Infinity"`. An event tells no time: who wants it takes it when the event comes.
"""


def completion(shell: str) -> str:
    """The script for a shell, with files where a path is wanted."""
    top = verbs.parser()
    parsers = [top]
    for parser in parsers:
        for action in parser._actions:
            if action.type is Path:
                action.complete = shtab.FILE
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return shtab.complete(top, shell)


PAGES = {
    ROOT / "docs/reference/events.md": events,
    ROOT / "docs/reference/settings.md": settings,
    **{COMPLETIONS / f"ddlf.{shell}": partial(completion, shell) for shell in SHELLS},
    ROOT / "ddlf/cluster.schema.json": lambda: json.dumps(schema(), indent=2) + "\n",
}

if __name__ == "__main__":
    for path, text in PAGES.items():
        path.write_text(text(), encoding="utf-8")
