"""Check the English of documentation, docstrings, comments, help texts, messages and names, in the package and around it.

``python scripts/prose.py`` prints the place, the pattern and a suggestion for each sentence and each name that breaks a
rule of ``docs/contributing/style.md``. ``scripts/prose-baseline.txt`` allows some areas a number of such sentences. Areas that
are not in it must have none, and a number may only become smaller: ``--update`` lowers it, and never raises it.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BASELINE = ROOT / "scripts/prose-baseline.txt"
GENERATED = {f"docs/reference/{name}.md" for name in ("advice", "errors", "events", "rules", "settings")}
QUOTES_BAD_ENGLISH = {"docs/contributing/style.md", "scripts/prose.py", "tests/test_prose.py"}
CODE = ("ddlf", "apps", "benchmarks", "docs", "scripts", "tests")
LAB_BOOK = {"docs/LAB.md"}  # dated notes stay as they were written
MAX_WORDS = 40
MAX_COLUMNS = 120
MAX_TABLE_COLUMNS = 160  # rows of tables cannot be wrapped
MAX_PARAGRAPH_LINES = 5

SAYS = r"(?:say|show|see|explain|decide|list|know|describe|tell|find|ask|check|choose|about|exactly|of|on)(?:s|ed|n)?"
NO_NOUN = r"(?:and|are|as|at|but|by|for|from|if|in|inside|instead|is|of|on|or|so|than|that|to|when|where|which|with)"
NO_NAMES = {
    *("apart", "around", "asked", "away", "each", "found", "given", "gone", "held", "here", "kept", "known", "made"),
    *("meant", "mine", "near", "one", "ones", "others", "own", "place", "places", "said", "seen", "taken", "theirs"),
    *("there", "told", "wanted", "what", "which", "who", "whose", "why"),
}
"""Words that do not say what a variable, parameter, attribute, function or class is."""
FIXED_NAMES = {
    # A place, where a launcher starts a worker, is a word of the glossary. Users name data sets by ``place``.
    "place": ("ddlf/cluster/", "ddlf/data/__init__.py", "ddlf/events/", "ddlf/rpc/join.py", "ddlf/worker/", "tests/"),
    "places": ("ddlf/cluster/", "ddlf/peers/ledger.py", "ddlf/testing/", "tests/"),
    # Fields of events, errors, journals and results, and the tools for tests of users.
    "asked": ("ddlf/peers/ledger.py", "ddlf/testing/"),
    "others": ("ddlf/errors/", "ddlf/testing/", "tests/training/"),
    "told": ("ddlf/testing/",),
    "what": ("ddlf/cli/findings.py", "ddlf/events/"),
    "why": ("ddlf/events/", "ddlf/monitor/runs/folder.py", "ddlf/peers/"),
    # Methods that a user or another process calls by name, and fields of messages.
    "apart": ("ddlf/training/slot/task.py",),
    "each": ("ddlf/cluster/cluster.py",),
    "given": ("ddlf/training/exchanges/sharded/means.py",),
    "here": ("ddlf/training/strategies/",),
    "kept": ("ddlf/testing/", "ddlf/training/exchanges/sharded/"),
    "own": ("ddlf/training/strategies/",),
    "wanted": ("ddlf/training/slot/task.py",),
    "who": ("benchmarks/private_accuracy.py", "ddlf/worker/daemon.py"),
}
"""Files that use names of ``NO_NAMES``, because the glossary, an event, a message or the public interface defines them."""

START = r"(?:^|(?<=[.!?:;] ))"


class Rule(NamedTuple):
    """A pattern of the dialect, and what to write instead."""

    name: str
    pattern: re.Pattern[str]
    advice: str


def _rule(name: str, pattern: str, advice: str) -> Rule:
    return Rule(name, re.compile(pattern), advice)


RULES = (
    _rule("what without a noun", START + r"What (?!to\b|if\b)[^.?!:]*[.!:]", "begin with the subject: 'The X that ..'"),
    _rule(
        "what without a noun",
        rf"(?<!\w)(?!{SAYS} what)(\w+) what (?:is|are|was|has|had|it|they|each|there|comes?|came|goes|went|stays|others)\b",
        "name the thing: 'the update that ..'",
    ),
    _rule(
        "who without a noun", START + r"Who(?:ever)? [^.?!]*[.!]", "name the person or process: 'The worker that ..'"
    ),
    _rule(
        "who without a noun", r"\b(?:by|to|of|from|for|with|and|or|asks) who(?:ever)?\b", "name the person or process"
    ),
    _rule("whoever", r"\b[Ww]hoever\b", "'the worker that ..', 'whichever worker'"),
    _rule("those that", r"\b[Tt]hose (?:that|who|which|with|on|whose)\b|\bThose (?:of|in)\b", "repeat the noun"),
    _rule("those that", r"[,;:] those (?:of|in)\b", "repeat the noun"),
    _rule(
        "fragment with of",
        START + r"Of (?!course\b)\w+",
        "'For each ..', or a verb",
    ),
    _rule(
        "fragment with as",
        START + r"As (?:of|in|with|ever|are|is|do|does)\b",
        "write a whole sentence: 'This works like ..'",
    ),
    _rule("is told", r"\b(?:is|are|was|were|be|been|being) (?:\w+ )?told\b", "'receives', 'reports', 'is notified'"),
    _rule("goes on", r"\b(?:go|goes|went|going|gone) on\b", "'continues'"),
    _rule("begins anew", r"\b(?:anew|once again anew)\b", "'restarts', 'again'"),
    _rule(
        "is no",
        r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer\b|more\b|such\b|way\b|need\b|other\b)\w+",
        "'is not a ..'",
    ),
    _rule(
        "that there is",
        r"\b(?:that|which|what|as|than|who) there (?:is|are|was|were|may be)\b",
        "drop it, or 'existing'",
    ),
    _rule("nothing of", r"\b[Nn]othing (?:of|but|that|else that|has)\b", "'No X ..'"),
    _rule("comes of", r"\b(?:come|comes|came|coming) (?:of|to the same)\b", "'results from', 'equals'"),
    _rule("of which", r"\b(?:of|from|to|with|for|after|behind) (?:which|whom)\b", "start a new sentence"),
    _rule("is said", r"\b(?:is|are|was|be) said\b", "'the X says', 'is given as'"),
    _rule("but for", r"\bbut for\b", "'except for'"),
    _rule("own of its", rf"\bof (?:its|their|your|his) own\b(?! (?!{NO_NOUN}\b)\w)", "'its own X'"),
    _rule("one behind the other", r"\bone behind the other\b", "'one after another'"),
    _rule("no use for", r"\bno use for\b|\bof (?:no )?use to\b", "'does not use', 'helps'"),
    _rule("leads to", r"\bwhat \w+(?: \w+)* leads to\b", "'what to do with ..'"),
    _rule("for ever", r"\bfor ever\b", "'indefinitely'"),
    _rule("is what", r"\b(?:is|are|was|were) (?:what|who|where)\b", "say it directly"),
    _rule("in the place of", r"\bin the place of\b", "'instead of'"),
    _rule(
        "such a one", r"\bsuch (?:a one|ones)\b|\bthat one(?=[.,;:]| is\b| has\b| that\b| which\b)", "repeat the noun"
    ),
    _rule("whose each", r"\bwhose (?:each|all|it|they|that)\b", "start a new sentence"),
    _rule(
        "say of",
        r"\b(?:says?|said|tells?|knows?|shows?) of (?:an?|each|it|them|the|what)\b",
        "'says about', 'reports for'",
    ),
    _rule(
        "chain of clauses",
        r"(?:\b(?:what|who|whose|whoever|which|those)\b[^.;]*?){3}",
        "one idea a sentence: at most two of what, who, whose, which, those",
    ),
)


class Text(NamedTuple):
    """A piece of prose and where it begins."""

    path: str
    line: int
    text: str


class Finding(NamedTuple):
    """A sentence that breaks a rule."""

    path: str
    line: int
    rule: str
    passage: str
    advice: str


def files() -> Iterator[Path]:
    """Yield the files with prose: the pages at the top, the documentation, and all Python files."""
    skipped = GENERATED | QUOTES_BAD_ENGLISH | LAB_BOOK
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    code = (path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py")))
    for path in [*top, *sorted((ROOT / "docs").rglob("*.md")), *code]:
        if path.relative_to(ROOT).as_posix() not in skipped and "_build" not in path.parts:
            yield path


def area(path: str) -> str:
    """Return the part of the tree that shares one number in the baseline."""
    parts = Path(path).parts
    return "/".join(parts[:2]) if len(parts) > 1 else path


def prose(path: Path) -> Iterator[Text]:
    """Yield the prose of a file, paragraph by paragraph."""
    name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    pieces = _markdown(source) if path.suffix == ".md" else _python(source)
    for line, text in pieces:
        for offset, paragraph in _paragraphs(text):
            yield Text(name, line + offset, paragraph)


def _markdown(source: str) -> Iterator[tuple[int, str]]:
    """Yield a page without its blocks of code, so that lines keep their numbers."""
    code = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)[ \t]*$", re.MULTILINE | re.DOTALL)
    yield 1, code.sub(lambda block: "\n" * block[0].count("\n"), source)


def _python(source: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, messages of at least four words, and comments; an f-string counts as one message."""
    tree = ast.parse(source)
    pieces = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if id(node) in pieces:
            continue
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if len(re.findall(r"\b[a-z]+\b", text)) >= 4:
            yield node.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(?:noqa|type:|pragma|!)", token.string):
            yield token.start[0], token.string.lstrip("# ")


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs, items of lists and cells of tables as one line each, code replaced by ``X``."""
    number, collected, began = 0, list[str](), 0
    for number, line in enumerate([*text.splitlines(), ""]):
        stripped = line.strip()
        begins = not stripped or re.match(r"[-*|#>]|\d+\. |\w+: |\.\. |python |ddlf |.*\S {3,}\S", stripped)
        if begins and collected:
            yield began, _plain(" ".join(collected))
            collected = []
        if stripped and not re.match(r"\|[-| :]+\|$", stripped):
            if stripped.startswith("|"):
                for cell in stripped.strip("|").split(" | "):
                    yield number, _plain(cell.strip())
            else:
                began = began if collected else number
                collected.append(re.sub(r"^(?:[-*#>]+ |\d+\. )", "", stripped))


def _plain(text: str) -> str:
    """Return text with code as ``X`` and links as their text."""
    text = re.sub(r"`+[^`]*`+", "X", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return text.replace("**", "").replace("*", "")


def findings(path: Path) -> Iterator[Finding]:
    """Yield each place of a file that breaks a rule."""
    for text in prose(path):
        yield from findings_in(text)
    if path.suffix == ".md":
        yield from _layout(path)
    else:
        yield from _names(path)


def _names(path: Path) -> Iterator[Finding]:
    """Yield each definition and assignment of a name that says nothing."""
    for line, name in _bound(ast.parse(path.read_text(encoding="utf-8"))):
        word, file = name.strip("_"), path.relative_to(ROOT).as_posix()
        if word in NO_NAMES and not file.startswith(FIXED_NAMES.get(word, ("-",))):
            yield Finding(file, line, "empty name", name, "name the thing that it holds: 'slot', 'index', 'reason', ..")


def _bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each definition and assignment."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.ExceptHandler(name=str(name)) | ast.alias(asname=str(name)):
                yield node.lineno, name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield node.lineno, name


def findings_in(text: Text) -> Iterator[Finding]:
    """Yield each place of a paragraph that breaks a rule."""
    reported: set[tuple[str, str]] = set()
    for rule in RULES:
        for match in rule.pattern.finditer(text.text):
            passage = match[0] if len(match[0]) < 60 else f"{match[0][:57]}..."
            if (rule.name, passage) not in reported:
                reported.add((rule.name, passage))
                yield Finding(text.path, text.line, rule.name, passage, rule.advice)
    for sentence in re.split(r"(?<=[.!?:;]) ", text.text):
        if (words := len(sentence.split())) > MAX_WORDS:
            yield Finding(text.path, text.line, "long sentence", f"{sentence[:57]}...", f"{words} words: split it")


def _layout(path: Path) -> Iterator[Finding]:
    """Yield lines that are too wide, and paragraphs that are too long."""
    name = path.relative_to(ROOT).as_posix()
    height = 0
    (_, text), *_ = _markdown(path.read_text(encoding="utf-8"))
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        limit = MAX_TABLE_COLUMNS if stripped.startswith("|") else MAX_COLUMNS
        if len(line) > limit:
            yield Finding(name, number, "wide line", f"{len(line)} columns", f"at most {limit}")
        height = 0 if not stripped or stripped[0] in "|#" else 1 if re.match(r"[-*] |\d+\. ", stripped) else height + 1
        if height == MAX_PARAGRAPH_LINES + 1:
            yield Finding(name, number, "long paragraph", stripped[:40], f"at most {MAX_PARAGRAPH_LINES} lines")


def allowed(path: Path = BASELINE) -> dict[str, int]:
    """Return how many findings each area may still have."""
    lines = (line.split() for line in path.read_text().splitlines() if line and not line.startswith("#"))
    return {name: int(count) for name, count in lines}


def lowered(limits: dict[str, int], counts: Counter[str]) -> dict[str, int]:
    """Return the baseline after ``--update``: no number is larger than before, and clean areas are dropped."""
    return {name: min(limit, counts[name]) for name, limit in sorted(limits.items()) if counts[name]}


def main() -> int:
    """Print findings of areas that have too many, or with paths those of these files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, help="print all findings of these files and folders")
    parser.add_argument("--update", action="store_true", help="lower the numbers of the baseline to today's")
    options = parser.parse_args()
    chosen = [path.resolve() for path in options.paths]
    every = [finding for path in files() for finding in findings(path)]
    counts = Counter(area(finding.path) for finding in every)
    limits = allowed()
    if options.update:
        head = [line for line in BASELINE.read_text().splitlines() if line.startswith("#")]
        limits = lowered(limits, counts)
        BASELINE.write_text("\n".join([*head, *(f"{name} {count}" for name, count in limits.items())]) + "\n")
    too_many = {name for name, count in counts.items() if count > limits.get(name, 0)}
    for finding in every:
        path = ROOT / finding.path
        if (
            any(path == path_prefix or path_prefix in path.parents for path_prefix in chosen)
            if chosen
            else area(finding.path) in too_many
        ):
            print(f"{finding.path}:{finding.line}: {finding.rule}: {finding.passage!r}; {finding.advice}")
    for name in sorted(too_many):
        print(f"{name}: {counts[name]} findings, {limits.get(name, 0)} allowed", file=sys.stderr)
    return 1 if too_many else 0


if __name__ == "__main__":
    sys.exit(main())
