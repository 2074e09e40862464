"""Write the generated reference pages and the schema of cluster.yaml: ``python docs/reference``.

The pages come from declarations and docstrings in the code, so run it after you changed a setting, an event, an error or
a rule.
"""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the code beside this program, even if another checkout is installed

from ddlf import errors  # noqa: E402
from ddlf.algorithms.arrival import ARRIVAL  # noqa: E402
from ddlf.algorithms.clipping import CLIP  # noqa: E402
from ddlf.algorithms.codec import CODEC, Outward  # noqa: E402
from ddlf.algorithms.convergence import CONVERGE  # noqa: E402
from ddlf.algorithms.local_rules import LOCAL  # noqa: E402
from ddlf.algorithms.merge import MERGE  # noqa: E402
from ddlf.algorithms.multipliers import Freeze  # noqa: E402
from ddlf.algorithms.outer import OUTER  # noqa: E402
from ddlf.algorithms.partition import equal_sizes, sizes_by_speed  # noqa: E402
from ddlf.algorithms.partitioners import PARTITION  # noqa: E402
from ddlf.algorithms.push_rules import PUSHED  # noqa: E402
from ddlf.algorithms.rate_decay import RATE_DECAY  # noqa: E402
from ddlf.algorithms.rule_text import Family  # noqa: E402
from ddlf.algorithms.schedules import PARTS  # noqa: E402
from ddlf.algorithms.staleness import STALENESS  # noqa: E402
from ddlf.cli.options import GROUPS  # noqa: E402
from ddlf.cluster.config.cluster_file import schema  # noqa: E402
from ddlf.events import KINDS  # noqa: E402
from ddlf.events.record import RoundRecord  # noqa: E402
from ddlf.extras.advice.report import explained  # noqa: E402
from ddlf.extras.advice.rule import CLASSES, SEVERITIES, Rule  # noqa: E402
from ddlf.extras.advice.rules import RULES as ADVICE  # noqa: E402
from ddlf.peers.browser import supported  # noqa: E402
from ddlf.privacy import contradictions, visible  # noqa: E402
from ddlf.settings.setting import Group, Use  # noqa: E402
from ddlf.training import registry, strategy  # noqa: E402
from ddlf.training.registry import KINDS_OF_GROUPS, SETTINGS, option  # noqa: E402


def settings() -> str:
    """Return the page of the settings."""
    texts_of_source: dict[str, str] = {}
    modules = {base.__module__ for kind in KINDS_OF_GROUPS for base in kind.__mro__ if issubclass(base, Group)}
    for source in (registry, strategy, *(sys.modules[name] for name in modules)):
        for part in ast.walk(ast.parse(inspect.getsource(source))):
            for line, text in pairwise(part.body if isinstance(part, ast.Module | ast.ClassDef) else ()):
                if isinstance(line, ast.AnnAssign) and isinstance(text, ast.Expr):
                    owner = part.name if isinstance(part, ast.ClassDef) else ""
                    texts_of_source[f"{owner}.{line.target.id}"] = " ".join(text.value.value.split())
    texts = {}
    for kind in KINDS_OF_GROUPS:
        for setting in kind.settings():
            key = next((f"{base.__name__}.{setting.field}" for base in kind.__mro__ if setting.field in vars(base)), "")
            text = texts_of_source.get(key) or texts_of_source.get(f".{setting.field.upper()}", "")
            texts[setting.name] = texts.get(setting.name) or text
    texts |= {name: texts_of_source[f"._{name.upper()}"] for name in ("mode", "exchange")}
    kinds = [f"``{name}``: {' '.join(inspect.getdoc(kind).split())}" for name, kind in registry.EXCHANGES.items()]
    texts["exchange"] = "\n\n".join([texts["exchange"], *kinds])
    sections = [
        "\n".join([f"## {title.capitalize()}\n", *(_setting(name, texts[name]) for name in names)])
        for title, names in GROUPS.items()
    ]
    return "\n".join([HEAD, *sections])


def _setting(name: str, description: str) -> str:
    setting = SETTINGS[name]
    usual = setting.default
    values = inspect.getdoc(setting.accepts) if inspect.isfunction(setting.accepts) else str(setting.accepts)
    facts = [f"Default: `{usual!r}`", f"Value: {values}"]
    if setting.flag is not None:
        facts.append(f"Option: `{option(name)}{' ' * bool(setting.flag)}{setting.flag}`")
    if Use.FILE in setting.use:
        facts.append("Can stand under `run:` in cluster.yaml")
    if Use.FACT in setting.use:
        facts.append("A resumed run needs the value of its checkpoint")
    if setting.strategies:
        facts.append(f"Only for {' and '.join(setting.strategies)}")
    text = f"{setting.help[0].upper()}{setting.help[1:]}. {description}".strip().replace("``", "`")
    return f"### {name}\n\n{text}\n\n*{'. '.join(facts)}.*\n".replace("``", "`")


def events() -> str:
    """Return the page of the events."""
    return "\n".join([EVENTS, *map(_facts, KINDS.values()), _facts(RoundRecord)]).rstrip() + "\n"


def _facts(kind: type) -> str:
    """Return the text of an event class and a table of its fields. Fields of base classes come first."""
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
    """Return the page of the errors."""
    drawn = re.search(r"::\n\n(.*?)\n\n(?=\S)", inspect.getdoc(errors), re.DOTALL)[1]
    kinds = [getattr(errors, name) for name in errors.__all__]
    codes = [
        f"| {code} | {meaning} | {', '.join(f'`{kind.__name__}`' for kind in kinds if kind.exit_code == code)} |"
        for code, meaning in EXIT_CODES.items()
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
    """Return the page of the rules of learning."""
    return (
        "\n".join([RULES, *(part for name, text in FAMILIES.items() for part in _family(name, *text))]).rstrip() + "\n"
    )


def _family(name: str, text: str, rules: "Family | dict[str, object]") -> Iterator[str]:
    yield f"## {name}\n\n{text}\n"
    other_names: list[tuple[str, str]] = []
    if isinstance(rules, Family):
        family, rules = rules, {}
        for rule in family.names:
            written = str(family.read(rule))
            if written in rules:
                other_names.append((rule, written))
            rules[written] = type(family.read(rule))
    first_names: dict[object, str] = {}
    for written, kind in rules.items():
        if first := first_names.get(kind):
            yield f"### `{written}`\n\nThe same rule as `{first}`, with these parameters.\n"
            continue
        first_names[kind] = written
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
    """Return what ``ddlf advise --explain`` prints, below a heading that other pages can link to."""
    head, _, body = explained(rule).partition("\n")
    title = head.partition(": ")[2]
    return f"### {rule.id}\n\n{title[0].upper()}{title[1:]}\n{body}"


def _sections(documented: object) -> Iterator[tuple[str, str]]:
    """Yield the sections of a docstring as names and Markdown texts. The text before the first section has no name."""
    head, *sections = re.split(
        r"^(Args|Attributes|Raises|Returns|Source|What to do):\n", inspect.getdoc(documented), flags=re.MULTILINE
    )
    yield "", _markdown(head)
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        yield name, _markdown(inspect.cleandoc(text))


def _markdown(text: str) -> str:
    """Return the text of a docstring as Markdown. Two colons before an indented block mark it as code."""
    text = re.sub(r"(?<=\d)\*\*(?=-?\d)", r"\\*\\*", text)  # powers, not bold type
    return re.sub(
        r"::\n\n((?: {4}.*\n|\n)+)",
        lambda block: f":\n\n```text\n{inspect.cleandoc(block[1])}\n```\n\n",
        f"{text.strip()}\n".replace("``", "`"),
    ).strip()


def _table(title: str, text: str) -> str:
    """Return the entries of a docstring's section as a Markdown table."""
    rows = [
        f"| `{name}` | {' '.join(description.split())} |"
        for name, description in re.findall(r"^(\w+): (.*(?:\n .*)*)", text, re.MULTILINE)
    ]
    return "\n".join([f"| {title} | what |", "|---|---|", *rows])


HEAD = """\
# Settings

`python docs/reference` writes this page from `ddlf/training/spec.py` and the packages of the strategies.

Settings are attributes of an app. Later rows of this table override earlier ones:

| place | example |
|---|---|
| the class of the app | `batch_size = 128` |
| the object | `app.batch_size = 128` |
| `run:` in cluster.yaml | `run: {batch_size: 128}` |
| options of `ddlf run`, arguments of `train_sync` | `--batch-size 128`, `-p batch_size=128` |

`ddlf config show app.py --origin` shows the values of a run and their origins. DDLF checks all settings before it
connects or starts anything, and refuses a setting without effect. This page has the same groups as `ddlf run --help-all`.
`ddlf run --help downpour` prints one group.
"""
EVENTS = """\
# Events

`python docs/reference` writes this page from `ddlf/events`.

An event is a value that reports something that has happened. The master emits events in the order in which they happen:

| subscribe with | receives |
|---|---|
| `app.subscribe(sink)` | all events of the app's runs |
| `cluster.subscribe(sink)` | events of the cluster and its workers, from `WorkerConnected` on, also without a run |

Rounds, slots and workers count from 1. An event does not contain the time. A sink can read the clock when it receives the event.
`ddlf.events.sinks.to_json` and `from_json` convert events to JSON data and back. NaN and the infinities become the
texts `"NaN"`, `"Infinity"` and `"-Infinity"`.
"""


ERRORS = """\
# Errors

`python docs/reference` writes this page from `ddlf/errors`. `ddlf help WorkerLost` prints one error in the terminal.

All errors of DDLF form one tree. Many errors also derive from a built-in class of Python, which is in brackets:

```text
{tree}
```

The text of an error says what happened, where, and what to do next. Its parts are `.message`, `.hint` and `.worker`.

If a method or an app raises an error on a worker, you can catch the original class (`except ValueError`). If several
workers raise, you catch the first error, and `.others` has the remaining ones.

The traceback that `ddlf run` prints has only lines of your own files, and the worker's lines come last. With `-v` it
also has the lines of DDLF, Keras and other libraries. Its exit codes are:

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

`python docs/reference` writes this page from `ddlf/algorithms`.

Rules decide how updates travel, how they are merged, and how they change the weights. A rule is a text, such as
`trimmed:beta=0.2`, or `trimmed:0.2` for short. You give it to a setting, to an option, or to `run:` of cluster.yaml.
Missing parameters have the values on this page. Checkpoints store the text and compare it. In a program, a rule can
also be an object: `merge = ddlf.algorithms.merge.TrimmedMean(beta=0.2)`.

An *update* is the weights before local training minus the weights after it. *g* is the merged update. A *slot* is one
part of a round.
"""
FAMILIES: dict[str, tuple[str, Family | dict[str, object]]] = {
    "merge": ("A merge rule turns the updates of all slots into one update, in synchronous training.", MERGE),
    "outer": ("An outer optimizer applies the merged update to the weights. The default subtracts it.", OUTER),
    "arrival": (
        "An arrival rule applies a single update to the weights when it arrives, in asynchronous training.",
        ARRIVAL,
    ),
    "staleness": (
        "A staleness rule gives the factor of a stale update, in asynchronous training. An update is stale if the weights "
        "have changed since its slot read them.",
        STALENESS,
    ),
    "push_rule": ("A push rule applies a pushed gradient to the values of a server, in Downpour SGD.", PUSHED),
    "local_rule": ("A local rule corrects the gradients of local training, so that slots do not drift apart.", LOCAL),
    "codec": ("A codec makes updates smaller on their way to the master.", CODEC),
    "weights_codec": (
        "This codec makes weights smaller on their way to the workers. It is an unbiased codec, or `delta:` and any codec.",
        {"delta:float32": Outward},
    ),
    "partition": (
        "A partition assigns samples to slots. `equal` does so again in each round. The others do so once for the whole run, to "
        "study slots with different data.",
        PARTITION,
    ),
    "converge": ("A convergence rule decides when training stops before its last epoch.", CONVERGE),
    "schedule": (
        "A schedule changes the learning rate over the run, with or without a warm-up. Its numbers are fractions of the run.",
        PARTS,
    ),
    "clip": ("A clipping rule shortens long gradients, in addition to the clipping of Keras's optimizers.", CLIP),
    "multipliers": (
        "Multipliers scale the steps of layers. They freeze the first layers, or name layers, as in `body=0.1,head/bias=2`.",
        {"freeze:0.75": Freeze},
    ),
    "rate_decay": ("A decay rule lowers the learning rate according to the results of the epochs.", RATE_DECAY),
    "balance": (
        "This setting decides how many samples each slot gets.",
        {"equal": equal_sizes, "speed": sizes_by_speed},
    ),
}
BROWSER_HEAD = """\
# Models that browsers train

`python docs/reference` writes this page from `ddlf/peers/browser/supported.py`. The same table
refuses other models.

A browser trains a compiled Sequential or functional Keras model in float32, also with nested models, shared layers, and
several inputs and outputs. Tests compare each row with Keras on TensorFlow: results, losses and weights after a step
are equal within 1e-5. Weights may have the regularizers `L1`, `L2` and `L1L2`.

Anything else is refused by name before a server starts: other layers, losses and optimizers, own classes and functions,
`Lambda`, constraints, masks, stateful layers, inputs of open size, and other values of arguments.

A browser differs from Keras in this:

- **Random numbers.** `Dropout` has the peer's own random numbers. The seed of a layer has no effect.
- **Ties.** The first one of equal maxima in a window takes the gradient. The slope of `relu` at 0 is 0. So does
  Keras on TensorFlow; its other backends may differ.
- **Recurrent layers** are unrolled. The first batch of a long sequence takes seconds.
- **Embedding** costs time in proportion to its number of rows while it trains.
"""
BROWSER = {
    "Layers": supported.LAYERS,
    "Losses": supported.LOSSES,
    "Metrics": supported.METRICS,
    "Optimizers": supported.OPTIMIZERS,
    "Learning rates": supported.RATES,
}


def browser() -> str:
    """Return the page of what browsers train."""
    lines = [BROWSER_HEAD]
    for title, table in BROWSER.items():
        lines += [f"## {title}\n", "| class | arguments with one value |", "|---|---|"]
        for name, row in table.items():
            only = ", ".join(f"`{key}={value!r}`" for key, value in row.only.items())
            lines.append(f"| `{name}` | {only} |")
        lines.append("")
    names = ", ".join(f"`{name}`" for name in supported.ACTIVATIONS)
    wrapped = textwrap.fill(f"{names}.", 120, break_long_words=False, break_on_hyphens=False)
    lines += ["## Activations\n", wrapped, ""]
    lines += ["The metric `accuracy` is the one that Keras chooses by the shapes of labels and predictions.", ""]
    return "\n".join(lines)


ADVICE_HEAD = """\
# Rules of the adviser

`python docs/reference` writes this page from `ddlf/extras/advice`. `ddlf advise --explain L02` prints one rule in the
terminal. [Advice before training](../howto/advice.md) shows how to use the adviser.
"""
CONTRADICTIONS_HEAD = """\
# Settings that contradict noise or secure aggregation

`python docs/reference` writes this page from `ddlf/privacy/contradictions.py`, the table that also refuses the settings
before anything starts.

[Clip and noise](../howto/private_data.md#clip-and-noise) bound the share of one update in the new weights. The settings
on this page would undo that, or would have no effect. Outer optimizers and schedules work on the release, so they are
allowed.

[Secure aggregation](../howto/private_data.md#secure-aggregation-among-peers) hides single updates from the server, so
settings that look at single updates are refused.
"""
CONTRADICTIONS: dict[str, contradictions.Trainers] = {
    "Peers": "peers",
    "Runs that are a peer": "runs",
    "Private workers": "workers",
}


def contradicting() -> str:
    """Return the page of settings that contradict noise or secure aggregation."""
    lines = [CONTRADICTIONS_HEAD]
    for title, trainers in CONTRADICTIONS.items():
        lines += [f"## {title}\n"]
        for row in contradictions.page_rows(trainers):
            lines.append(
                textwrap.fill(row, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            )
        lines.append("")
    return "\n".join(lines)


BEGIN, END = "<!-- python docs/reference writes this part from ddlf/privacy/visible.py -->\n", "<!-- end -->\n"


def security() -> str:
    """Return the page of security, with the tables of visible updates and samples between its two marks."""
    before, _, after = (ROOT / "SECURITY.md").read_text(encoding="utf-8").partition(BEGIN)
    notes = [
        textwrap.fill(note, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for note in visible.notes()
    ]
    return "\n".join([f"{before}{BEGIN}", *visible.tables(), "", *notes, "", f"{END}{after.partition(END)[2]}"])


PAGES = {
    ROOT / "SECURITY.md": security,
    ROOT / "docs/reference/advice.md": advice,
    ROOT / "docs/reference/browser.md": browser,
    ROOT / "docs/reference/contradictions.md": contradicting,
    ROOT / "docs/reference/errors.md": tree_of_errors,
    ROOT / "docs/reference/events.md": events,
    ROOT / "docs/reference/rules.md": rules,
    ROOT / "docs/reference/settings.md": settings,
    ROOT / "ddlf/cluster/config/cluster.schema.json": lambda: json.dumps(schema(), indent=2) + "\n",
}

if __name__ == "__main__":
    for path, text in PAGES.items():
        path.write_text(text(), encoding="utf-8")
