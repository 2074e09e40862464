"""Parses the syntax of a model text, ``block:property value;``. Pure.

A scan for brackets, strings, comments and ``;`` first divides the statements. Lark then parses each statement
separately, so that one mistake does not hide others. Lark is imported when a text is read.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ddlf.extras.text.language.problems import MAX_PROBLEMS, Problems
from ddlf.extras.text.language.values import Arg, Call, Items, Number, Statement, String, Value, Word

if TYPE_CHECKING:
    from lark import Lark, Token, Transformer

MAX_BYTES = 1 << 18
MAX_DEPTH = 20
MAX_DIGITS = 40
MAX_STATEMENTS = 5000
MAX_ITEMS = 1000
GRAMMAR = r"""
start: NAME ":" NAME (item ("," item)* ","?)?
item: argument+
argument: [NAME "="] value
?value: NUMBER -> number | STRING -> string | NAME -> word | call | list
call: NAME "(" (argument ("," argument)* ","?)? ")"
list: OPEN (value ("," value)* ","?)? "]"
OPEN: "["
NAME: /[A-Za-z][A-Za-z0-9_]*(>[A-Za-z][A-Za-z0-9_]*)?/
NUMBER: /[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?(?![A-Za-z0-9_.])/
STRING: /"([^"\\\n]|\\["\\])*"/
%ignore /[ \t\r\n\f]+/
%ignore /#[^\n]*/
"""
TERMINALS = {
    "$END": "';'",
    "COLON": "':'",
    "COMMA": "','",
    "NAME": "a name",
    "NUMBER": "a number",
    "OPEN": "'['",
    "RPAR": "')'",
    "RSQB": "']'",
    "STRING": "a string",
}
"""The names of terminals in errors, in the order of listing them."""
LOOK_ALIKE = str.maketrans(
    "АВЕКМНОРСТХасеорухіѕј−–—“”„‘’；：，（）＝［］Αοα", 'ABEKMHOPCTXaceopyxisj---"""\'\';:,()=[]Aoa'
)
"""Letters and signs that look like ASCII characters of a text."""


class Part(NamedTuple):
    """The range of a statement in a model text, without its ``;``."""

    start: int
    end: int
    comments_above: tuple[str, ...] = ()
    comment_beside: str = ""
    gap: bool = False


class Parsed(NamedTuple):
    """The statements of a model text, the comments below the last one, and the blocks with an unreadable statement."""

    statements: tuple[Statement, ...]
    comments_below: tuple[str, ...]
    broken: frozenset[str]


def parse(text: str, problems: Problems) -> Parsed:
    """Return the statements of a model text, except unreadable ones, which are added to ``problems``."""
    parts, below, unread = _divided(text, problems)
    if len(parts) > MAX_STATEMENTS:
        problems.add(
            parts[MAX_STATEMENTS].start, f"a text has at most {MAX_STATEMENTS:,} statements, got {len(parts):,}"
        )
        return Parsed((), (), frozenset())
    parsed: list[Statement] = []
    broken = {match[1] for start in unread if (match := _HEAD.match(text, start))}
    for part in parts:
        if len(problems) > MAX_PROBLEMS:
            break
        statement = _statement(text, part, problems)
        while (
            isinstance(statement, Part) and len(problems) <= MAX_PROBLEMS
        ):  # a ';' is missing before the second statement
            if match := _HEAD.match(text, part.start):
                broken.add(match[1])
            part, statement = statement, _statement(text, statement, problems)
        if isinstance(statement, Statement):
            parsed.append(statement)
        elif match := _HEAD.match(text, part.start):
            broken.add(match[1])
    return Parsed(tuple(parsed), below, frozenset(broken))


_HEAD = re.compile(r"\s*([A-Za-z]\w*)", re.ASCII)
_SIGNS = re.compile(r'"(?:[^"\\\n]|\\.)*"|"|#[^\n]*|[()\[\];]|[^\s"#()\[\];]+')
_CLOSES = {")": "(", "]": "["}


def _divided(text: str, problems: Problems) -> tuple[list[Part], tuple[str, ...], list[int]]:
    """Return the parts of a model text, the comments below the last one, and the beginnings of unparsable parts."""
    parts: list[Part] = []
    unread: list[int] = []
    comments: list[str] = []
    open_: list[int] = []
    start, last, is_unparsable, before, gap, outer = -1, 0, False, 0, False, False
    for match in _SIGNS.finditer(text):
        sign, at = match[0], match.start()
        if sign[0] == "#":
            if start < 0 and parts and not comments and "\n" not in text[before:at] and not parts[-1].comment_beside:
                parts[-1] = parts[-1]._replace(comment_beside=sign.rstrip())
            else:
                comments.append(("\n" if _gap(text, before, at) and start < 0 else "") + sign.rstrip())
            before = match.end()
            continue
        if sign == ";":
            if open_:
                problems.add(open_[0], f"{text[open_[0]]!r} is not closed")
                is_unparsable = True
            if start < 0:
                problems.add(at, "';' ends no statement")
            elif is_unparsable:
                unread.append(start)
            else:
                parts.append(Part(start, at, *_comments_of(comments, gap, outer)))
            comments, open_, start, is_unparsable, before = ([] if start >= 0 else comments), [], -1, False, match.end()
            continue
        if start < 0:
            start, gap, outer = at, _gap(text, before, at), bool(comments)
        before = last = match.end()
        if sign == '"':
            problems.add(at, "the string is not closed; it ends with '\"' in the same line")
            is_unparsable = True
        elif sign in "([":
            open_.append(at)
            if len(open_) == MAX_DEPTH + 1:
                problems.add(at, f"brackets are nested deeper than {MAX_DEPTH}")
                is_unparsable = True
        elif sign in _CLOSES:
            if not open_ or text[open_[-1]] != _CLOSES[sign]:
                if not is_unparsable:
                    problems.add(at, f"{sign!r} closes no bracket" if not open_ else _mismatch(text, open_[-1], sign))
                is_unparsable = True
            if open_:
                open_.pop()
    if start >= 0:
        if open_ and not is_unparsable:
            problems.add(open_[0], f"{text[open_[0]]!r} is not closed")
        elif not is_unparsable:
            problems.add(last, "';' is missing at the end")
            parts.append(Part(start, last, *_comments_of(comments, gap, outer)))
            comments = []
        if open_ or is_unparsable:
            unread.append(start)
    return parts, tuple(comments), unread


def _mismatch(text: str, at: int, sign: str) -> str:
    return f"{sign!r} does not close {text[at]!r}, did you mean {'])'['[('.index(text[at])]!r}?"


def _gap(text: str, start: int, end: int) -> bool:
    return text.count("\n", start, end) > 1 and start > 0


def _comments_of(comments: list[str], gap: bool, outer: bool) -> tuple[tuple[str, ...], str, bool]:
    """Return the comments above and inside a statement, an empty comment beside it, and whether an empty line precedes
    it.
    """
    if gap and comments and not outer:
        return (f"\n{comments[0]}", *comments[1:]), "", False
    return tuple(comments), "", gap


def _statement(text: str, part: Part, problems: Problems) -> Statement | Part | None:
    """Parse one part of the text. Return its statement; if a ``;`` is missing, the part of the next statement; None
    after a mistake.
    """
    from lark import TextSlice, UnexpectedCharacters, UnexpectedToken

    if text.count(",", part.start, part.end) > MAX_ITEMS:
        problems.add(part.start, f"a statement has at most {MAX_ITEMS:,} values")
        return None
    parser, transformer = _reader()
    try:
        statement = transformer.transform(parser.parse(TextSlice(text, part.start, part.end)))
        return replace(statement, comments_above=part.comments_above, comment_beside=part.comment_beside, gap=part.gap)
    except UnexpectedCharacters as error:
        problems.add(*_character(text, error.pos_in_stream or 0))
    except UnexpectedToken as error:
        token = error.token
        at = part.end if token.type == "$END" else _start(token)
        before = text[part.start : at]
        last = re.search(r"\S(?=\s*(?<!\w)[A-Za-z]\w*\s*\Z)", before)
        if token.type == "COLON" and last and _is_closed(before):
            end = part.start + last.end()
            problems.add(end, "';' is missing")
            return Part(at - len(text[end:at].lstrip()), part.end)
        problems.add(*_unexpected(token, at, before, error.accepts))
    return None


def _start(token: Token) -> int:
    return token.start_pos or 0  # every token of a lexer has a position


def _unexpected(token: Token, at: int, before: str, accepted: set[str]) -> tuple[int, str]:
    """Return the position of a token that is not allowed, and the reason. ``before`` is the text of the statement
    before the token."""
    if token.type == "COLON":
        return at, "':' is not allowed here, did you mean '='?"
    if accepted == {"COLON"}:
        name = before.rstrip()
        return at - len(before) + len(name), f"':' is missing behind the block's name {name.split()[-1]!r}"
    if token.type == "OPEN" and re.search(r"(?<!\w)[A-Za-z]\w*\s*\Z", before):
        return at, "'=' is missing before '[', did you mean '=['?"
    names = [name for terminal, name in TERMINALS.items() if terminal in accepted]
    written = TERMINALS["$END"] if token.type == "$END" else repr(str(token))
    listed = f"{', '.join(names[:-1])}{' or ' * bool(names[1:])}{names[-1]}"
    return at, f"{written} is not allowed here; expected {listed}"


def _is_closed(text: str) -> bool:
    return text.count("(") == text.count(")") and text.count("[") == text.count("]")


def _character(text: str, at: int) -> tuple[int, str]:
    """Return the position of a character that is not allowed, and the reason."""
    letter = text[at]
    if not letter.isascii():
        name = unicodedata.name(letter, f"U+{ord(letter):04X}")
        ascii_letter = letter.translate(LOOK_ALIKE)
        if not ascii_letter.isascii():
            ascii_letter = unicodedata.normalize("NFKC", letter)
        guess = f", did you mean {ascii_letter!r}?" if ascii_letter.isascii() and ascii_letter.isprintable() else ""
        return at, f"{letter!r} ({name}) is not an ASCII letter{guess}"
    if letter == "_":
        return at, "a name begins with a letter, not with '_'"
    if letter == "'":
        return at, "\"'\" is not allowed here; strings have other quotes, did you mean '\"'?"
    if letter in "+-." or letter.isdigit():
        return at, f"{_word_at(text, at)!r} is not a number"
    if letter == '"':
        return at, 'a string has no other escapes than \\" and \\\\'
    return at, f"{letter!r} is not allowed here"


def _word_at(text: str, at: int) -> str:
    match = re.compile(r"[-+.\w]+").match(text, at)
    return match[0][:MAX_DIGITS] if match else text[at]


@functools.cache
def _reader() -> tuple[Lark, Transformer[Token, Statement]]:
    """Return the Lark parser of a statement, and the transformer that converts its syntax tree to a ``Statement``."""
    from lark import Lark, Transformer, v_args

    @v_args(inline=True)
    class Statements(Transformer["Token", Statement]):
        """Converts a syntax tree to values, from the leaves up."""

        def number(self, token: Token) -> Number:
            return Number(str(token), _start(token))

        def string(self, token: Token) -> String:
            return String(re.sub(r"\\(.)", r"\1", token[1:-1]), _start(token))

        def word(self, token: Token) -> Word:
            return Word(str(token), _start(token))

        def list(self, bracket: Token, *values: Value) -> Items:
            return Items(values, _start(bracket))

        def call(self, name: Token, *args: Arg) -> Call:
            return Call(str(name), args, _start(name))

        def argument(self, key: Token | None, value: Value) -> Arg:
            return Arg(str(key), value, _start(key)) if key else Arg("", value, value.at)

        def item(self, *args: Arg) -> tuple[Arg, ...]:
            return args

        def start(self, block: Token, name: Token, *items: tuple[Arg, ...]) -> Statement:
            return Statement(self.word(block), self.word(name), items, _start(block))

    return Lark(GRAMMAR, parser="lalr", lexer="basic"), Statements()
