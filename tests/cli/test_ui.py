"""Tests of ``ddlf run --ui``: the output of a run on standard output and standard error."""

import json
import os

import pytest

from ddlf.events.sinks import from_json
from tests.processes import command, without_waits

CALLS = """
async def main(cluster):
    print(await cluster.run_code("6 * 7"))
"""


@pytest.fixture
def run(tmp_path):
    def run(*arguments, **environment):
        (tmp_path / "calls.py").write_text(CALLS)
        variables = {**os.environ, **environment}
        return command("ddlf.cli.main", "run", "calls.py", *arguments, cwd=tmp_path, env=variables)

    return run


def test_ui_json_prints_only_events(run):
    ended = run("--local", "1", "--ui", "json")
    events = [from_json(json.loads(line)) for line in ended.stdout.splitlines()]
    assert {type(event).__name__ for event in events} >= {"PhaseBegan", "PhaseEnded", "WorkerConnected"}
    assert (ended.stderr, ended.returncode) == ("[42]\n", 0)


def test_ui_none_prints_results_only_without_control_codes(run):
    assert run("--local", "1", DDLF_UI="none").stdout == "[42]\n"
    lines = run("--local", "1", FORCE_COLOR="1").stdout
    assert without_waits(lines) == "cluster   1 worker on this machine\n[42]\n"


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["--ui", "rich"], {}, "error  --ui is 'rich', but standard output is not a terminal that can draw; leave it at 'auto'"),
        (["--ui", "plain", "-q"], {}, "error  --ui plain has no effect with --quiet; leave one of them out"),
        (["--ui", "fancy"], {}, "ddlf run: argument --ui: must be one of auto, rich, plain, json, none, got 'fancy'"),
        ([], {"DDLF_UI": "fancy"}, "error  DDLF_UI must be one of auto, rich, plain, json, none, got 'fancy'"),
    ],
)  # fmt: skip
def test_unavailable_ui_is_refused_before_anything_starts(run, arguments, environment, sentence):
    ended = run(*arguments, **environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(sentence)
