"""Tests of finding the place of a layer or setting in the user's code."""

from dataclasses import replace

import pytest

from ddlf.extras.advice.facts import AppFacts, LayerFacts
from ddlf.extras.advice.source import UserSources

TEXT = """\
import keras
from keras import layers

RATE = 0.1


def build():
    model = keras.Sequential()
    for units in (64, 32):
        model.add(layers.Dense(units, activation="relu"))
    model.add(layers.Dropout(0.3))
    model.add(layers.Dense(10, activation="softmax", name="last"))
    model.add(layers.Dense(10))
    model.compile(optimizer=keras.optimizers.SGD(RATE),
                  loss="mse",
                  metrics=["accuracy"])
    return model


class App(ddlf.IApp):  # ddlf: ignore[D11] rare on purpose
    batch_size = 8

    def load_dataset(self):
        text = "# ddlf: ignore[D01]"
        # ddlf: ignore[D03, D04] scaled in the model
        (self.x_train, self.y_train), _ = load()

    def create_model(self):
        self.model = build()
"""


def dense(name, units, activation):
    return LayerFacts(name=name, kind="Dense", config={"units": units, "name": name}, activation=activation)


FACTS = AppFacts(
    layers=(
        dense("dense", 64, "relu"),
        dense("dense_1", 32, "relu"),
        LayerFacts(name="dropout", kind="Dropout", config={"rate": 0.3}),
        dense("last", 10, "softmax"),
        dense("dense_2", 10, "linear"),
    )
)


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "app.py").write_text(TEXT)
    return UserSources([tmp_path / "app.py", tmp_path / "gone.py"], "App")


@pytest.mark.parametrize(
    ("at", "line"),
    [
        (("layer", "dense"), 10),
        (("layer", "dense_1"), 10),
        (("layer", "dropout"), 11),
        (("layer", "last"), 12),
        (("layer", "dense_2"), 13),
        (("layer", "unknown"), 20),
        (("optimizer", "rate"), 14),
        (("loss", ""), 15),
        (("metric", ""), 16),
        (("data", "x_train['left']"), 26),
        (("data", "x_test"), 23),
        (("setting", "batch_size"), 21),
        (("setting", "slots"), 20),
        (("method", "create_model"), 28),
        (("app", ""), 20),
    ],
    ids=str,
)
def test_the_subject_of_a_finding_has_its_line(sources, at, line):
    assert sources.position(at, FACTS).line == line


def test_a_layer_is_found_by_its_position_among_equal_ones(tmp_path):
    (tmp_path / "app.py").write_text("a = Dense(8)\nb = Dense(9)\nc = Dense(8)\n")
    sources = UserSources([tmp_path / "app.py"], "App")
    facts = AppFacts(layers=(dense("a", 8, "linear"), dense("b", 9, "linear"), dense("c", 8, "linear")))
    assert [sources.position(("layer", name), facts).line for name in "abc"] == [1, 2, 3]
    assert sources.position(("layer", "d"), replace(facts, layers=())) is None


def test_comments_ignore_a_rule_for_a_line_or_a_class(sources):
    (file,) = sources.files
    assert [(ignore.id, ignore.lines, ignore.reason) for ignore in file.ignores()] == [
        ("D11", None, "rare on purpose"),
        ("D03", frozenset({25, 26}), "scaled in the model"),
        ("D04", frozenset({25, 26}), "scaled in the model"),
    ]


def test_an_unreadable_file_is_skipped(tmp_path):
    (tmp_path / "broken.py").write_text("def (:\n")
    assert UserSources([tmp_path / "broken.py"], "App").position(("app", ""), FACTS) is None


def test_a_file_is_parsed_only_if_a_question_needs_its_syntax_tree(tmp_path):
    (tmp_path / "app.py").write_text(TEXT)
    (tmp_path / "beside.py").write_text("def other():\n    return adapt(1)\n")
    sources = UserSources([tmp_path / "app.py", tmp_path / "beside.py"], "App")
    app, beside = sources.files
    assert not sources.calls({"fit_transform"})
    assert sources.calls({"adapt"})
    assert "tree" in vars(beside)
    assert "tree" not in vars(app)
    assert len(sources.ignores()) == 3
    assert "tree" in vars(app)


@pytest.mark.parametrize("text", ["def broken(:  # ddlf: ignore[D01]", "\0 ddlf: adapt()"])
def test_a_file_that_is_not_python_has_no_places(tmp_path, text):
    (tmp_path / "app.py").write_text(text)
    sources = UserSources([tmp_path / "app.py"], "App")
    assert (sources.ignores(), sources.calls({"adapt"}), sources.class_(), sources.method("fit")) == (
        [],
        False,
        None,
        None,
    )
