"""Writes what follows from the code's own declarations: ``python docs/reference`` after a change of them."""

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

from ddlf import errors
from ddlf.algorithms.arrival import ARRIVAL
from ddlf.algorithms.clipping import CLIP
from ddlf.algorithms.codec import CODEC, Outward
from ddlf.algorithms.convergence import CONVERGE
from ddlf.algorithms.local_rules import LOCAL
from ddlf.algorithms.merge import MERGE
from ddlf.algorithms.multipliers import Freeze
from ddlf.algorithms.named import Family
from ddlf.algorithms.outer import OUTER
from ddlf.algorithms.partition import equal_sizes, sizes_by_speed
from ddlf.algorithms.partitioners import PARTITION
from ddlf.algorithms.push_rules import PUSHED
from ddlf.algorithms.rate_decay import RATE_DECAY
from ddlf.algorithms.schedules import PARTS
from ddlf.algorithms.staleness import STALENESS
from ddlf.cli.options import GROUPS
from ddlf.cluster.config.cluster_file import schema
from ddlf.events import KINDS
from ddlf.events.record import RoundRecord
from ddlf.extras.advice.report import explained
from ddlf.extras.advice.rule import CLASSES, SEVERITIES, Rule
from ddlf.extras.advice.rules import RULES as ADVICE
from ddlf.settings.setting import Group, Use
from ddlf.training import registry
from ddlf.training.registry import KINDS_OF_GROUPS, SETTINGS, option
from ddlf.training.strategies import shared

ROOT = Path(__file__).parents[2]


def settings() -> str:
    """The page of the settings."""
    more: dict[str, str] = {}
    modules = {base.__module__ for kind in KINDS_OF_GROUPS for base in kind.__mro__ if issubclass(base, Group)}
    for source in (registry, shared, *(sys.modules[name] for name in modules)):
        for part in ast.walk(ast.parse(inspect.getsource(source))):
            for line, text in pairwise(part.body if isinstance(part, ast.Module | ast.ClassDef) else ()):
                if isinstance(line, ast.AnnAssign) and isinstance(text, ast.Expr):
                    owner = part.name if isinstance(part, ast.ClassDef) else ""
                    more[f"{owner}.{line.target.id}"] = " ".join(text.value.value.split())
    texts = {}
    for kind in KINDS_OF_GROUPS:
        for one in kind.settings():
            own = next((f"{base.__name__}.{one.field}" for base in kind.__mro__ if one.field in vars(base)), "")
            text = more.get(own) or more.get(f".{one.field.upper()}", "")
            texts[one.name] = texts.get(one.name) or text
    texts |= {name: more[f"._{name.upper()}"] for name in ("mode", "exchange")}
    sections = [
        "\n".join([f"## {title.capitalize()}\n", *(_setting(name, texts[name]) for name in names)])
        for title, names in GROUPS.items()
    ]
    return "\n".join([HEAD, *sections])


def _setting(name: str, more: str) -> str:
    setting = SETTINGS[name]
    usual = setting.default
    values = inspect.getdoc(setting.check) if inspect.isfunction(setting.check) else str(setting.check)
    facts = [f"default `{usual!r}`", values]
    if setting.flag is not None:
        facts.append(f"`{option(name)}{' ' * bool(setting.flag)}{setting.flag}`")
    if Use.FILE in setting.use:
        facts.append("in `run:`")
    if Use.FACT in setting.use:
        facts.append("compared with a checkpoint")
    if setting.strategies:
        facts.append(f"{' and '.join(setting.strategies)} only")
    text = f"{setting.help[0].upper()}{setting.help[1:]}. {more}".strip().replace("``", "`")
    return f"### {name}\n\n{text}\n\n*{'; '.join(facts)}*\n".replace("``", "`")


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


def tree_of_errors() -> str:
    """The page of the errors."""
    drawn = re.search(r"::\n\n(.*?)\n\n(?=\S)", inspect.getdoc(errors), re.DOTALL)[1]
    kinds = [getattr(errors, name) for name in errors.__all__]
    codes = [
        f"| {code} | {what} | {', '.join(f'`{kind.__name__}`' for kind in kinds if kind.exit_code == code)} |"
        for code, what in EXIT_CODES.items()
    ]
    table = "\n".join(["| code | means | errors |", "|---|---|---|", *codes])
    return "\n".join([ERRORS.format(tree=inspect.cleandoc(drawn), codes=table), *map(_error, kinds)]).rstrip() + "\n"


def _error(kind: type) -> str:
    sections = dict(_sections(kind))
    also = ", ".join(
        f"`{base.__name__}`" for base in kind.__mro__[1:] if base not in (Exception, BaseException, object)
    )
    parts = [f"## {kind.__name__}", f"*exit code {kind.exit_code}{f'; is also {also}' if also else ''}*", sections[""]]
    if todo := sections.get("What to do"):
        parts.append(f"**What to do**: {todo}")
    if facts := "\n".join(sections[name] for name in ("Args", "Attributes") if name in sections):
        parts.append(_table("fact", facts))
    return "\n\n".join(parts) + "\n"


def rules() -> str:
    """The page of the rules."""
    return (
        "\n".join([RULES, *(part for name, text in FAMILIES.items() for part in _family(name, *text))]).rstrip() + "\n"
    )


def _family(name: str, text: str, found: "Family | dict[str, object]") -> Iterator[str]:
    yield f"## {name}\n\n{text}\n"
    other_names: list[tuple[str, str]] = []
    if isinstance(found, Family):
        family, found = found, {}
        for rule in family.names:
            written = str(family.read(rule))
            if written in found:
                other_names.append((rule, written))
            found[written] = type(family.read(rule))
    seen: dict[object, str] = {}
    for written, kind in found.items():
        if first := seen.get(kind):
            yield f"### `{written}`\n\nAs `{first}`, with these parameters.\n"
            continue
        seen[kind] = written
        sections = dict(_sections(kind))
        parts = [f"### `{written}`", sections[""]]
        if "Args" in sections and inspect.isclass(kind):
            parts.append(_table("parameter", sections["Args"]))
        if "Source" in sections:
            parts.append(f"*Source: {sections['Source']}*")
        yield "\n\n".join(parts) + "\n"
    for rule, written in other_names:
        yield f"### `{rule}`\n\nAnother name of `{written}`, which is what is stored and compared.\n"


def advice() -> str:
    """Return the page of the adviser's rules: a table for each class, then each rule under a heading of its name."""
    parts = [ADVICE_HEAD]
    for letter, name in CLASSES.items():
        rules = [rule for rule in ADVICE if rule.id[0] == letter]
        rows = [
            f"| [{rule.id}](#{rule.id.lower()}) | {SEVERITIES[rule.severity]} | {rule.level} | {rule.title} |"
            for rule in rules
        ]
        parts.append("\n".join([f"## {name}\n", "| rule | severity | level | what |", "|---|---|---|---|", *rows, ""]))
        parts += [_advice(rule) for rule in rules]
    return "\n".join(parts)


def _advice(rule: Rule) -> str:
    """What ``ddlf advise --explain`` prints, below a heading that can be linked to."""
    head, _, body = explained(rule).partition("\n")
    title = head.partition(": ")[2]
    return f"### {rule.id}\n\n{title[0].upper()}{title[1:]}\n{body}"


def _sections(thing: object) -> Iterator[tuple[str, str]]:
    """The docstring's text, under no name, and its sections, in Markdown."""
    head, *rest = re.split(
        r"^(Args|Attributes|Raises|Returns|Source|What to do):\n", inspect.getdoc(thing), flags=re.MULTILINE
    )
    yield "", _markdown(head)
    for name, text in zip(rest[::2], rest[1::2], strict=True):
        yield name, _markdown(inspect.cleandoc(text))


def _markdown(text: str) -> str:
    """A docstring's text, whose blocks of code follow two colons."""
    text = re.sub(r"(?<=\d)\*\*(?=-?\d)", r"\\*\\*", text)  # powers, not bold type
    return re.sub(
        r"::\n\n((?: {4}.*\n|\n)+)",
        lambda block: f":\n\n```text\n{inspect.cleandoc(block[1])}\n```\n\n",
        f"{text.strip()}\n".replace("``", "`"),
    ).strip()


def _table(what: str, text: str) -> str:
    """The entries of a section as a table."""
    rows = [
        f"| `{name}` | {' '.join(said.split())} |"
        for name, said in re.findall(r"^(\w+): (.*(?:\n .*)*)", text, re.MULTILINE)
    ]
    return "\n".join([f"| {what} | what |", "|---|---|", *rows])


HEAD = """\
# Settings

Made from `ddlf/training/spec.py` and the packages of the strategies by `python docs/reference`.

Settings are attributes of an app. Those of the object override those of its class. `run:` in cluster.yaml overrides
both, and options of `ddlf run` and arguments of `train_sync` override all; `-p NAME=VALUE` sets any of them.
`ddlf config show app.py --origin` shows which values a run would use, and where they come from. All settings are
checked before anything is connected or started, and a setting without effect is refused. The groups are those of
`ddlf run --help-all`; `ddlf run --help downpour` shows one of them.
"""
EVENTS = """\
# Events

Made from `ddlf/events/` by `python docs/reference`.

What happens in a run is told as values, to all that `app.subscribe(sink)` was called with, in the order in which it happens, on the master. Those on
workers as such, from `WorkerConnected` on, go to all that `cluster.subscribe(sink)` was called with, and to the app's during its run. Rounds, slots
and workers count from 1. `ddlf.events.sinks.to_json` and `from_json` turn each into JSON data and back; numbers that JSON lacks are the
texts `"NaN"`,
`"Infinity"` and `"-Infinity"`. An event tells no time: who wants it takes it when the event comes.
"""


ERRORS = """\
# Errors

Made from `ddlf/errors` by `python docs/reference`. `ddlf help WorkerLost` prints the same in the terminal.

All errors of DDLF are in one tree; each is also of a class of Python that people would catch, which is in brackets:

```text
{tree}
```

The text of each says what happened, where, and what to do next; `.message`, `.hint` and `.worker` are its parts. What a method or an app raised on a
worker can be caught as what it is (`except ValueError`); what several workers raised is told once, and `.others` has the errors of the others.

`ddlf run` shows your own lines, those of the worker last; with `-v` also those of DDLF, Keras and other libraries. What it ends with:

{codes}
"""
EXIT_CODES = {
    0: "finished",
    1: "the app raised, or training failed",
    2: "wrong usage or configuration",
    3: "could not start: cannot listen, or workers cannot be reached or are used by others",
    4: "refused: another token or version",
    5: "workers were lost",
    6: "out of time",
    7: "a checkpoint or a data set was refused",
    130: "Ctrl-C",
    141: "nobody reads the output any more",
    143: "SIGTERM",
}
RULES = """\
# Rules

Made from `ddlf/algorithms` by `python docs/reference`.

How updates travel, are merged and change the weights is said by rules. Each is a text, as it is given to a setting, an option or `run:` of
cluster.yaml, stored in checkpoints and compared: `trimmed:beta=0.2`, for short `trimmed:0.2`; parameters that are left out have the values that are
shown here. In a program a rule can be an object, too: `merge = ddlf.algorithms.merge.TrimmedMean(beta=0.2)`.

Words: an *update* is the weights before local training minus those after it; *g* is the merged one; a *slot* is one of the parts of a round.
"""
FAMILIES: dict[str, tuple[str, Family | dict[str, object]]] = {
    "merge": ("Many updates become one. For synchronous training.", MERGE),
    "outer": ("The merged update changes the weights. By default it is subtracted.", OUTER),
    "arrival": ("One update that has arrived changes the weights. For asynchronous training.", ARRIVAL),
    "staleness": (
        "How much an update counts whose weights others have changed meanwhile. For asynchronous training.",
        STALENESS,
    ),
    "push_rule": ("A gradient that was pushed to a shard changes its values. For Downpour SGD.", PUSHED),
    "local_rule": ("What local training adds to its gradients, so that slots do not drift apart.", LOCAL),
    "codec": ("Updates are made smaller on their way to the master.", CODEC),
    "weights_codec": (
        "So are weights on their way to the workers: by a codec that is not biased, or by any after `delta:`.",
        {"delta:float32": Outward},
    ),
    "partition": (
        "Whose each sample is. All but `equal` say it for the whole run, for studies of data that differ.",
        PARTITION,
    ),
    "converge": ("When training has come far enough to stop.", CONVERGE),
    "schedule": (
        "How the learning rate goes over the run, in fractions of it: one course, also behind a warm-up.",
        PARTS,
    ),
    "clip": ("How gradients are clipped, beside what Keras's optimizers do.", CLIP),
    "multipliers": (
        "How long the steps of weights are: of the first layers none, or by the names of layers, as in `body=0.1,head/bias=2`.",
        {"freeze:0.75": Freeze},
    ),
    "rate_decay": ("How the learning rate falls with what epochs have come to.", RATE_DECAY),
    "balance": ("How many samples each slot gets.", {"equal": equal_sizes, "speed": sizes_by_speed}),
}
ADVICE_HEAD = """\
# Rules of the adviser

Made from `ddlf/extras/advice` by `python docs/reference`. `ddlf advise --explain L02` prints one rule in the
terminal. [Advice before training](../howto/advice.md) shows how to use them.
"""
PAGES = {
    ROOT / "docs/reference/advice.md": advice,
    ROOT / "docs/reference/errors.md": tree_of_errors,
    ROOT / "docs/reference/events.md": events,
    ROOT / "docs/reference/rules.md": rules,
    ROOT / "docs/reference/settings.md": settings,
    ROOT / "ddlf/cluster/config/cluster.schema.json": lambda: json.dumps(schema(), indent=2) + "\n",
}

if __name__ == "__main__":
    for path, text in PAGES.items():
        path.write_text(text(), encoding="utf-8")
