"""Tests of formatting texts: the model and the comments stay the same, and any input gives a text or a ``NotationError``."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlf.errors import NotationError
from ddlf.extras.text.language.blocks import TRAIN
from ddlf.extras.text.language.model import read, statements
from ddlf.extras.text.language.operators import OPERATORS, PROPERTIES
from ddlf.extras.text.language.printer import format
from tests.extras.text.language.texts import DENSE, DIGITS, HEADS, LM, SQUARE

NAMES = st.sampled_from(
    ["relu", "dense", "w", "b", "x", "Dense", "activation", "name", "to", "shape", "float16", "true"]
)
NUMBERS = st.one_of(st.integers(-9, 999).map(str), st.sampled_from(["1.5", "-.5", "2.", "1e-3", "0.10"]))
BREAKS = st.sampled_from(["", " ", "\n", "  \t", " # a remark; [(\n", "\r\n"])
SIZES = st.lists(st.integers(1, 9).map(str), max_size=3).map(lambda sizes: f"[{', '.join(sizes)}]")
STRINGS = st.text(st.characters(exclude_characters='"\\\n', codec="utf-8"), max_size=5).map('"{}"'.format)


def called(values):
    args = st.one_of(
        values, st.tuples(NAMES, BREAKS, values).map(lambda parts: f"{parts[0]}{parts[1].split('#')[0]}={parts[2]}")
    )
    return st.tuples(NAMES, st.lists(args, max_size=3), BREAKS).map(
        lambda parts: f"{parts[0]}({(',' + parts[2]).join(parts[1])})"
    )


VALUES = st.recursive(st.one_of(NUMBERS, NAMES, SIZES, STRINGS), called, max_leaves=4)
STATEMENTS = st.tuples(
    BREAKS,
    st.sampled_from(["a", "b", TRAIN]),
    BREAKS,
    st.sampled_from(PROPERTIES),
    st.lists(st.one_of(VALUES, called(VALUES)), max_size=4),
    BREAKS,
).map(lambda parts: f"{parts[0]}{parts[1]}:{parts[2]}{parts[3]} {', '.join(parts[4])}{parts[5]};")
TEXTS = st.lists(STATEMENTS, max_size=4).map("".join)


@st.composite
def models(draw):
    """Draw valid models with layers that keep the shape, macros, skips, casts and copies."""
    plain = st.sampled_from(
        [
            "relu()",
            "tanh()",
            "add(b)",
            "mul(2)",
            "cast(float16)",
            "leakyRelu(alpha=0.2)",
            "residual()",
            "softmax(axis=0)",
        ]
    )
    learned = st.integers(1, 6).map(lambda size: f"dense(shape=[{size}], activation=relu)")
    copies = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(
        lambda sizes: f"dense(shapes=[{', '.join(f'[{size}]' for size in sizes)}], activation=gelu)"
    )
    macro = draw(st.lists(plain.filter(lambda layer: layer != "residual()"), min_size=1, max_size=4))
    layers = draw(
        st.lists(
            st.one_of(learned, copies, st.just("block()"), plain.filter(lambda layer: layer != "residual()")),
            max_size=8,
        )
    )
    between = draw(BREAKS)
    return (
        f"a:input shape=[4];{between}a:layers {', '.join([*layers, 'dense(shape=[3], activation=softmax)'])};"
        f"a:output shape=[3];{between}{DENSE}block:layers {', '.join([*macro, 'residual()'])};"
    )


ANYTHING = st.one_of(
    TEXTS, st.text(max_size=80), st.text('ab:;,=()[]"#\\ \n1.-_Lλ', max_size=60), st.binary(max_size=40)
)


def is_the_same_model_in_its_one_form(text):
    formatted = format(text)
    assert format(formatted) == formatted
    assert read(formatted).graph == read(text).graph


def has_one_form_with_the_same_statements(text):
    formatted = format(text)
    assert format(formatted) == formatted
    assert statements(formatted, "m")[1].statements == statements(text, "m")[1].statements


def is_read_or_refused_with_its_places(text):
    for part in (text, text[len(text) // 3 :], text[: len(text) // 2]):
        positions = [(1, 1, "")]
        try:
            read(part)
        except NotationError as error:
            positions = error.problems
        assert positions
        assert all(line >= 1 and column >= 1 for line, column, _ in positions)


@pytest.mark.parametrize("examples", [8, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("texts", "check"),
    [
        (models(), is_the_same_model_in_its_one_form),
        (TEXTS, has_one_form_with_the_same_statements),
        (ANYTHING, is_read_or_refused_with_its_places),
    ],
    ids=["models", "texts", "anything"],
)
def test_made_up_texts_keep_their_promises(texts, check, examples):
    settings(max_examples=examples, deadline=None)(given(texts)(check))()


@pytest.mark.parametrize(
    "text",
    [
        "x(),",
        "1,",
        "a:x b;",
        "a:b ",
        "(",
        "[1],",
        ";",
        "a ",
        '"',
        "relu(a=1) ",
        "abcdef() ",
        DIGITS,
        LM,
        "a:layers relo();",
        "#\n",
    ],
)
def test_read_takes_linear_time(text):
    """The limit of processor time is far above the time of a quiet machine, but quadratic growth would take seconds."""
    read(DIGITS)  # creates the parser
    began = time.process_time()
    with pytest.raises(NotationError):
        read(("a:layers " if text[0] in "x1[r" else "") + text * (10_000 // len(text)))
    assert time.process_time() - began < 1


def test_long_word_takes_linear_time():
    read(DIGITS)
    began = time.process_time()
    for text in ("{}", "a:layers b {}", "a:layers {} [1];"):
        with pytest.raises(NotationError):
            read(text.format("gammaogularpow" * 10_000))
    assert time.process_time() - began < 3


@pytest.mark.parametrize("text", [DIGITS, SQUARE, HEADS, LM])
def test_format_keeps_the_model(text):
    assert read(format(text)).graph == read(text).graph


def test_format_keeps_comments_empty_lines_and_spellings():
    text = (
        "# A model\n\n\n\na:input   shape = [ 8 ];# what comes\n# what goes\na:output shape=[8];\n\na:layers relu(), # first\n"
        "  clamp(minValue=-.5,maxValue=1e-3),;\n# end"
    )
    assert format(text) == (
        "# A model\n\na:input shape=[8];  # what comes\n# what goes\na:output shape=[8];\n\n# first\n"
        "a:layers relu(), clamp(minValue=-.5, maxValue=1e-3);\n# end\n"
    )


def test_format_writes_a_long_statement_with_a_layer_per_line():
    text = f"a:layers {', '.join(['dense(shape=[10], activation=relu)'] * 4)};"
    assert format(text).splitlines()[0] == "a:layers"
    assert format(text).splitlines()[1:] == [f"    dense(shape=[10], activation=relu){end}" for end in ",,,;"]


def test_operator_names_are_readable():
    assert {"relu", "lstmCell", "attend", "reduceVariance", "batchNorm"} <= set(OPERATORS)
