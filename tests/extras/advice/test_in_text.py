"""Tests of findings about a text: they have its file and line, and comments in the text hide them."""

from types import SimpleNamespace

import pytest

from ddlf.extras.advice.advise import check_facts, known_ignores
from ddlf.extras.advice.network import as_layer
from ddlf.extras.advice.report import lines
from ddlf.extras.advice.source import UserSources, text_of
from ddlf.extras.text.training.notation import Notation
from tests.extras.advice.cases import CASES, FACTS

TEXT = """\
# ddlf: ignore[T01] tried
digits:input shape=[20];
digits:layers
    dense(shape=[32], activation=relu),
    Dropout(rate=0.9),
    dense(shape=[4], activation=softmax, name=end);
digits:output shape=[4];
dense:layers matmul(w), add(b), activation();

train:epochs 3; train:learning_rate 1;
train:data digits;  # ddlf: ignore[D01] known
"""


def written(text=TEXT, name="m.nnm"):
    notation = Notation(text, name)
    notation.layer_positions = {"matmul": text.index("dense(shape=[32]"), "dropout": text.index("Dropout")}
    return text_of(SimpleNamespace(notation=notation))


@pytest.mark.parametrize(
    ("at", "line"),
    [
        (("layer", "matmul"), 4),
        (("layer", "dropout"), 5),
        (("layer", "digits"), 2),
        (("layer", "normalization"), 2),
        (("loss", "digits"), 7),
        (("loss", ""), 7),
        (("optimizer", "rate"), 10),
        (("metric", "digits"), 2),
        (("data", "x_train"), 11),
        (("data", "y_train"), 11),
        (("setting", "master_epochs"), 10),
        (("setting", "batch_size"), 2),
        (("method", "load_dataset"), 11),
        (("app", ""), 2),
    ],
)
def test_a_finding_has_the_line_of_its_statement_in_the_text(at, line):
    position = UserSources([], "App", written()).position(at, FACTS)
    assert (str(position.path), position.line) == ("m.nnm", line)


def test_a_finding_about_unnamed_data_has_the_line_of_its_input():
    text = written(TEXT.replace("train:data digits;", ""))
    assert text.app("data", "x_train").line == 2
    assert text.app("data", "y_train['digits']").line == 7


def test_an_app_in_python_with_a_text_has_lines_of_both(tmp_path):
    (tmp_path / "app.py").write_text("class App:\n    def load_dataset(self):\n        self.x_train = 1\n")
    sources = UserSources([tmp_path / "app.py"], "App", written())
    positions = [
        sources.position(at, FACTS) for at in (("layer", "dropout"), ("data", "x_train"), ("optimizer", "rate"))
    ]
    assert [(position.path.name, position.line) for position in positions] == [
        ("m.nnm", 5),
        ("app.py", 3),
        ("m.nnm", 10),
    ]


def test_a_comment_in_a_text_hides_a_finding_and_an_unneeded_comment_is_reported():
    sources = UserSources([], "App", written())
    report = check_facts(CASES["D01"][0], sources, known_ignores(sources), ("quick",))
    assert (report.advice, report.ignored) == ((), 1)
    assert [ignore.id for ignore in report.unused] == ["T01"]
    sources = UserSources([], "App", written(TEXT.replace("D01", "D02")))
    (advice,) = check_facts(CASES["D01"][0], sources, known_ignores(sources), ("quick",)).advice
    assert advice.edits == ()
    report = check_facts(CASES["D01"][0], sources, [], ("quick",))
    assert "error     D01  m.nnm:11  3 of 20,000 values" in next(lines(report, 1))


def test_operators_are_translated_to_the_layers_of_the_rules():
    def layer(operator, parameters=(), inputs=1, **options):
        node = {"operator": operator, "operands": [], "options": options, "parameters": list(parameters)}
        return as_layer(node | {"types": ["float32"] * (inputs + 1)})

    assert layer("matmul", [["w1", [4, 2], "float32", ""]])[0] == "Dense"
    assert layer("matmul")[0] == "matmul"
    assert [layer("add", [["b1", [2], "float32", 0.0]])[0], layer("add", inputs=2)[0], layer("add")[0]] == [
        "Bias",
        "Add",
        "add",
    ]
    assert layer("dropout", p=0.25) == ("Dropout", {"name": None, "rate": 0.25})
    kind, config = layer("conv2d", [["f1", [8, 3, 5, 5], "float32", ""]], strides=[2, 2])
    assert (kind, config["filters"], config["kernel_size"], config["data_format"]) == (
        "Conv2D",
        8,
        [5, 5],
        "channels_first",
    )
