"""A text as statements: ``block:property value;``. Pure; Lark is imported when a text is read.

Statements are divided first, by brackets, strings, comments and ``;`` alone, and each is parsed by itself: so one that is wrong hides no other.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from typing import Any, NamedTuple

from ddlf.extras.text.language.problems import MAX_PROBLEMS, Problems
from ddlf.extras.text.language.values import Arg, Call, Items, Number, Statement, Text, Value, Word

MAX_BYTES = 1 << 18
MAX_DEPTH = 20
MAX_DIGITS = 40
MAX_STATEMENTS = 5000
MAX_ITEMS = 1000
GRAMMAR = r"""
start: NAME ":" NAME [item ("," item)* [","]]
item: arg+
?arg: value | KEY value -> named | NAME "=" value -> named
?value: NUMBER -> number | STRING -> text | NAME -> word | list | FLAT -> flat | NAME "(" [each ("," each)* [","]] ")" -> call | BARE -> bare
list: OPEN [value ("," value)* [","]] "]"
?each: arg -> arg
OPEN: "["
FLAT.2: /\[[ \t\r\n]*[-+.0-9eE]+(?:,[ \t\r\n]*[-+.0-9eE]+)*[ \t\r\n]*\]/
KEY.2: /[A-Za-z][A-Za-z0-9_]*[ \t]*=/
BARE.2: /[A-Za-z][A-Za-z0-9_]*\(\)/
NAME: /[A-Za-z][A-Za-z0-9_]*(>[A-Za-z][A-Za-z0-9_]*)?/
NUMBER: /[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?(?![A-Za-z0-9_.])/
STRING: /"([^"\\\n]|\\["\\])*"/
%ignore /[ \t\r\n\f]+/
%ignore /#[^\n]*/
"""
"""FLAT, KEY and BARE are several tokens in one, of which dense texts have thousands."""
LOOK_ALIKE = str.maketrans(
    "АВЕКМНОРСТХасеорухіѕј−–—“”„‘’；：，（）＝［］Αοα", 'ABEKMHOPCTXaceopyxisj---"""\'\';:,()=[]Aoa'
)
"""Letters and signs of other alphabets that look like those of a text."""


class _NoNumber(Exception):
    """What stands where a number is meant, and where."""


class Part(NamedTuple):
    """A statement's place in a text, without its ``;``."""

    start: int
    end: int
    above: tuple[str, ...] = ()
    beside: str = ""
    gap: bool = False


class Parsed(NamedTuple):
    """The statements of a text, the comments below the last one, and the blocks of which some statement could not be read."""

    statements: tuple[Statement, ...]
    below: tuple[str, ...]
    broken: frozenset[str]


def parse(text: str, problems: Problems) -> Parsed:
    """Return what stands in a text. What cannot be read is told to ``problems``, and left out."""
    parts, below, unread = _divided(text, problems)
    if len(parts) > MAX_STATEMENTS:
        problems.add(
            parts[MAX_STATEMENTS].start, f"a text has at most {MAX_STATEMENTS:,} statements, got {len(parts):,}"
        )
        return Parsed((), (), frozenset())
    found: list[Statement] = []
    broken = {match[1] for start in unread if (match := _HEAD.match(text, start))}
    for part in parts:
        if len(problems) > MAX_PROBLEMS:
            break
        statement = _statement(text, part, problems)
        while (
            isinstance(statement, Part) and len(problems) <= MAX_PROBLEMS
        ):  # a second one begins where a ';' is missing
            if match := _HEAD.match(text, part.start):
                broken.add(match[1])
            part, statement = statement, _statement(text, statement, problems)
        if isinstance(statement, Statement):
            found.append(statement)
        elif match := _HEAD.match(text, part.start):
            broken.add(match[1])
    return Parsed(tuple(found), below, frozenset(broken))


_HEAD = re.compile(r"\s*([A-Za-z]\w*)", re.ASCII)
_SIGNS = re.compile(r'"(?:[^"\\\n]|\\.)*"|"|#[^\n]*|[()\[\];]|[^\s"#()\[\];]+')
_NUMBERS = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_CLOSES = {")": "(", "]": "["}


def _divided(text: str, problems: Problems) -> tuple[list[Part], tuple[str, ...], list[int]]:
    """The parts of a text, the comments below, and where parts begin that cannot be parsed."""
    parts: list[Part] = []
    unread: list[int] = []
    comments: list[str] = []
    open_: list[int] = []
    start, last, wrong, before, gap, outer = -1, 0, False, 0, False, False
    for match in _SIGNS.finditer(text):
        sign, at = match[0], match.start()
        if sign[0] == "#":
            if start < 0 and parts and not comments and "\n" not in text[before:at] and not parts[-1].beside:
                parts[-1] = parts[-1]._replace(beside=sign.rstrip())
            else:
                comments.append(("\n" if _gap(text, before, at) and start < 0 else "") + sign.rstrip())
            before = match.end()
            continue
        if sign == ";":
            if open_:
                problems.add(open_[0], f"{text[open_[0]]!r} is not closed")
                wrong = True
            if start < 0:
                problems.add(at, "';' ends nothing")
            elif wrong:
                unread.append(start)
            else:
                parts.append(Part(start, at, *_above(comments, gap, outer)))
            comments, open_, start, wrong, before = ([] if start >= 0 else comments), [], -1, False, match.end()
            continue
        if start < 0:
            start, gap, outer = at, _gap(text, before, at), bool(comments)
        before = last = match.end()
        if sign == '"':
            problems.add(at, "the string is not closed; it ends with '\"' in the same line")
            wrong = True
        elif sign in "([":
            open_.append(at)
            if len(open_) == MAX_DEPTH + 1:
                problems.add(at, f"brackets are nested deeper than {MAX_DEPTH}")
                wrong = True
        elif sign in _CLOSES:
            if not open_ or text[open_[-1]] != _CLOSES[sign]:
                if not wrong:
                    problems.add(at, f"{sign!r} closes nothing" if not open_ else _other(text, open_[-1], sign))
                wrong = True
            if open_:
                open_.pop()
    if start >= 0:
        if open_ and not wrong:
            problems.add(open_[0], f"{text[open_[0]]!r} is not closed")
        elif not wrong:
            problems.add(last, "';' is missing at the end")
            parts.append(Part(start, last, *_above(comments, gap, outer)))
            comments = []
        if open_ or wrong:
            unread.append(start)
    return parts, tuple(comments), unread


def _other(text: str, at: int, sign: str) -> str:
    return f"{sign!r} does not close {text[at]!r}, did you mean {'])'['[('.index(text[at])]!r}?"


def _gap(text: str, start: int, end: int) -> bool:
    return text.count("\n", start, end) > 1 and start > 0


def _above(comments: list[str], gap: bool, outer: bool) -> tuple[tuple[str, ...], str, bool]:
    """Comments above a statement, the empty line before those from inside of it; and whether one stands between them and the statement."""
    if gap and comments and not outer:
        return (f"\n{comments[0]}", *comments[1:]), "", False
    return tuple(comments), "", gap


def _statement(text: str, part: Part, problems: Problems) -> Statement | Part | None:
    """The statement of a part; the part of the next one if a ``;`` is missing between them; None if it cannot be read."""
    from lark import TextSlice, UnexpectedCharacters, UnexpectedInput, UnexpectedToken
    from lark.exceptions import VisitError

    if text.count(",", part.start, part.end) > MAX_ITEMS:
        problems.add(part.start, f"a statement has at most {MAX_ITEMS:,} values")
        return None
    try:
        made: Statement = _parser().parse(TextSlice(text, part.start, part.end))
    except (VisitError, _NoNumber) as error:
        where, written = (error.orig_exc if isinstance(error, VisitError) else error).args
        problems.add(where, f"{written[:MAX_DIGITS]!r} is no number")
        return None
    except UnexpectedInput as error:
        if isinstance(error, UnexpectedCharacters):
            problems.add(*_character(text, int(error.pos_in_stream or 0)))
            return None
        if not isinstance(error, UnexpectedToken):
            problems.add(part.end, "';' cannot stand here")
            return None
        at = part.end if error.token.type == "$END" else int(error.token.start_pos or 0)
        behind = re.search(r"\S(?=\s*(?<!\w)[A-Za-z]\w*\s*\Z)", text[part.start : at])
        if error.token.type == "COLON" and behind and _is_closed(text[part.start : at]):
            problems.add(part.start + behind.end(), "';' is missing")
            begin = re.compile(r"\s*").match(text, part.start + behind.end())
            return Part(begin.end() if begin else at, part.end)
        wanted = error.accepts or error.expected
        if wanted == {"COLON"} and (before := text[part.start : at].rstrip()):
            problems.add(part.start + len(before), f"':' is missing behind the block's name {before.split()[-1]!r}")
        else:
            problems.add(at, _unexpected(text, part, at, str(error.token), wanted))
        return None
    return Statement(made.block, made.property, made.items, made.at, part.above, part.beside, part.gap)


def _is_closed(text: str) -> bool:
    return text.count("(") == text.count(")") and text.count("[") == text.count("]")


def _character(text: str, at: int) -> tuple[int, str]:
    """Where and why a character cannot stand."""
    letter = text[at]
    if not letter.isascii():
        name = unicodedata.name(letter, f"U+{ord(letter):04X}")
        meant = letter.translate(LOOK_ALIKE)
        if not meant.isascii():
            meant = unicodedata.normalize("NFKC", letter)
        guess = f", did you mean {meant!r}?" if meant.isascii() and meant.isprintable() else ""
        return at, f"{letter!r} ({name}) is no letter of ASCII{guess}"
    if letter == "_":
        return at, "a name begins with a letter, not with '_'"
    if letter == "'":
        return at, "\"'\" cannot stand here; strings have other quotes, did you mean '\"'?"
    if letter in "+-." or letter.isdigit():
        return at, f"{_word_at(text, at)!r} is no number"
    if letter == '"':
        return at, 'a string has no other escapes than \\" and \\\\'
    return at, f"{letter!r} cannot stand here"


def _word_at(text: str, at: int) -> str:
    match = re.compile(r"[-+.\w]+").match(text, at)
    return match[0][:MAX_DIGITS] if match else text[at]


_SAID = {"COLON": "':'", "COMMA": "','", "EQUAL": "'='", "LPAR": "'('", "OPEN": "'['", "RPAR": "')'", "RSQB": "']'"} | {
    "NAME": "a name",
    "NUMBER": "a number",
    "STRING": "a string",
    "$END": "';'",
}


def _unexpected(text: str, part: Part, at: int, token: str, wanted: set[str]) -> str:
    """What is wrong where a token cannot stand."""
    here = "';'" if at == part.end else repr(token)
    if token == ":" and at < part.end:
        return "':' cannot stand here, did you mean '='?"
    if token[:1] == "[" and re.search(r"(?<!\w)[A-Za-z]\w*\s*\Z", text[part.start : at]):
        return "'=' is missing before '[', did you mean '=['?"
    names = [_SAID[name] for name in sorted(wanted) if name in _SAID and not (name == "EQUAL" and "KEY" in wanted)]
    if not names:
        return f"{here} cannot stand here"
    return f"{here} cannot stand here; there can be {', '.join(names[:-1])}{' or ' * bool(names[1:])}{names[-1]}"


@functools.cache
def _parser() -> Any:
    """The parser of one statement."""
    from lark import Lark, Token, Transformer, v_args

    @v_args(inline=True)
    class Made(Transformer):  # type: ignore[misc, type-arg, unused-ignore]
        """Values in the place of trees."""

        def number(self, token: Token) -> Number:
            return Number(str(token), token.start_pos or 0)

        def text(self, token: Token) -> Text:
            return Text(re.sub(r"\\(.)", r"\1", token[1:-1]), token.start_pos or 0)

        def word(self, token: Token) -> Word:
            return Word(str(token), token.start_pos or 0)

        def list(self, begin: Token, *values: Value) -> Items:
            return Items(values, begin.start_pos or 0)

        def flat(self, token: Token) -> Items:
            at = token.start_pos or 0
            found = [(match[0], at + match.start()) for match in _NUMBERS.finditer(token)]
            for written, where in found:
                if not _NUMBER.fullmatch(written):
                    raise _NoNumber(where, written)
            return Items(tuple(Number(written, where) for written, where in found), at)

        def bare(self, token: Token) -> Call:
            return Call(str(token[:-2]), (), token.start_pos or 0)

        def named(self, key: Token, value: Value) -> Arg:
            return Arg(str(key.rstrip("=").rstrip()), value, key.start_pos or 0)

        def arg(self, value: Value | Arg) -> Arg:
            return value if isinstance(value, Arg) else Arg("", value, value.at)

        def call(self, name: Token, *args: Arg) -> Call:
            return Call(str(name), args, name.start_pos or 0)

        def item(self, *args: Value | Arg) -> tuple[Arg, ...]:
            return tuple(self.arg(each) for each in args)

        def start(self, block: Token, name: Token, *items: tuple[Arg, ...]) -> Statement:
            at = block.start_pos or 0
            return Statement(Word(str(block), at), Word(str(name), name.start_pos or 0), items, at)

    return Lark(GRAMMAR, parser="lalr", lexer="contextual", transformer=Made(), maybe_placeholders=False)
