"""Tests of asking for advice: ignored findings, reported findings, and the form of the answer."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import ddlf
import ddlf.data
from ddlf.errors import AppError, ConfigError, DDLFError
from ddlf.extras.advice.advise import check_before_run, check_facts, known_ignores
from ddlf.extras.advice.batch import plain_message
from ddlf.extras.advice.collect import read_into_arrays
from ddlf.extras.advice.processes import differences, is_of_this_machine
from ddlf.extras.advice.report import as_json, as_sarif, explained, lines
from ddlf.extras.advice.rules import RULES
from ddlf.extras.advice.source import UserSources
from ddlf.training.slot.build import ready_model
from tests.extras.advice.cases import CASES, FACTS
from tests.extras.advice.test_source import TEXT
from tests.later import Later

keras = Later("keras")

NAN = CASES["D01"][0]


def answer(text, facts, folder, *levels):
    path = folder / "app.py"
    path.write_text(text)
    sources = UserSources([path], "App")
    return check_facts(facts, sources, known_ignores(sources), levels or ("quick",))


def test_a_finding_has_its_line_and_its_fix(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = answer(TEXT, NAN, tmp_path)
    (advice,) = report.advice
    assert (advice.rule.id, advice.position.line) == ("D01", 26)
    (finding,) = as_json(report)["findings"]
    assert (finding["file"], finding["line"], finding["severity"], finding["samples"]) == ("app.py", 26, "error", [7])
    assert "+        finite = (abs(self.x_train) <" in finding["diff"]
    text = "\n".join(lines(report, 60))
    assert text.startswith(
        "error     D01  app.py:26  3 of 20,000 values of x_train are NaN or infinite, in samples such as 7\n     why  One NaN"
    )
    assert "advice    1 error, by 60 rules" in text


def test_an_answer_in_a_notebook_equals_the_output_of_the_command(tmp_path):
    report = answer(TEXT, NAN, tmp_path)
    assert str(report) == "\n".join(lines(report))
    shown = []
    report._repr_pretty_(SimpleNamespace(text=shown.append), False)
    assert shown[0].splitlines()[-1] == "advice    1 error"


async def test_an_unknown_level_is_refused_by_name():
    for level in ("fast", "run"):
        with pytest.raises(ConfigError, match=f"no level '{level}' of advice; there are: quick, batch, cluster"):
            await app(*FINE).advise(level)


def test_a_comment_hides_a_finding_and_an_unneeded_comment_is_reported(tmp_path):
    ignoring = TEXT.replace("[D03, D04]", "[d01, D04]")
    report = answer(ignoring, NAN, tmp_path)
    assert (report.advice, report.ignored) == ((), 1)
    assert [ignore.id for ignore in report.unused] == ["D11", "D04"]
    assert "app.py:25: ignore[D04] is not needed any more" in "\n".join(lines(report, 1))
    assert answer(TEXT, NAN, tmp_path, "run").unused == ()


def test_comment_of_removed_rule_is_reported_as_not_needed(tmp_path):
    report = answer(TEXT.replace("[D03, D04]", "[C15]"), NAN, tmp_path)
    assert "C15" in [ignore.id for ignore in report.unused]


def test_a_comment_with_an_unknown_rule_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"app.py:25: there is no rule 'D44', did you mean D0?4?.*\?"):
        answer(TEXT.replace("D04", "D44"), NAN, tmp_path)


def test_a_comment_without_a_rule_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"app.py:25: the comment names no rule, so it ignores nothing"):
        answer(TEXT.replace("[D03, D04]", ""), NAN, tmp_path)
    with pytest.raises(ConfigError, match=r"app.py:25: the comment names no rule"):
        answer(TEXT.replace("[D03, D04]", "[]"), NAN, tmp_path)


@pytest.mark.parametrize(("workers", "rules"), [(1, []), (2, ["C06"])])
async def test_a_run_on_several_slots_reports_a_schedule_for_a_single_process(workers, rules, monkeypatch):
    monkeypatch.setattr("ddlf.extras.advice.advise.facts_of", lambda app: replace(CASES["C06"][0], workers=workers))
    monkeypatch.setattr("ddlf.extras.advice.advise.sources_of", lambda app: UserSources([], "App"))
    assert [event.rule for event in (await check_before_run(SimpleNamespace(advice="quick")))[0]] == rules


async def test_a_rule_that_raises_is_reported_and_does_not_end_a_run(monkeypatch, caplog):
    broken = replace(RULES[0], check=lambda facts: 1 / 0)
    monkeypatch.setattr("ddlf.extras.advice.advise.RULES", (broken, *RULES[1:]))
    monkeypatch.setattr("ddlf.extras.advice.advise.facts_of", lambda app: FACTS)
    monkeypatch.setattr("ddlf.extras.advice.advise.sources_of", lambda app: UserSources([], "App"))
    assert await check_before_run(SimpleNamespace(advice="strict")) == ([], "")
    assert f"the rule {broken.id} failed: ZeroDivisionError" in caplog.text


def app(x, y, loss="mse", **more):
    class Given(ddlf.IApp):
        def load_dataset(self):
            self.x_train, self.y_train = x, y
            vars(self).update(more)

        def create_model(self):
            self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            self.model.compile("adam", loss)

    return Given()


FINE = (np.random.default_rng(0).normal(size=(400, 2)), np.random.default_rng(1).normal(size=(400, 1)))


@pytest.mark.parametrize(
    ("arrays", "settings", "sentence"),
    [
        ((*FINE, None), {}, "the model 'sequential' is compiled without a loss"),
        (FINE, {"batch_size": 0}, "batch_size must be a whole number of 1 or more, got 0"),
        ((FINE[0][:0], FINE[1][:0]), {}, "x_train has no rows"),
    ],
)
async def test_errors_that_prevent_a_run_are_errors_of_the_advice_too(arrays, settings, sentence):
    faulty = app(*arrays)
    vars(faulty).update(settings)
    with pytest.raises(DDLFError, match=sentence):
        await faulty.advise("quick")


def test_a_model_without_a_loss_is_accepted_with_an_own_train():
    plain_app = app(*FINE, None)
    plain_app.load_dataset()
    plain_app.create_model()
    with pytest.raises(AppError, match="compiled without a loss"):
        ready_model(plain_app)

    class Own(type(plain_app)):
        def train(self, weights, worker_epochs, batch_size):
            return [0 * array for array in weights], {}

    custom = Own()
    custom.load_dataset()
    custom.create_model()
    assert ready_model(custom) is custom.model
    custom.x_test, custom.y_test = FINE
    with pytest.raises(AppError, match="compiled without a loss"):
        ready_model(custom)


def batches():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, number):
            return FINE[0][:8], FINE[1][:8]

    return Batches()


@pytest.mark.parametrize(
    ("make", "message", "fix"),
    [
        (batches, "x_train is a Batches, not an array", "as self.train_data"),
        (lambda: FINE[0].astype(object), "x_train holds object, not numbers", "numpy.unique"),
        (lambda: keras.ops.ones((9, 2)), "x_train is a ", "Turn it into an array"),
    ],
)
async def test_data_without_numeric_arrays_is_named_with_a_fix(make, message, fix):
    unusual = app(make(), None if make is batches else FINE[1])
    (advice,) = (await unusual.advise("quick")).advice
    assert advice.finding.message.startswith(message)
    assert fix in advice.fix


async def test_test_data_that_does_not_fit_the_model_is_an_error():
    with pytest.raises(AppError, match=r"x_test are of shape \(3,\), the model's input is of \(2,\): it cannot be"):
        await app(*FINE, x_test=np.zeros((9, 3)), y_test=np.zeros((9, 1))).advise("quick")
    assert not (await app(*FINE).advise("quick")).advice


def test_the_output_for_code_reviews_has_rule_place_and_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = json.loads(json.dumps(as_sarif(answer(TEXT, NAN, tmp_path))))
    (run,) = log["runs"]
    (result,), (rule,) = run["results"], run["tool"]["driver"]["rules"]
    assert log["version"] == "2.1.0"
    assert (result["ruleId"], result["level"], rule["id"]) == ("D01", "error", "D01")
    (location,) = result["locations"]
    assert location["physicalLocation"] == {"artifactLocation": {"uri": "app.py"}, "region": {"startLine": 26}}
    (change,) = result["fixes"][0]["artifactChanges"]
    region = change["replacements"][0]["deletedRegion"]
    assert region == {"charOffset": TEXT.index("_ = load()") + 10, "charLength": 0}


def test_the_explanation_of_a_rule_has_its_whole_text():
    rule = RULES[0]
    text = explained(rule)
    for part in (rule.id, rule.title, rule.reason, rule.fix, rule.source):
        assert part in text


def test_the_app_of_a_second_process_is_compared():
    first = {"data": {"x_train": "a", "y_train": "b"}, "weights": [["d/kernel", [4, 2], "float32"]], "files": []}
    assert differences(first, first) == {}
    assert differences(first, {**first, "data": {"x_train": "c"}}) == {
        "data": ("a second process has other values in x_train, y_train",)
    }
    assert differences(first, {**first, "weights": [["d/kernel", [4, 3], "float32"]]})["model"] == (
        "a second process has another shape or type of d/kernel",
    )
    assert differences(first, {**first, "weights": []})["model"] == ("a second process has 0 weights instead of 1",)
    assert differences(first, {**first, "files": ["/home/me/x.npz"]}) == {
        "files": ("load_dataset and create_model read /home/me/x.npz",)
    }
    assert differences(first, {"error": "NameError: late"}) == {"failed": ("in a second process NameError: late",)}


def test_files_that_other_machines_may_lack_are_found(tmp_path, monkeypatch):
    data, beside = tmp_path / "mine.npz", tmp_path / "module.py"
    data.write_bytes(b"")
    beside.write_text("")
    assert is_of_this_machine(str(data), str(tmp_path))
    assert not is_of_this_machine(str(beside), str(tmp_path))
    assert not is_of_this_machine(json.__file__, str(tmp_path))
    monkeypatch.setenv("DDLF_DATA", str(tmp_path))
    assert not is_of_this_machine(str(data), "")


def test_small_generated_data_is_examined_as_arrays():
    source = ddlf.data.generated(lambda part: iter([(np.full((5, 2), part, "float32"), np.arange(5))]), [5, 5])
    app = SimpleNamespace(train_data=source, x_test=np.zeros((3, 2)), y_test=np.zeros(3))
    assert read_into_arrays(app)
    assert app.train_data is None
    assert (app.x_train[:, 0].tolist(), app.y_train.tolist()) == ([0] * 5 + [1] * 5, [0, 1, 2, 3, 4] * 2)
    assert not read_into_arrays(SimpleNamespace(x_train=np.zeros((3, 2))))


def test_only_the_sentence_of_an_error_in_a_graph_is_reported():
    lines = [
        "Graph execution error:",
        "",
        "Detected at node loss defined at (most recent call last):",
        '  File "a.py", line 3',
        "<stack traces unavailable>",
    ]
    sentence = "Received a label value of 10 which is outside the valid range of [0, 10)."
    assert plain_message(RuntimeError("\n".join([*lines, sentence, "\t [[{{node loss}}]] [Op:one_step]"]))) == sentence
    assert plain_message(ValueError("\x1b[1mtoo large\x1b[0m")) == "too large"
    assert plain_message(KeyError()) == "KeyError"
