"""The study of learning in its shortest form: every way trains, and what it took to the target is in the table."""

import json

import pytest

from benchmarks import learning
from ddlf import IApp
from ddlf.algorithms.local_rules import LOCAL
from ddlf.training.registry import spec_of


@pytest.mark.parametrize("base", [IApp, learning.Text])
@pytest.mark.parametrize("rule", learning.RULES.values(), ids=learning.RULES)
def test_each_way_is_one_that_a_run_takes(rule, base):
    app = type("App", (base,), rule)()
    spec_of(app)


def test_the_transformer_has_adam_but_where_the_rule_is_of_plain_steps():
    for rule in learning.RULES.values():
        optimizer = type("App", (learning.Text,), {**rule, "learning_rate": 0.005})().optimizer()
        local = LOCAL.read(rule.get("local_rule", "plain"))
        name = type(optimizer).__name__
        local.check_optimizer({"optimizer": name, "optimizer learning_rate": 0.5})
        assert (name == "Adam") == (local != LOCAL.read("scaffold"))


@pytest.mark.usefixtures("one_template")
async def test_each_way_says_what_it_took_to_the_target(tmp_path, capsys, monkeypatch):
    picture = tmp_path / "learning.svg"
    said = "--data digits --rules average,gradient,async-10 --target 0.2 --epochs 4 --batch-size 16 --samples 400 --seeds 1 --looks 8"
    kept = ["--json", str(tmp_path / "learning.json")]
    options = learning.parser().parse_args([*said.split(), *kept, "--plot", str(picture)])
    runs = await learning.main(options)
    assert [one["rule"] for one in runs] == ["average", "gradient", "async-10"]
    by = {one["rule"]: one["reached"] for one in runs}
    assert by["average"]["bytes"] < by["gradient"]["bytes"]
    assert all(point["seconds"] > 0 for one in runs for point in one["curve"])
    few, many = ({one["samples"]: one for one in run["curve"]} for run in runs[:2])
    same = max(
        few.keys() & many.keys()
    )  # after as many samples a slow link makes the difference, in proportion to the bytes
    more = many[same]["on the link"] - few[same]["on the link"]
    assert more == pytest.approx((many[same]["bytes"] - few[same]["bytes"]) * 8 / 100e6)
    assert "| gradient | " in capsys.readouterr().out
    assert "seconds on the link" in picture.read_text()

    monkeypatch.setattr(learning, "Cluster", None)  # what the file has is not run again
    again = learning.parser().parse_args([*said.split(), *kept, "--target", "0.3", "--quiet", kept[1]])
    shown = await learning.main(again)
    assert [one["curve"][-1]["accuracy"] for one in shown] == [one["curve"][-1]["accuracy"] for one in runs]
    for point in shown[0]["curve"]:  # of a quiet study are what a sample took, whichever point it is
        assert point["seconds"] / point["samples"] == pytest.approx(
            runs[0]["curve"][-1]["seconds"] / runs[0]["curve"][-1]["samples"]
        )
    with pytest.raises(SystemExit, match="name another file"):
        await learning.main(learning.parser().parse_args([*said.split(), *kept, "--batch-size", "8"]))


def test_seconds_of_a_quiet_study_are_of_all_ways_or_of_none(tmp_path):
    point = {"seconds": 3.0, "samples": 6, "bytes": 8, "accuracy": 0.5}
    runs = [{"rule": name, "seed": 0, "sample_s": [0.5], "curve": [point]} for name in ("average", "gradient")]
    quiet = tmp_path / "quiet.json"
    options = learning.parser().parse_args(["--quiet", str(quiet)])
    quiet.write_text(json.dumps({"runs": runs[:1]}))
    with pytest.raises(SystemExit, match="has no run of gradient"):
        learning.finish(runs, "average", options)
