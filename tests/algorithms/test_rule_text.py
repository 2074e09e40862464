"""Tests of rules as text: each is written and read back, and other text is refused with a sentence."""

from dataclasses import dataclass

import numpy as np
import pytest

from ddlf.algorithms.codec import CODEC, Float16, Int8, Outward, PowerSGD, TopK
from ddlf.algorithms.merge import MERGE, Krum, Mean, TrimmedMean
from ddlf.algorithms.outer import OUTER, Nesterov, Streaming, Subtract
from ddlf.algorithms.rule_text import Family, Named
from ddlf.errors import ConfigError
from ddlf.training.registry import SETTINGS

FAMILIES = [MERGE, OUTER, CODEC]
OTHER_NAMES = {"diloco": "nesterov", "fedavg": "subtract"}
NAMES = [pytest.param(family, name, id=name) for family in FAMILIES for name in family.names]


@pytest.mark.parametrize(("family", "name"), NAMES)
def test_each_rule_is_read_by_its_name_and_from_its_own_text(family, name):
    rule = family.read(name)
    assert family.read(str(rule)) == rule
    assert str(rule).partition(":")[0] == OTHER_NAMES.get(name, name)


def test_two_names_of_one_rule_are_the_same_value_and_the_same_text():
    assert OUTER.read("diloco") == OUTER.read("nesterov:0.7,0.9") == Nesterov(learning_rate=0.7, momentum=0.9)
    assert OUTER.read("diloco:0.4") == Nesterov(learning_rate=0.4)
    assert OUTER.read("fedavg") == Subtract(learning_rate=1)
    assert [str(OUTER.read(name)) for name in ("diloco", "fedavg")] == [str(Nesterov()), str(Subtract())]


@pytest.mark.parametrize(
    ("family", "texts", "rule"),
    [
        (MERGE, ["trimmed:beta=0.3", "trimmed:0.3"], TrimmedMean(beta=0.3)),
        (OUTER, ["nesterov:learning_rate=0.7,momentum=0.5", "nesterov:momentum=0.5"], Nesterov(momentum=0.5)),
        (OUTER, ["nesterov:learning_rate=0.7,momentum=0.5", "nesterov: momentum = 0.5 "], Nesterov(momentum=0.5)),
        (
            OUTER,
            ["nesterov:learning_rate=0.1,momentum=0.5", "nesterov:0.1,momentum=0.5"],
            Nesterov(learning_rate=0.1, momentum=0.5),
        ),
        (CODEC, ["int8"], Int8()),
        (CODEC, ["int8-block:block=64", "int8-block:64"], Int8(block=64)),
        (CODEC, ["topk:fraction=0.05", "topk:0.05"], TopK(fraction=0.05)),
        (Outward, ["delta:topk:fraction=0.05", "delta:topk:0.05"], Outward(TopK(fraction=0.05), delta=True)),
    ],
    # The id must not contain the family: its address differs between the processes that share the tests.
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_parameters_are_read_without_names_and_written_with_them(family, texts, rule):
    assert [family.read(text) for text in texts] == [rule] * len(texts)
    assert str(rule) == texts[0]


def test_rule_made_with_other_number_types_equals_its_text():
    """A checkpoint of one can therefore be resumed with the other."""
    assert str(OUTER.normalized(Nesterov(learning_rate=1))) == "nesterov:learning_rate=1.0,momentum=0.9"
    assert type(MERGE.normalized(Krum(bad=np.int64(2))).bad) is int
    with pytest.raises(ConfigError, match=r"bad must be a whole number, got '1\.5'"):
        MERGE.normalized(Krum(bad=1.5))

    class Own(Nesterov):
        pass

    assert type(OUTER.normalized(Own())) is Own


@pytest.mark.parametrize(
    ("family", "text", "sentence"),
    [
        (MERGE, "bulyan", "unknown merge 'bulyan'; choose one of mean, median, trimmed, krum"),
        (MERGE, "", "unknown merge ''; choose one of"),
        (MERGE, "trimed:0.1", "unknown merge 'trimed:0.1', did you mean 'trimmed'?"),
        (MERGE, "median:0.2", "merge 'median:0.2': median has no parameters; write it as median"),
        (MERGE, "trimmed:", "beta must be a number, got ''; write it as trimmed:beta=0.2"),
        (MERGE, "trimmed:beta=a", "beta must be a number, got 'a'"),
        (MERGE, "trimmed:bet=0.1", "trimmed has no parameter 'bet', did you mean 'beta'?"),
        (MERGE, "trimmed:0.1,0.2", "trimmed has no more parameters than beta"),
        (OUTER, "nesterov:momentum=0.9,momentum=0.8", "momentum is given twice"),
        (OUTER, "nesterov:0.1,learning_rate=0.2", "learning_rate is given twice"),
        (OUTER, "nesterov:momentum=1", "outer optimizer 'nesterov:momentum=1': momentum must be in [0, 1), got 1.0; write"),
        (CODEC, "int9", "unknown codec 'int9', did you mean 'int8'?"),
        (CODEC, "int8-block:1.5", "block must be a whole number, got '1.5'; write it as int8-block:block=4096"),
        (Outward, "topk", "weights cannot travel as 'topk:0.01': the lost part would never arrive; use float32"),
        (Outward, "delta:int9", "unknown codec 'int9'"),
    ],
)  # fmt: skip
def test_a_text_without_a_rule_is_refused_with_a_sentence(family, text, sentence):
    with pytest.raises(ConfigError) as refused:
        family.read(text)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "rule", "text"),
    [
        ("outer", Nesterov(learning_rate=1, momentum=0), "nesterov:learning_rate=1.0,momentum=0.0"),
        ("outer", Nesterov(learning_rate=np.float32(0.7)), "nesterov:learning_rate=0.699999988079071,momentum=0.9"),
        ("merge", TrimmedMean(beta=0), "trimmed:beta=0.0"),
        ("merge", Krum(bad=np.int64(2)), "krum:bad=2,keep=1"),
        ("codec", TopK(fraction=1), "topk:fraction=1.0"),
        ("codec", Int8(), "int8"),
        ("weights_codec", Float16(), "float16"),
        ("weights_codec", Outward(TopK(fraction=1), delta=True), "delta:topk:fraction=1.0"),
    ],
)
def test_an_object_equals_its_text(setting, rule, text):
    """Runs with the object and runs with the text write the same checkpoints."""
    read = SETTINGS[setting].check(setting, rule)
    assert str(rule) == str(read) == text
    assert read == SETTINGS[setting].check(setting, text)


@pytest.mark.parametrize(
    ("setting", "rule", "sentence"),
    [
        ("merge", Krum(bad=1.5), "merge 'krum:bad=1.5,keep=1': bad must be a whole number, got '1.5'"),
        ("merge", Krum(bad=True), "bad must be a whole number, got 'True'"),
        ("outer", Streaming(fragments=2.5), "fragments must be a whole number, got '2.5'"),
        ("codec", PowerSGD(rank=2.0), "rank must be a whole number, got '2.0'"),
        ("weights_codec", TopK(fraction=0.1), "weights cannot travel as 'topk:0.1'"),
        ("weights_codec", Nesterov(), "weights_codec must be a name, got Nesterov("),
        ("merge", Mean, "merge must be an object, got the class Mean; write Mean()"),
        ("codec", TopK, "codec must be an object, got the class TopK; write TopK()"),
    ],
)
def test_an_object_whose_text_would_be_refused_is_refused(setting, rule, sentence):
    with pytest.raises(ConfigError) as refused:
        SETTINGS[setting].check(setting, rule)
    assert sentence in str(refused.value)


def test_error_of_a_name_in_capitals_or_with_spaces_has_a_suggestion():
    for text in ("Median", "MEDIAN", " median", "median "):
        with pytest.raises(ConfigError, match="did you mean 'median'"):
            MERGE.read(text)


def test_a_rule_of_another_package_is_written_with_its_repr():
    @dataclass(frozen=True)
    class Own(Named):
        rate: float = 1.0

    family = Family("test", known=Own)
    assert str(Own(0.5)) == "known:rate=0.5"

    class More(Own):
        pass

    assert family.text(More(0.5)) == repr(More(0.5))
