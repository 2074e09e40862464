"""Asking for advice: what is ignored, what is told, in which form."""

import json

import pytest

from ddlf.advice.advise import answered, known_ignores
from ddlf.advice.again import differing, is_of_this_machine
from ddlf.advice.rules import RULES
from ddlf.advice.source import Sources
from ddlf.advice.told import as_json, as_sarif, explained, lines
from ddlf.errors import ConfigError
from tests.advice.cases import CASES
from tests.advice.test_source import TEXT

NAN = CASES["D01"][0]


def answer(text, facts, folder, *levels):
    path = folder / "app.py"
    path.write_text(text)
    sources = Sources([path], "App")
    return answered(facts, sources, known_ignores(sources), levels or ("quick",))


def test_a_finding_has_its_line_and_what_would_mend_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = answer(TEXT, NAN, tmp_path)
    (one,) = found.advice
    assert (one.finding.rule.id, one.place.line) == ("D01", 26)
    (told,) = as_json(found)["findings"]
    assert (told["file"], told["line"], told["severity"], told["samples"]) == ("app.py", 26, "error", [7])
    assert "+        finite = (abs(self.x_train) <" in told["diff"]
    text = "\n".join(lines(found, 60))
    assert text.startswith(
        "error     D01  app.py:26  3 of 20,000 values of x_train are NaN or infinite, in samples such as 7\n     why  One NaN"
    )
    assert "advice    1 error, by 60 rules" in text


def test_a_comment_takes_a_finding_away_and_one_that_is_not_needed_is_said(tmp_path):
    ignoring = TEXT.replace("[D03, D04]", "[d01, D04]")
    found = answer(ignoring, NAN, tmp_path)
    assert (found.advice, found.ignored) == ((), 1)
    assert [one.id for one in found.unneeded] == ["D11", "D04"]
    assert "app.py:25: ignore[D04] is not needed any more" in "\n".join(lines(found, 1))
    assert answer(TEXT, NAN, tmp_path, "run").unneeded == ()


def test_a_comment_of_a_rule_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"app.py:25: there is no rule 'D44', did you mean D0?4?.*\?"):
        answer(TEXT.replace("D04", "D44"), NAN, tmp_path)


def test_what_reviews_code_gets_rule_place_and_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = json.loads(json.dumps(as_sarif(answer(TEXT, NAN, tmp_path))))
    (run,) = log["runs"]
    (result,), (rule,) = run["results"], run["tool"]["driver"]["rules"]
    assert log["version"] == "2.1.0"
    assert (result["ruleId"], result["level"], rule["id"]) == ("D01", "error", "D01")
    (place,) = result["locations"]
    assert place["physicalLocation"] == {"artifactLocation": {"uri": "app.py"}, "region": {"startLine": 26}}
    (change,) = result["fixes"][0]["artifactChanges"]
    region = change["replacements"][0]["deletedRegion"]
    assert region == {"charOffset": TEXT.index("_ = load()") + 10, "charLength": 0}


def test_a_rule_is_explained_with_all_that_it_says():
    rule = RULES[0]
    text = explained(rule)
    for part in (rule.id, rule.title, rule.why, rule.fix, rule.source):
        assert part in text


def test_what_a_second_process_makes_of_an_app_is_compared():
    mine = {"data": {"x_train": "a", "y_train": "b"}, "weights": [["d/kernel", [4, 2], "float32"]], "files": []}
    assert differing(mine, mine) == {}
    assert differing(mine, {**mine, "data": {"x_train": "c"}}) == {
        "data": ("a second process has other values in x_train, y_train",)
    }
    assert differing(mine, {**mine, "weights": [["d/kernel", [4, 3], "float32"]]})["model"] == (
        "a second process has another shape or type of d/kernel",
    )
    assert differing(mine, {**mine, "weights": []})["model"] == ("a second process has 0 weights instead of 1",)
    assert differing(mine, {**mine, "files": ["/home/me/x.npz"]}) == {"files": ("load_dataset reads /home/me/x.npz",)}
    assert differing(mine, {"error": "NameError: late"}) == {"failed": ("in a second process NameError: late",)}


def test_files_of_this_machine_are_those_that_nobody_else_need_have(tmp_path, monkeypatch):
    data, beside = tmp_path / "mine.npz", tmp_path / "module.py"
    data.write_bytes(b"")
    beside.write_text("")
    assert is_of_this_machine(str(data), str(tmp_path))
    assert not is_of_this_machine(str(beside), str(tmp_path))
    assert not is_of_this_machine(json.__file__, str(tmp_path))
    monkeypatch.setenv("DDLF_DATA", str(tmp_path))
    assert not is_of_this_machine(str(data), "")
