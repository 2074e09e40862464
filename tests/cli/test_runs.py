"""Tests of ``ddlf runs``, ``ddlf report`` and ``ddlf status RUN``."""

import json

import pytest

from ddlf.cli.main import main
from ddlf.cli.options import add_options
from ddlf.cli.parsing import Parser
from ddlf.cli.run import resumed_from
from ddlf.cli.target import overrides
from ddlf.errors import ConfigError
from ddlf.monitor.runs import folder
from ddlf.testing import FakeRun
from tests.monitor.dashboard.made_up import in_parts, in_portions
from tests.monitor.runs.made import events_of, run


@pytest.fixture
def out(tmp_path, monkeypatch):
    """Make a folder with three runs, which the commands read by default."""
    monkeypatch.setenv("DDLF_RUN_DIR", str(tmp_path / "runs"))
    for name, rounds, how in (("long", 6, "finished"), ("broken", 1, "failed"), ("short", 2, "finished")):
        run(tmp_path / "runs", name, events_of(rounds), how, "AppError: no" if how == "failed" else "")
    return tmp_path / "runs"


def ddlf(capsys, *words):
    """Run a command, and return its exit code, output and errors."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return (ended.value.code, *capsys.readouterr())


def test_runs_lists_newest_first_with_results(out, capsys):
    code, text, _ = ddlf(capsys, "runs")
    rows = [line.split() for line in text.splitlines()]
    assert code == 0
    assert rows[0] == ["run", "state", "began", "time", "rounds", "loss", "accuracy", "test"]
    assert [row[0][16:] for row in rows[1:]] == ["short", "broken", "long"]
    assert [row[1] for row in rows[1:]] == ["finished", "failed", "finished"]
    assert rows[3][-3:] == ["6/6", "0.1667", "0.8571"]
    _, text, _ = ddlf(capsys, "runs", "--last", "1")
    assert text.splitlines()[-1] == "2 older runs; --all shows them"
    _, text, _ = ddlf(capsys, "runs", "--json")
    assert [row["state"] for row in json.loads(text)] == ["finished", "failed", "finished"]


def test_runs_compare_shows_results_and_differing_settings(out, capsys):
    code, text, _ = ddlf(capsys, "runs", "compare", "short", "long")
    assert code == 0
    assert ["rounds", "2", "6"] in [line.split() for line in text.splitlines()]
    assert text.splitlines()[-1] == "no setting differs"
    path = folder.find(out, "long") / folder.SUMMARY
    summary = folder.read_json(path)
    summary["settings"]["codec"]["value"] = "int8"
    folder.write_json(path, summary)
    _, text, _ = ddlf(capsys, "runs", "compare", "short", "long")
    assert text.splitlines()[-1].split() == ["codec", "float32", "int8"]
    assert ddlf(capsys, "runs", "compare", "short", "long", "--latex")[1].startswith("% \\usepackage{booktabs}")
    assert ddlf(capsys, "runs", "compare", "short", "long", "--csv")[1].startswith("quantity,")
    code, _, error = ddlf(capsys, "runs", "compare", "short", "last")
    assert (code, error) == (2, "error  short and last name the same run; list the runs with: ddlf runs\n")


def test_runs_prune_removes_old_runs(out, capsys):
    assert ddlf(capsys, "runs", "prune")[0] == 2
    code, text, _ = ddlf(capsys, "runs", "prune", "--keep", "1", "--out", str(out))
    assert (code, text.count("removed")) == (0, 2)
    assert [path.name[16:] for path in folder.runs_in(out)] == ["short"]
    assert ddlf(capsys, "runs", "prune", "--keep", "1")[1] == "nothing to remove\n"


def test_report_is_written_again_and_its_table_printed(out, capsys):
    page = folder.find(out, "broken") / folder.REPORT
    page.unlink()
    code, text, _ = ddlf(capsys, "report", "broken")
    assert code == 0
    assert ["state", "failed"] in [line.split() for line in text.splitlines()]
    assert text.splitlines()[-1] == f"report    {page}"
    assert page.exists()
    assert "worker 1 (pc1),1,333.3," in ddlf(capsys, "report", "broken", "--workers", "--csv")[1]
    assert ddlf(capsys, "report", "nothing")[0] == 2


def test_report_as_json_and_the_places_of_workers(out, capsys):
    code, text, _ = ddlf(capsys, "report", "short", "--json")
    assert code == 0
    facts = json.loads(text)
    assert (facts["state"], facts["places"]) == ("finished", [])
    assert ddlf(capsys, "report", "short", "--places", "--csv")[1] == (
        "worker,host,in its engine,incarnation,came,left,cause,reason\n"
    )
    for words in (["--json", "--workers"], ["--json", "--csv"], ["--workers", "--places"]):
        code, _, error = ddlf(capsys, "report", "short", *words)
        assert code == 2
        assert f"{words[0]} and {words[1]} exclude each other" in error


def test_runs_reports_an_empty_folder(tmp_path, capsys):
    assert ddlf(capsys, "runs", "--out", str(tmp_path))[1].startswith("no runs in ")
    assert ddlf(capsys, "report", "--out", str(tmp_path))[0] == 2


def test_report_prints_table_when_it_cannot_be_written(out, capsys, monkeypatch):
    def read_only(path, text):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(folder, "write_text", read_only)
    code, text, error = ddlf(capsys, "report", "short")
    assert code == 1
    assert ["state", "finished"] in [line.split() for line in text.splitlines()]
    assert error.startswith("the report cannot be written: Read-only file system, ")
    assert error.endswith("; the existing one is older\n")
    assert ddlf(capsys, "report", "short", "--csv")[0] == 0


def test_misspelt_option_and_misplaced_action_are_named(out, capsys):
    error = ddlf(capsys, "runs", "--lsat", "3")[2]
    assert error.startswith("ddlf runs: unknown option '--lsat', did you mean --last?")
    assert ddlf(capsys, "prune", "--keep", "3")[2].startswith(
        "ddlf: unknown command 'prune', did you mean 'ddlf runs prune'?"
    )
    assert ddlf(capsys, "runs", "--out", str(out), "prune", "--keep", "9")[0] == 0


def test_list_options_are_refused_with_an_action(out, capsys):
    assert ddlf(capsys, "runs", "--json", "--last", "2", "prune", "--keep", "1")[::2] == (
        2,
        "ddlf runs prune: unknown option '--json'\nSee: ddlf runs prune --help\n",
    )
    assert ddlf(capsys, "runs", "--all", "compare", "short", "long")[0] == 2
    assert ddlf(capsys, "runs", "--all", "--last", "2")[0] == 2
    assert len(folder.runs_in(out)) == 3


def options(*words):
    parser = Parser()
    add_options(parser)
    return parser.parse_args([*words, "--local", "1"])


def test_resume_takes_the_name_of_a_run(out):
    with pytest.raises(ConfigError, match=r"no run in .* has checkpoints; --checkpoint-every N writes them"):
        resumed_from(options("--resume", "last"))
    (folder.find(out, "long") / folder.CHECKPOINTS).mkdir()
    expected = str(folder.find(out, "long") / folder.CHECKPOINTS)
    for name in ("long", "last"):  # not the newest run, which has no checkpoints
        assert resumed_from(options("--resume", name)) == expected
    with pytest.raises(ConfigError, match=r"the run \d+-\d+-short has no checkpoints; --checkpoint-every"):
        resumed_from(options("--resume", "short"))
    assert resumed_from(options("--resume", str(folder.find(out, "long")))) == expected
    elsewhere = out.parent / "ck"  # a run with --checkpoint ck
    (elsewhere / "round-000002").mkdir(parents=True)
    folder.write_json(
        folder.find(out, "short") / folder.SUMMARY,
        {"checkpoints": str(elsewhere / "round-000002")},
    )
    for name in ("short", "last"):
        assert resumed_from(options("--resume", name)) == str(elsewhere.resolve())
    assert resumed_from(options("--resume", "auto")) == "auto"
    assert resumed_from(options("--resume", "elsewhere")) == "elsewhere"
    assert resumed_from(options()) is None


def test_run_has_folder_unless_disabled(monkeypatch):
    class Own(FakeRun):
        out = "own"

    def out_of(target, *words):
        return [(value, where) for name, value, where in overrides(target, options(*words)) if name == "out"][-1:]

    monkeypatch.setenv("DDLF_RUN_DIR", "elsewhere")
    assert out_of(FakeRun) == [("elsewhere", "$DDLF_RUN_DIR")]
    monkeypatch.delenv("DDLF_RUN_DIR")
    assert out_of(FakeRun) == [("runs", "ddlf run")]
    assert out_of(Own) == []
    assert out_of(FakeRun, "--out", "none") == [("none", "--out")]
    named = {name: value for name, value, _ in overrides(FakeRun, options("--name", "a", "--log", "tensorboard"))}
    assert (named["run_name"], named["trackers"]) == ("a", "tensorboard")


def columns(line):
    return [cell for cell in line.split("  ") if cell.strip()]


def test_status_of_a_run_shows_places_and_parts(tmp_path, capsys):
    run(tmp_path, "speech", list(in_parts(at=1_700_000_000.0)), "finished")
    code, text, _ = ddlf(capsys, "status", "--run", "--out", str(tmp_path))
    head, worker_rows, part_rows = text.split("\n\n")
    assert (code, head.partition("-speech: ")[2]) == (0, "finished, round 3 of 4")
    assert [[cell.strip() for cell in columns(line)] for line in worker_rows.splitlines()] == [
        ["worker", "host", "in its engine", "incarnation", "does"],
        ["pc01", "pc01", "job 4711_0", "1", "part 1, round 3"],
        ["pc02", "pc09", "job 4711_1", "2", "idle"],
        ["pc03", "pc03", "job 4711_2", "1", "part 2, round 3"],
    ]
    assert [[cell.strip() for cell in columns(line)] for line in part_rows.splitlines()] == [
        ["part", "layers", "worker", "memory", "idle"],
        ["1", "dense dense_1 dense_2 dense_3", "pc01", "169 MB", "15%"],
        ["2", "dense_4", "pc03", "167 MB", "21%"],
    ]
    code, text, _ = ddlf(capsys, "status", "--run", "last", "--json", "--out", str(tmp_path))
    facts = json.loads(text)
    assert [lane["left"] for lane in facts["workers"]] == ["", "Slurm preempted its job", ""]
    assert [part["worker"] for part in facts["parts"]] == [1, 3]


def test_status_of_a_run_shows_the_last_pass_and_portions(tmp_path, capsys):
    path = run(tmp_path, "regression", list(in_portions(at=1_700_000_000.0)), "finished")
    _, text, _ = ddlf(capsys, "status", "--run", str(path))
    head, _, portions = text.split("\n\n")
    assert head.splitlines()[1] == "pass 2 of iteration 3: step 0.5, loss 0.666667, gradient 0.03333"
    assert [line.split() for line in portions.splitlines()] == [
        ["worker", "portions", "backup", "dropped"],
        ["pc01", "27", "3", "0"],
        ["pc02", "30", "3", "0"],
        ["pc03", "15", "0", "6"],
    ]


def test_status_refuses_a_run_beside_workers(capsys):
    code, _, text = ddlf(capsys, "status", "--run", "--hosts", "127.0.0.1:9000")
    assert code != 0
    assert "--run and --hosts exclude each other" in text
