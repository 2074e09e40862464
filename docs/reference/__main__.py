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
            yield f"### `{written}`\n\nThe same rule as `{first}`, with these parameters.\n"
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
        yield f"### `{rule}`\n\nAnother name of `{written}`, which checkpoints store and compare.\n"


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

Settings are attributes of an app. Later rows of this table override earlier ones:

| place | example |
|---|---|
| the class of the app | `batch_size = 128` |
| the object | `app.batch_size = 128` |
| `run:` in cluster.yaml | `run: {batch_size: 128}` |
| options of `ddlf run`, arguments of `train_sync` | `--batch-size 128`, `-p batch_size=128` |

`ddlf config show app.py --origin` shows the values of a run and their origins. DDLF checks all settings before it
connects or starts anything, and refuses a setting without effect. The groups are the same as in `ddlf run --help-all`;
`ddlf run --help downpour` shows one of them.
"""
EVENTS = """\
# Events

Made from `ddlf/events/` by `python docs/reference`.

An event is a value that reports something that has happened. The master emits events in the order in which they happen:

| subscribe with | receives |
|---|---|
| `app.subscribe(sink)` | all events of the app's runs |
| `cluster.subscribe(sink)` | events of the cluster and its workers, from `WorkerConnected` on, also without a run |

Rounds, slots and workers count from 1. Events have no time, so take the time when a sink receives one.
`ddlf.events.sinks.to_json` and `from_json` convert events to JSON data and back. NaN and the infinities become the
texts `"NaN"`, `"Infinity"` and `"-Infinity"`.
"""


ERRORS = """\
# Errors

Made from `ddlf/errors` by `python docs/reference`. `ddlf help WorkerLost` prints the same in the terminal.

All errors of DDLF form one tree. The class in brackets is the Python class that each of them also belongs to:

```text
{tree}
```

The text of an error says what happened, where, and what to do next. Its parts are `.message`, `.hint` and `.worker`.

If a method or an app raises an error on a worker, you can catch the original class (`except ValueError`). If several
workers raise, you catch the first error, and `.others` has the remaining ones.

`ddlf run` shows only your own lines, the lines of the worker last. With `-v` it also shows the lines of DDLF, Keras and
other libraries. Its exit codes are:

{codes}
"""
EXIT_CODES = {
    0: "finished",
    1: "the app raised, or training failed",
    2: "wrong usage or configuration",
    3: "could not start: the port is taken, or workers cannot be reached or belong to another run",
    4: "refused: another token or version",
    5: "workers were lost",
    6: "out of time",
    7: "a checkpoint or a data set was refused",
    130: "Ctrl-C",
    141: "the reader of the output has closed it",
    143: "SIGTERM",
}
RULES = """\
# Rules

Made from `ddlf/algorithms` by `python docs/reference`.

Rules decide how updates travel, how they are merged, and how they change the weights. A rule is a text, such as
`trimmed:beta=0.2`, or `trimmed:0.2` for short. You give it to a setting, to an option, or to `run:` of cluster.yaml.
Missing parameters have the values on this page. Checkpoints store the text and compare it. In a program, a rule can
also be an object: `merge = ddlf.algorithms.merge.TrimmedMean(beta=0.2)`.

An *update* is the weights before local training minus the weights after it. *g* is the merged update. A *slot* is one
part of a round.
"""
FAMILIES: dict[str, tuple[str, Family | dict[str, object]]] = {
    "merge": ("Many updates become one. For synchronous training.", MERGE),
    "outer": ("The merged update changes the weights. By default it is subtracted.", OUTER),
    "arrival": ("One update that has arrived changes the weights. For asynchronous training.", ARRIVAL),
    "staleness": (
        "How much an update counts if the weights have changed since its slot read them. For asynchronous training.",
        STALENESS,
    ),
    "push_rule": ("A pushed gradient changes the values of a server. For Downpour SGD.", PUSHED),
    "local_rule": ("A correction that local training adds to its gradients, so that slots do not drift apart.", LOCAL),
    "codec": ("Makes updates smaller on their way to the master.", CODEC),
    "weights_codec": (
        "Makes weights smaller on their way to the workers: an unbiased codec, or any codec after `delta:`.",
        {"delta:float32": Outward},
    ),
    "partition": (
        "Assigns samples to slots: `equal` again in each round, the others once for the whole run, for studies of data that differ.",
        PARTITION,
    ),
    "converge": ("When training stops before its last epoch.", CONVERGE),
    "schedule": (
        "How the learning rate changes over the run, in fractions of the run, with or without a warm-up.",
        PARTS,
    ),
    "clip": ("How gradients are clipped, in addition to Keras's optimizers.", CLIP),
    "multipliers": (
        "Factors of the steps: zero for the first layers, or by the names of layers, such as `body=0.1,head/bias=2`.",
        {"freeze:0.75": Freeze},
    ),
    "rate_decay": ("How the learning rate falls, by the results of the epochs.", RATE_DECAY),
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
