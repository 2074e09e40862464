"""The syntax of a text: ``block:property value;``. Pure.

Statements are divided first, by brackets, strings, comments and ``;`` alone. Each is then parsed by itself, so that a mistake in one hides no other:

    statement = block ":" property [ item { "," item } [ "," ] ]
    item      = argument { argument }
    argument  = [ key "=" ] value
    value     = number | string | name | name "(" [ argument { "," argument } [ "," ] ] ")" | "[" [ value { "," value } [ "," ] ] "]"
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple, NoReturn

from ddlf.extras.text.language.problems import MAX_PROBLEMS, Problems
from ddlf.extras.text.language.values import Arg, Call, Items, Number, Statement, String, Value, Word

MAX_BYTES = 1 << 18
MAX_DEPTH = 20
MAX_DIGITS = 40
MAX_STATEMENTS = 5000
MAX_ITEMS = 1000
LOOK_ALIKE = str.maketrans(
    "АВЕКМНОРСТХасеорухіѕј−–—“”„‘’；：，（）＝［］Αοα", 'ABEKMHOPCTXaceopyxisj---"""\'\';:,()=[]Aoa'
)
"""Letters and signs of other alphabets that look like those of a text."""


class Part(NamedTuple):
    """A statement's place in a text, without its ``;``."""

    start: int
    end: int
    above: tuple[str, ...] = ()
    beside: str = ""
    gap: bool = False


class Parsed(NamedTuple):
    """The statements of a text, the comments below the last one, and the blocks with an unreadable statement."""

    statements: tuple[Statement, ...]
    below: tuple[str, ...]
    broken: frozenset[str]


def parse(text: str, problems: Problems) -> Parsed:
    """Return the statements of a text. Unreadable ones go to ``problems``, and are left out."""
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
        ):  # a second one begins where a ';' is missing
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
_TOKEN = re.compile(
    r"""[ \t\r\n\f]+ | \#[^\n]*
    | (?P<name> [A-Za-z]\w* (?: > [A-Za-z]\w* )? )
    | (?P<number> [-+]? (?: [0-9]+ (?: \.[0-9]* )? | \.[0-9]+ ) (?: [eE][-+]?[0-9]+ )? (?![A-Za-z0-9_.]) )
    | (?P<string> " (?: [^"\\\n] | \\["\\] )* " )
    | (?P<sign> [:,=()\[\]] )""",
    re.ASCII | re.VERBOSE,
)
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
                problems.add(at, "';' ends no statement")
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
                    problems.add(at, f"{sign!r} closes no bracket" if not open_ else _other(text, open_[-1], sign))
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
    """Return the statement of a part, the part of the next one if a ``;`` is missing between them, or None."""
    if text.count(",", part.start, part.end) > MAX_ITEMS:
        problems.add(part.start, f"a statement has at most {MAX_ITEMS:,} values")
        return None
    try:
        return _Parser(text, part).statement()
    except _Mistake as mistake:
        problems.add(*mistake.args)
        return None
    except _MissingEnd as missing:
        end, following = missing.args
        problems.add(end, "';' is missing")
        return Part(following, part.end)


class _Mistake(Exception):
    """A place in the text, and the mistake there."""


class _MissingEnd(Exception):
    """The places where a ``;`` is missing, and where the next statement starts."""


NAME, NUMBER, STRING, END = "a name", "a number", "a string", "';'"
VALUE = {NAME, NUMBER, STRING, "'['"}
ORDER = (END, "':'", "','", NAME, NUMBER, "'['", "')'", "']'", STRING)
"""The kinds of tokens as an error lists them."""


class _Parser:
    """Parses one statement by recursive descent. ``kind``, ``written`` and ``at`` are those of the current token."""

    def __init__(self, text: str, part: Part) -> None:
        self.text, self.part, self.position = text, part, part.start
        self._advance()

    def _advance(self) -> None:
        while self.position < self.part.end:
            match = _TOKEN.match(self.text, self.position, self.part.end)
            if match is None:
                raise _Mistake(*_character(self.text, self.position))
            self.position = match.end()
            if match.lastgroup:
                self.at, self.written = match.start(), match[0]
                self.kind = repr(match[0]) if match.lastgroup == "sign" else f"a {match.lastgroup}"
                return
        self.at, self.written, self.kind = self.part.end, "", END

    def statement(self) -> Statement:
        at = self.at
        block = self._name()
        if self.kind != "':'":
            self._refuse("':'")
        self._advance()
        name = self._name()
        items = []
        while self.kind != END:
            args = [self._argument(END)]
            while self.kind in VALUE:
                args.append(self._argument())
            items.append(tuple(args))
            if self.kind == "','":
                self._advance()
            elif self.kind != END:
                self._refuse(END, "','", *VALUE)
        return Statement(block, name, tuple(items), at, self.part.above, self.part.beside, self.part.gap)

    def _name(self) -> Word:
        if self.kind != NAME:
            self._refuse(NAME)
        word = Word(self.written, self.at)
        self._advance()
        return word

    def _argument(self, *closing: str) -> Arg:
        """Parse an argument; ``closing`` could stand here, too."""
        if self.kind != NAME:
            value = self._value(*closing)
            return Arg("", value, value.at)
        word = self._name()
        if self.kind == "'='":
            self._advance()
            return Arg(word.name, self._value(), word.at)
        return Arg("", self._word_or_call(word), word.at)

    def _value(self, *closing: str) -> Value:
        at, written = self.at, self.written
        if self.kind == NAME:
            return self._word_or_call(self._name())
        if self.kind not in VALUE:
            self._refuse(*VALUE, *closing)
        kind = self.kind
        self._advance()
        if kind == NUMBER:
            return Number(written, at)
        if kind == STRING:
            return String(re.sub(r"\\(.)", r"\1", written[1:-1]), at)
        values = []
        while self.kind != "']'":
            values.append(self._value("']'"))
            self._separate("']'")
        self._advance()
        return Items(tuple(values), at)

    def _word_or_call(self, word: Word) -> Word | Call:
        if self.kind != "'('":
            return word
        self._advance()
        args = []
        while self.kind != "')'":
            args.append(self._argument("')'"))
            self._separate("')'")
        self._advance()
        return Call(word.name, tuple(args), word.at)

    def _separate(self, closing: str) -> None:
        if self.kind == "','":
            self._advance()
        elif self.kind != closing:
            self._refuse("','", closing)

    def _refuse(self, *expected: str) -> NoReturn:
        """Raise for the current token."""
        before = self.text[self.part.start : self.at]
        if self.kind == "':'":
            last = re.search(r"\S(?=\s*(?<!\w)[A-Za-z]\w*\s*\Z)", before)
            if last and _is_closed(before):
                end = self.part.start + last.end()
                raise _MissingEnd(end, end + len(self.text[end : self.at]) - len(self.text[end : self.at].lstrip()))
            raise _Mistake(self.at, "':' is not allowed here, did you mean '='?")
        if expected == ("':'",):
            name = before.rstrip()
            place = self.part.start + len(name)
            raise _Mistake(place, f"':' is missing behind the block's name {name.split()[-1]!r}")
        if self.kind == "'['" and re.search(r"(?<!\w)[A-Za-z]\w*\s*\Z", before):
            raise _Mistake(self.at, "'=' is missing before '[', did you mean '=['?")
        names = sorted(expected, key=ORDER.index)
        here = END if self.kind == END else repr(self.written)
        listed = f"{', '.join(names[:-1])}{' or ' * bool(names[1:])}{names[-1]}"
        raise _Mistake(self.at, f"{here} is not allowed here; expected {listed}")


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
