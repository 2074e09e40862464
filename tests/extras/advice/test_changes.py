"""Tests of changes of the user's code: the written text, and unclear places, which are not changed."""

import subprocess
from dataclasses import replace

import pytest

from ddlf.extras.advice.changes import changed, diff, edits_of
from ddlf.extras.advice.rule import Change
from ddlf.extras.advice.source import UserSources
from tests.extras.advice.test_source import FACTS, TEXT


def after(text, *changes, folder):
    path = folder / "app.py"
    path.write_text(text)
    edits = edits_of(changes, UserSources([path], "App"), FACTS)
    return changed(edits).get(path)


@pytest.mark.parametrize(
    ("change", "before", "line"),
    [
        (Change("loss", "huber"), 'loss="mse"', 'loss="huber"'),
        (Change("metric", "mae", "accuracy"), '["accuracy"]', '["mae"]'),
        (Change("rate", 0.01), "RATE = 0.1", "RATE = 0.01"),
        (Change("optimizer", 0.9, argument="momentum"), "SGD(RATE)", "SGD(RATE, momentum=0.9)"),
        (Change("argument", 0.5, "dropout", "rate"), "Dropout(0.3)", "Dropout(0.5)"),
        (Change("argument", "relu", "last", "activation"), '10, activation="softmax"', '10, activation="relu"'),
        (Change("argument", "relu", "dense_2", "activation"), "Dense(10))", 'Dense(10, activation="relu"))'),
        (Change("remove", target="dropout"), "    model.add(layers.Dropout(0.3))\n", ""),
        (Change("setting", 32, "batch_size"), "batch_size = 8", "batch_size = 32"),
        (Change("setting", 2, "slots"), "    batch_size = 8", "    slots = 2\n    batch_size = 8"),
        (Change("data", ("a = 1", "b = 2")), "_ = load()", "_ = load()\n        a = 1\n        b = 2"),
    ],
    ids=str,
)
def test_a_change_is_made_at_its_place_in_the_source(change, before, line, tmp_path):
    assert TEXT.count(before) == 1
    assert after(TEXT, change, folder=tmp_path) == TEXT.replace(before, line)


@pytest.mark.parametrize(
    ("change", "before", "line"),
    [
        (Change("loss", "huber"), 'loss="mse"', "loss=own"),
        (Change("loss", "huber"), 'loss="mse"', 'loss={"a": "mse"}'),
        (Change("rate", 0.01), "RATE = 0.1", "RATE = float(input())"),
        (Change("argument", True, "dropout", "trainable"), "", ""),
        (Change("argument", "relu", "dense_2", "activation"), "Dense(10))", "Dense(10, **more))"),
        (Change("argument", "relu", "unknown", "activation"), "", ""),
        (Change("data", ("a = 1",)), "def load_dataset", "def load_other"),
    ],
    ids=str,
)
def test_an_unclear_place_is_not_changed(change, before, line, tmp_path):
    assert after(TEXT.replace(before, line), change, folder=tmp_path) is None
    assert after(TEXT.replace(before, line), Change("setting", 4, "batch_size"), change, folder=tmp_path) is None


@pytest.mark.parametrize(("value", "mended"), [(8, True), (4000, False)])
def test_a_setting_that_is_given_elsewhere_is_not_changed_in_the_class(value, mended, tmp_path):
    path = tmp_path / "app.py"
    path.write_text(TEXT)
    facts = replace(FACTS, settings={"batch_size": value, "slots": 2})
    for change, is_edited in ((Change("setting", 32, "batch_size"), mended), (Change("setting", 4, "slots"), False)):
        assert bool(edits_of([change], UserSources([path], "App"), facts)) == is_edited


def test_an_element_of_a_list_is_removed_with_its_comma(tmp_path):
    for text, left in (
        ("m = [\n    Dense(10),\n    Dropout(0.3),\n]\n", "m = [\n    Dense(10),\n]\n"),
        ("m = [Dense(10), Dropout(0.3)]\n", "m = [Dense(10)]\n"),
        ("m = [Dropout(0.3), Dense(10)]\n", "m = [Dense(10)]\n"),
        ("x = a\nx = Dropout(0.3)(x)\nx = b\n", "x = a\nx = b\n"),
    ):
        assert after(text, Change("remove", target="dropout"), folder=tmp_path) == left
    assert after("y = Dropout(0.3)(x)\n", Change("remove", target="dropout"), folder=tmp_path) is None


def test_the_first_of_two_overlapping_edits_is_made_and_the_diff_names_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "app.py"
    path.write_text(TEXT + "# ü")
    sources = UserSources([path], "App")
    edits = [*edits_of([Change("loss", "huber")], sources, FACTS), *edits_of([Change("loss", "mae")], sources, FACTS)]
    assert changed(edits) == {path: TEXT.replace('"mse"', '"huber"') + "# ü"}
    shown = diff(edits)
    assert shown.startswith("--- app.py\n+++ app.py\n@@ ")
    assert '-                  loss="mse",\n+                  loss="huber",\n' in shown


@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "marked"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_a_file_keeps_its_line_ends_and_its_byte_order_mark(start, end, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "app.py"
    original = start + TEXT.replace("\n", end)
    path.write_bytes(original.encode())
    edits = edits_of([Change("data", ("a = 1",)), Change("rate", 0.01)], UserSources([path], "App"), FACTS)
    expected = original.replace("_ = load()", f"_ = load(){end}        a = 1").replace("RATE = 0.1", "RATE = 0.01")
    assert changed(edits)[path] == expected
    patched = subprocess.run(["patch", "-p0"], input=diff(edits).encode(), capture_output=True)
    assert (patched.returncode, path.read_bytes()) == (0, expected.encode())


def test_tabs_stay_tabs_and_a_form_feed_does_not_end_a_line(tmp_path):
    text = "\f\n" + TEXT.replace("    ", "\t")
    for change in (Change("setting", 2, "slots"), Change("data", ("a = 1",))):
        compile(after(text, change, folder=tmp_path), "app.py", "exec")
    assert "\n\tslots = 2\n" in after(text, Change("setting", 2, "slots"), folder=tmp_path)
    assert after(text, Change("rate", 0.01), folder=tmp_path) == text.replace("RATE = 0.1", "RATE = 0.01")
