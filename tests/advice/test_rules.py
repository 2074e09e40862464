"""Every rule: it finds its defect, and is silent at the near miss; programs that have both are in ``test_programs``."""

import re
from dataclasses import replace

import pytest

from ddlf.advice.facts import Labels
from ddlf.advice.rule import LEVELS, Found, Rule, look, named
from ddlf.advice.rules import RULES
from ddlf.errors import ConfigError
from tests.advice.cases import CASES, FACTS, HIDDEN, LAST, NORM, X, Y, optimizer, seen
from tests.advice.programs import PROGRAMS


def test_each_rule_has_facts_and_a_program_with_its_defect_and_a_near_miss():
    ids = [rule.id for rule in RULES]
    assert ids == sorted(set(ids), key=lambda id: ("DLMTCR".index(id[0]), id))
    assert list(CASES) == ids
    assert [rule.id for rule in RULES if rule.id not in PROGRAMS] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_finds_its_defect_and_is_silent_at_the_near_miss(rule):
    bad, near = CASES[rule.id]
    (found, *_), failed = look([rule], bad)
    assert failed == []
    assert found.rule is rule
    assert found.found.what
    assert not found.found.what.endswith(".")
    assert look([rule], near) == ([], [])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_says_in_sentences_why_it_matters_what_to_do_and_who_says_so(rule):
    assert rule.level in LEVELS
    assert re.fullmatch(r"[DLMTCR]\d\d", rule.id)
    for text in (rule.why, rule.fix):
        assert text[0].isupper() or text.startswith(("categorical", "sparse"))
        assert text.endswith((".", ")."))
    assert rule.source
    assert rule.title[0].islower() or rule.title[0].isupper()


def test_nothing_is_found_in_facts_that_are_well_and_in_facts_of_which_nothing_is_known():
    from ddlf.advice.facts import Facts

    assert look(RULES, FACTS) == ([], [])
    assert look(RULES, Facts()) == ([], [])


def test_the_four_samples_of_xor_bear_a_high_rate_however_often_they_are_repeated():
    rates = [rule for rule in RULES if rule.id == "T01"]
    high = optimizer(kind="Adam", rate=0.05)
    repeated = replace(high, samples=256, rows=replace(high.rows, looked=256, distinct=4))
    assert len(look(rates, high)[0]) == 1
    assert look(rates, repeated) == ([], [])


def test_a_loss_that_has_a_floor_and_a_frozen_backbone_need_not_be_learnt_by_heart():
    stuck = CASES["M21"][0]
    by_heart = [rule for rule in RULES if rule.id == "M21"]
    soft = replace(stuck, arrays=(X, replace(Y, labels=Labels(kind="shares", sums=(1.0, 1.0)))))
    frozen = replace(stuck, layers=(replace(HIDDEN, trained=0), LAST, replace(HIDDEN, name="more", trained=0)))
    assert len(look(by_heart, stuck)[0]) == 1
    assert look(by_heart, soft) == look(by_heart, frozen) == ([], [])


def test_units_before_a_batch_normalization_are_not_taken_for_dead():
    dead = replace(CASES["M26"][0], layers=(HIDDEN, NORM, LAST))
    assert look([rule for rule in RULES if rule.id == "M26"], dead) == ([], [])


@pytest.mark.parametrize(
    ("changes", "severity", "change"),
    [
        ({"kind": "SGD", "rate": 0.05, "momentum": 0.999}, "W", "momentum"),
        ({"kind": "SGD", "rate": 0.6, "momentum": 0.9}, "W", ""),
        ({"kind": "SGD", "rate": 0.1, "momentum": 0.9}, None, None),
        ({"kind": "SGD", "rate": 0.001}, "I", ""),  # in 320 steps
        ({"kind": "Adam", "rate": 0.00001}, "I", ""),
        ({"kind": "Adam", "rate": 0.0}, "E", ""),
        ({"kind": "Adam", "rate": 0.05}, "W", ""),
    ],
)
def test_a_rate_is_seen_together_with_momentum_and_the_steps_of_the_run(changes, severity, change):
    assert look(
        [rule for rule in RULES if rule.id == "T01"], replace(optimizer(kind="Adam", rate=0.05), samples=4)
    ) == ([], [])
    found, _ = look([rule for rule in RULES if rule.id == "T01"], optimizer(**changes))
    assert [one.severity for one in found] == ([severity] if severity else [])
    assert [one.name for finding in found for one in finding.found.changes] == ([change] if severity else [])


def test_a_bias_alone_may_cancel_out():
    rule = [rule for rule in RULES if rule.id == "M24"]
    assert look(rule, seen(first=1.0, still=["hidden/bias"])) == ([], [])
    assert len(look(rule, seen(first=1.0, still=["hidden/kernel", "hidden/bias"]))[0]) == 1


def test_gradients_that_are_no_numbers_are_told_as_nan_of_the_first_batch():
    rule = [rule for rule in RULES if rule.id == "M20"]
    (found,), _ = look(rule, seen(gradients={"hidden/kernel": float("nan"), "output/kernel": 1.0}))
    assert found.found.at == ("layer", "hidden")
    assert look(rule, seen(gradients={"hidden/kernel": 0.1})) == ([], [])


def test_a_rule_that_raises_is_told_and_stops_no_other():
    def broken(facts):
        raise KeyError("loss")
        yield Found("")

    whole = next(rule for rule in RULES if rule.id == "D01")
    rules = [Rule(id="X01", severity="E", title="", look=broken, why="", fix="", source=""), whole]
    findings, failed = look(rules, CASES["D01"][0])
    assert [finding.rule.id for finding in findings] == ["D01"]
    assert [(one.rule.id, one.why) for one in failed] == [("X01", "KeyError: 'loss'")]


def test_an_unknown_rule_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ConfigError, match=r"app.py:3: there is no rule 'L2', did you mean L02\?"):
        named(RULES, "L2", "app.py:3")
    assert named(RULES, "l02", "").id == "L02"
