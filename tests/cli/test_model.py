"""``ddlf model``: show, check and format."""

import json

import pytest

from ddlf.cli import main
from tests.notation.texts import DIGITS


@pytest.fixture
def model(tmp_path, monkeypatch, capsys):
    """Runs an action with files of some texts; returns what was printed, the errors and the exit code."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **texts):
        for name, text in texts.items():
            (tmp_path / f"{name}.nnm").write_text(text)
        with pytest.raises(SystemExit) as ended:
            main.main(["model", *arguments])
        return *capsys.readouterr(), ended.value.code

    return run


def test_show_has_a_row_for_each_layer_with_its_shape_and_parameters(model):
    out, _, code = model("show", "a.nnm", a=DIGITS)
    assert code == 0
    assert ["5", "matmul(w)", "4", "[24]", "float32", "w2", "[48,", "24]", "(4,6)"] in [
        line.split() for line in out.splitlines()
    ]
    assert "output    digits: float32 [10] of 10, loss SCE\nmodel     4,546 parameters, 10 layers\n" in out


def test_show_as_json_has_the_same_facts(model):
    facts = json.loads(model("show", "a.nnm", "--json", a=DIGITS)[0])
    assert facts["parameters"] == 4546
    assert facts["layers"][1]["parameters"] == [
        {"name": "w1", "shape": [64, 48], "dtype": "float32", "count": 3072, "from_input": 1, "to_output": 9}
    ]


def test_check_names_all_that_is_wrong_in_all_files_and_where(model):
    out, err, code = model(
        "check", "a.nnm", "b.nnm", "c.nnm", a=DIGITS, b="a:input shape=[1];\na:layers rellu(), tanhh();"
    )
    assert code == 2
    assert out == "a.nnm: 4,546 parameters, 10 layers\n"
    assert err.splitlines() == [
        "b.nnm:2:10: unknown operator 'rellu', did you mean 'relu'?",
        "b.nnm:2:19: unknown operator 'tanhh', did you mean 'tanh'?",
        "c.nnm cannot be read: No such file or directory; name a file with the text of a model",
    ]


def test_check_tells_what_is_probably_not_meant(model):
    _, err, code = model("check", "a.nnm", a="a:input shape=[2]; a:output int32 shape=[2];")
    assert code == 0
    assert err.startswith("a.nnm:1:20: warning: float32 becomes int32")


def test_format_writes_files_that_have_another_form_and_with_check_only_says_so(model, tmp_path):
    out, _, code = model("format", "--check", "a.nnm", a=DIGITS)
    assert code == 1
    assert "ddlf model format a.nnm" in out
    assert (tmp_path / "a.nnm").read_text() == DIGITS
    assert model("format", "a.nnm")[::2] == ("wrote     a.nnm\n", 0)
    assert (tmp_path / "a.nnm").read_text().count("\n") == 5
    assert model("format", "--check", "a.nnm")[::2] == ("", 0)


def test_format_leaves_a_file_that_cannot_be_read_as_it_is(model, tmp_path):
    _, err, code = model("format", "a.nnm", a="a:input shape=[8\n")
    assert code == 2
    assert "a.nnm:1:15: '[' is not closed" in err
    assert (tmp_path / "a.nnm").read_text() == "a:input shape=[8\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a.nnm"]


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("a.h5", "a.h5 does not end in .keras; write a.keras"),
        ("there.keras", "there.keras exists"),
        ("no/a.keras", "there is no folder no"),
    ],
)
def test_convert_refuses_a_target_before_keras_is_imported(model, tmp_path, target, sentence):
    (tmp_path / "there.keras").write_text("mine")
    _, err, code = model("convert", "a.nnm", target, a=DIGITS)
    assert code == 2
    assert sentence in err
    assert (tmp_path / "there.keras").read_text() == "mine"
