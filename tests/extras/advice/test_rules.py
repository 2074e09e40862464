"""Tests of every rule on facts: it finds its defect, and is silent about the near miss. ``test_programs`` tests programs."""

from dataclasses import replace

import pytest

from ddlf.errors import ConfigError
from ddlf.extras.advice.facts import ArrayFacts, LabelFacts, Shared
from ddlf.extras.advice.rule import Finding, Rule, check_rules, find_rule
from ddlf.extras.advice.rules import RULES
from tests.extras.advice.cases import (
    CASES,
    CLASSES,
    CONV,
    FACTS,
    HEAD,
    HIDDEN,
    LAST,
    NORM,
    POOL,
    REAL,
    X,
    Y,
    data,
    dense,
    head,
    layer,
    layers,
    observed,
    optimizer,
    x,
    y,
)
from tests.extras.advice.programs import PROGRAMS


def test_each_rule_has_facts_and_a_program_with_its_defect_and_a_near_miss():
    ids = [rule.id for rule in RULES]
    assert ids == sorted(set(ids), key=lambda id: ("DLMTCR".index(id[0]), id))
    assert list(CASES) == ids
    assert [rule.id for rule in RULES if rule.id not in PROGRAMS] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_a_rule_finds_its_defect_and_is_silent_about_the_near_miss(rule):
    bad, near_miss = CASES[rule.id]
    (advice, *_), failed = check_rules([rule], bad)
    assert failed == []
    assert advice.rule is rule
    assert advice.finding.message
    assert not advice.finding.message.endswith(".")
    assert check_rules([rule], near_miss) == ([], [])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_rule_docstring_explains_reason_fix_and_source(rule):
    assert all((rule.reason, rule.fix, rule.source))


def test_healthy_and_unknown_facts_have_no_findings():
    from ddlf.extras.advice.facts import AppFacts

    assert check_rules(RULES, FACTS) == ([], [])
    assert check_rules(RULES, AppFacts()) == ([], [])


def test_repeated_samples_of_xor_allow_a_high_rate():
    rates = [rule for rule in RULES if rule.id == "T01"]
    high = optimizer(kind="Adam", rate=0.05)
    repeated = replace(high, samples=256, rows=replace(high.rows, examined=256, distinct=4))
    assert len(check_rules(rates, high)[0]) == 1
    assert check_rules(rates, repeated) == ([], [])


def test_a_loss_with_a_lower_limit_and_a_frozen_backbone_need_not_overfit():
    stuck = CASES["M21"][0]
    by_heart = [rule for rule in RULES if rule.id == "M21"]
    soft = replace(stuck, arrays=(X, replace(Y, labels=LabelFacts(kind="shares", sums=(1.0, 1.0)))))
    frozen = replace(stuck, layers=(replace(HIDDEN, trained=0), LAST, replace(HIDDEN, name="more", trained=0)))
    assert len(check_rules(by_heart, stuck)[0]) == 1
    assert check_rules(by_heart, soft) == check_rules(by_heart, frozen) == ([], [])


def test_units_before_a_batch_normalization_are_not_taken_for_dead():
    dead = replace(CASES["M26"][0], layers=(HIDDEN, NORM, LAST))
    assert check_rules([rule for rule in RULES if rule.id == "M26"], dead) == ([], [])


@pytest.mark.parametrize(
    ("changes", "severity", "change"),
    [
        ({"kind": "SGD", "rate": 0.05, "momentum": 0.999}, "W", "momentum"),
        ({"kind": "SGD", "rate": 0.6, "momentum": 0.9}, "W", ""),
        ({"kind": "SGD", "rate": 0.1, "momentum": 0.9}, None, None),
        ({"kind": "SGD", "rate": 0.001}, "I", " momentum"),  # the run makes 320 steps
        ({"kind": "Adam", "rate": 0.00001}, "I", ""),
        ({"kind": "Adam", "rate": 0.0}, "E", ""),
        ({"kind": "Adam", "rate": 0.05}, "W", ""),
    ],
)
def test_a_rate_is_judged_with_momentum_and_the_steps_of_the_run(changes, severity, change):
    assert check_rules(
        [rule for rule in RULES if rule.id == "T01"], replace(optimizer(kind="Adam", rate=0.05), samples=4)
    ) == ([], [])
    findings, _ = check_rules([rule for rule in RULES if rule.id == "T01"], optimizer(**changes))
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert [" ".join(part.argument for part in finding.finding.changes) for finding in findings] == (
        [change] if severity else []
    )


def test_a_single_bias_may_cancel_out():
    rule = [rule for rule in RULES if rule.id == "M24"]
    assert check_rules(rule, observed(first=1.0, still=["hidden/bias"])) == ([], [])
    assert len(check_rules(rule, observed(first=1.0, still=["hidden/kernel", "hidden/bias"]))[0]) == 1


def test_gradients_that_are_not_finite_are_reported_as_nan_of_the_first_batch():
    rule = [rule for rule in RULES if rule.id == "M20"]
    (advice,), _ = check_rules(rule, observed(gradients={"hidden/kernel": float("nan"), "output/kernel": 1.0}))
    assert advice.finding.subject == ("layer", "hidden")
    assert check_rules(rule, observed(gradients={"hidden/kernel": 0.1})) == ([], [])


def test_a_rule_that_raises_is_reported_and_does_not_stop_other_rules():
    def broken(facts):
        raise KeyError("loss")
        yield Finding("")

    intact = next(rule for rule in RULES if rule.id == "D01")
    rules = [Rule("X01", "E", "a broken rule", "quick", broken), intact]
    findings, failed = check_rules(rules, CASES["D01"][0])
    assert [finding.rule.id for finding in findings] == ["D01"]
    assert [(failure.rule.id, failure.error) for failure in failed] == [("X01", "KeyError: 'loss'")]


def test_an_unknown_rule_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"app.py:3: there is no rule 'L2', did you mean L02\?"):
        find_rule(RULES, "L2", "app.py:3")
    assert find_rule(RULES, "l02", "").id == "L02"


def test_targets_are_unreachable_if_steps_are_limited():
    large = [rule for rule in RULES if rule.id == "D12"]
    far = replace(CASES["D12"][1], arrays=(X, replace(REAL, low=25.0, high=346.0, std=77.0)))
    slow = replace(far, optimizer=replace(far.optimizer, kind="Adam", rate=0.0001))
    bounded = replace(slow, layers=(replace(HIDDEN, activation="tanh"), replace(LAST, activation="linear")))
    assert len(check_rules(large, bounded)[0]) == 1
    assert check_rules(large, replace(bounded, optimizer=replace(far.optimizer, kind="Adam", rate=0.01))) == ([], [])
    assert check_rules(large, replace(bounded, optimizer=replace(far.optimizer, kind="SGD", rate=0.01))) == ([], [])


def test_a_model_without_any_activation_is_found_over_pooling_and_skips():
    pairs = [rule for rule in RULES if rule.id == "M02"]
    conv = replace(CONV, activation="linear")
    pooled = layers(conv, POOL, conv, layer("Flatten"))
    assert [advice.finding.changes[0].target for advice in check_rules(pairs, pooled)[0]] == ["conv2d_0"]
    assert check_rules(pairs, layers(conv, POOL, CONV, layer("Flatten"))) == ([], [])
    assert check_rules(pairs, layers(conv, layer("LayerNormalization"), conv)) == ([], [])


def test_a_softmax_layer_between_layers_counts_as_a_hidden_activation():
    inner = [rule for rule in RULES if rule.id == "M07"]
    assert len(check_rules(inner, layers(dense("linear"), layer("Softmax", activation="softmax"), dense()))[0]) == 1
    assert check_rules(inner, layers(dense("linear"), layer("Softmax", activation="softmax"), layer("Multiply"))) == (
        [],
        [],
    )


@pytest.mark.parametrize(
    ("distinct", "count", "severity"), [(1593, 5, "I"), (1600, 5, "W"), (1593, 30, "W"), (1500, 45, "W")]
)
def test_shared_samples_are_only_a_note_if_training_has_as_many_duplicates(distinct, count, severity):
    shared = Shared(part="test", count=count, of=400, pairs=((1, 2),))
    facts = replace(FACTS, rows=replace(FACTS.rows, examined=1600, distinct=distinct, shared=(shared,)))
    ((finding,), _) = check_rules([rule for rule in RULES if rule.id == "D05"], facts)
    assert finding.severity == severity


def test_zero_weights_beside_another_path_are_intended():
    rule = [rule for rule in RULES if rule.id == "M01"]
    facts = layers(dense(equal=0.0), dense())
    assert len(check_rules(rule, facts)[0]) == 1
    sampling = layer("Sampling", reads=("dense_0", "dense_1"))
    assert check_rules(rule, replace(facts, layers=(*facts.layers, sampling))) == ([], [])


def test_bad_steps_with_a_loss_of_keras_do_not_mean_a_wrong_sign():
    rule = [rule for rule in RULES if rule.id == "L21"]
    assert check_rules(rule, replace(CASES["L21"][0], heads=(replace(HEAD, loss="sce"),))) == ([], [])


@pytest.mark.parametrize(("size", "epochs", "is_found"), [(512, 10, True), (512, 200, False), (32, 10, False)])
def test_a_batch_of_all_samples_is_found_if_the_run_makes_few_steps(size, epochs, is_found):
    facts = replace(FACTS, samples=115, settings={**FACTS.settings, "batch_size": size, "master_epochs": epochs})
    assert bool(check_rules([rule for rule in RULES if rule.id == "T06"], facts)[0]) == is_found


@pytest.mark.parametrize(("fades", "is_found"), [(40, True), (400, False), (None, False)])
def test_a_schedule_that_is_nearly_0_before_a_quarter_of_the_run_is_found(fades, is_found):
    facts = replace(optimizer(schedule="ExponentialDecay", fades=fades), samples=1000)  # the run makes 320 steps
    assert bool(check_rules([rule for rule in RULES if rule.id == "T07"], facts)[0]) == is_found


def test_a_single_feature_that_follows_a_number_is_a_note():
    rule = [rule for rule in RULES if rule.id == "D08"]
    facts = replace(head(REAL, loss="mse"), rows=replace(FACTS.rows, linear_feature=("x_train", 5, 0.9987)))
    ((finding,), _) = check_rules(rule, facts)
    assert (finding.severity, "feature 5 of x_train" in finding.finding.message) == ("I", True)
    assert check_rules(rule, replace(facts, heads=(HEAD,))) == ([], [])


def test_repeated_batches_are_reported_for_generators_and_not_for_small_tables():
    rule = [rule for rule in RULES if rule.id == "D06"]
    few = replace(FACTS, rows=replace(FACTS.rows, examined=2016, distinct=32, doubled=((0, 32),)))
    assert check_rules(rule, few) == ([], [])
    ((finding,), _) = check_rules(rule, replace(few, observations={"taken": True}))
    assert (finding.severity, "32 different samples of 2,016" in finding.finding.message) == ("W", True)


def test_samples_sorted_by_label_are_a_warning_without_shuffling():
    rule = [rule for rule in RULES if rule.id == "D09"]
    is_sorted = y(labels=replace(Y.labels, is_sorted=True))
    severities = [
        check_rules(rule, replace(is_sorted, settings={**FACTS.settings, "shuffle": how}, from_files=files))[0][
            0
        ].severity
        for how, files in ((None, True), ("none", True), ("none", False))
    ]
    assert severities == ["I", "W", "I"]


@pytest.mark.parametrize(
    ("train", "test", "is_found"),
    [
        ((8.4, 600), (3.5, 600), True),
        ((8.4, 600), (3.5, 150), False),
        ((8.4, 600), (5.0, 600), False),
        ((20.0, 600), (3.9, 100), True),
    ],
)
def test_a_test_set_with_less_predictable_labels_than_its_size_explains_is_found(train, test, is_found):
    facts = observed(related={"train": train, "test": test})
    assert bool(check_rules([rule for rule in RULES if rule.id == "D24"], facts)[0]) == is_found


def test_unrelated_labels_are_named_with_their_output():
    facts = observed(related={"train": (1.0, 600), "test": (0.5, 600), "of": "y_train['digit']"})
    ((finding,), _) = check_rules([rule for rule in RULES if rule.id == "D24"], facts)
    assert finding.finding.subject == ("data", "y_train['digit']")


@pytest.mark.parametrize(
    ("samples", "tested", "is_found"),
    [(5, 173, True), (40, 63, False), (40, 121, True), (150, 1189, False), (0, 360, False)],
)
def test_less_training_than_test_is_found(samples, tested, is_found):
    other = ArrayFacts(name="x_test", part="test", shape=(tested, 20))
    facts = replace(data(replace(X, shape=(samples, 20)), REAL, other), samples=samples)
    assert bool(check_rules([rule for rule in RULES if rule.id == "D22"], facts)[0]) == is_found


@pytest.mark.parametrize(("samples", "is_found"), [(115, True), (400, True), (30, False), (1000, True)])
def test_a_run_of_a_few_steps_is_found_in_small_data_as_well(samples, is_found):
    facts = replace(FACTS, samples=samples, settings={**FACTS.settings, "master_epochs": 1})
    assert bool(check_rules([rule for rule in RULES if rule.id == "T14"], facts)[0]) == is_found


def test_a_normalization_after_a_scaling_is_accepted_for_trained_weights():
    rule = [rule for rule in RULES if rule.id == "M38"]
    first = replace(layer("Normalization"), untouched=True)
    assert len(check_rules(rule, layers(first))[0]) == 1
    assert check_rules(rule, layers(layer("Rescaling"), first)) == ([], [])


def test_all_heads_after_a_single_unit_are_found():
    rule = [rule for rule in RULES if rule.id == "M31"]
    shared = layers(dense(), dense(width=1))
    other = replace(dense(width=4), name="other", reads=("dense_1",))
    ((finding,), _) = check_rules(rule, replace(shared, layers=(*shared.layers, other)))
    assert finding.finding.subject == ("layer", "dense_1")


def test_a_hidden_penalty_is_found_by_its_share_of_the_first_loss():
    rule = [rule for rule in RULES if rule.id == "M15"]
    assert len(check_rules(rule, observed(loss=135.0, penalties=132.0))[0]) == 1
    assert check_rules(rule, observed(loss=2.5, penalties=0.2)) == ([], [])


def test_samples_of_another_shape_are_accepted_with_an_own_training_step():
    shape = [rule for rule in RULES if rule.id == "M17"]
    assert len(check_rules(shape, CASES["M17"][0])[0]) == 1
    assert check_rules(shape, replace(CASES["M17"][0], custom=frozenset({"step"}))) == ([], [])


@pytest.mark.parametrize(("loss", "activation", "also"), [("mse", "softmax", ()), ("bce", "sigmoid", ("softmax",))])
def test_the_loss_is_changed_for_labels_that_are_class_numbers(loss, activation, also):
    facts = head(CLASSES, loss=loss, activation=activation)
    findings, _ = check_rules([rule for rule in RULES if rule.id in ("L03", "L04", "L07")], facts)
    changes = [change for advice in findings for change in advice.finding.changes]
    assert [change.value for change in changes] == ["sparse_categorical_crossentropy", *also]


def test_pictures_are_scaled_by_channel_and_features_separately():
    rule = next(rule for rule in RULES if rule.id == "D03")
    for shape, axis in (((1000, 20), "axis=0"), ((1000, 8, 8, 3), "axis=(0, 1, 2)")):
        ((finding,), _) = check_rules([rule], x(shape=shape, low=-300.0, high=400.0, loudest=120.0))
        assert axis in finding.finding.changes[0].value[0]


def test_very_many_saturating_layers_need_more_than_another_activation():
    rule = next(rule for rule in RULES if rule.id == "M04")
    for count in (6, 40):
        ((finding,), _) = check_rules([rule], layers(*[dense("sigmoid")] * count))
        assert len(finding.finding.changes) == (count if count < 20 else 0)


def test_steps_count_all_epochs_and_incomplete_batches():
    facts = replace(FACTS, samples=1000, settings={"batch_size": 32, "master_epochs": 10, "worker_epochs": 3})
    assert facts.steps == 10 * 32
    assert facts.steps_of(3) == 10 * 11


def test_a_rate_above_the_usual_one_is_not_low_because_of_few_steps():
    rule = [rule for rule in RULES if rule.id == "T01"]
    settings = {"batch_size": 500, "master_epochs": 1}
    assert check_rules(rule, replace(optimizer(kind="Adam", rate=0.002), settings=settings)) == ([], [])
    assert check_rules(rule, replace(optimizer(kind="Adam", rate=0.0005), settings=settings))[0] != []


@pytest.mark.parametrize(
    ("activation", "cut", "problem"),
    [("sigmoid", 0.0, "always"), ("softmax", 1.0, "never"), ("sigmoid", 0.9, ""), ("linear", 0.0, ""), ("", 2.0, "")],
)
def test_a_metric_with_an_unreachable_threshold_is_found(activation, cut, problem):
    facts = head(shape=(1,), activation=activation, loss="bce", metrics=(), cuts=(("Recall", cut),))
    findings, _ = check_rules([rule for rule in RULES if rule.id == "L17"], facts)
    assert [advice.finding.message.endswith(f"a {activation} is {problem}") for advice in findings] == (
        [True] if problem else []
    )
