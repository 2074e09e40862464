"""Tests of rules on whole programs, in one process.

Each rule finds its defect in a program at the right line, is silent about the near miss, and its change repairs the
program.
"""

import asyncio
import contextlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.errors import BadUpdate
from ddlf.events import Advised
from ddlf.extras.advice.advise import advise
from ddlf.extras.advice.changes import changed, diff
from ddlf.extras.advice.rules import RULES
from ddlf.extras.advice.rules.run import RUN_RULES
from tests.extras.advice.programs import PROGRAMS

APPS = [
    path
    for path in sorted((Path(__file__).parents[3] / "apps").rglob("*.py"))
    if "IApp)" in path.read_text()
    and path.stem not in ("big_images", "cifar10_cnn")  # their data is not available in tests
]


def app_in(path):
    """Return a new object of the only app in a file."""
    import ddlf

    name = f"advised_{abs(hash((path, path.read_text()))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    kinds = [
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, ddlf.IApp) and kind.__module__ == name
    ]
    return kinds[0]() if kinds else None


def _patched(patch):
    return subprocess.run(["patch", "-p0"], input=patch, text=True, capture_output=True).returncode == 0


async def found_in(text, folder, level, name="program", with_workers=False):
    path = folder / f"{name}.py"
    path.write_text(text)
    cluster = Cluster.local(2) if level == "cluster" and with_workers else None
    return await advise(app_in(path), level, workers=2, cluster=cluster)


ALONE = {
    "related": ("D24",),
    "seconds_of_a_step": ("C12",),
    "memorize_batch": ("L16", "L21", "M21", "M24", "M29", "M34"),
}
"""Slow analyses, each with the rules that use it."""
NEAR = {}
"""A cache of the findings in near misses and mended programs, because most of them are the same healthy program."""


FOUND = {}
"""A cache of the answers to programs whose defects a second process shows, because three rules share one. Each has its folder."""


async def found_once(rule, text, folder, with_workers):
    if rule.level != "cluster":
        return await found_in(text, folder, rule.level), folder
    if text not in FOUND:
        FOUND[text] = await found_in(text, folder, rule.level, with_workers=with_workers), folder
    return FOUND[text]


async def found_near(*key, folder):
    if key not in NEAR:
        text, level, with_workers, _ = key
        NEAR[key] = [str(advice) for advice in (await found_in(text, folder, level, "near", with_workers)).advice]
    return NEAR[key]


@pytest.fixture
def only_needed_analyses(rule, monkeypatch):
    """Skip slow analyses that the rule does not use.

    Rules of the level "cluster" do not use the analysis of a batch, and most of them do not use a second process.
    """

    async def nothing(*of):
        return {}

    for name, module in (("related", "advise"), ("seconds_of_a_step", "advise"), ("memorize_batch", "batch")):
        if rule.id not in ALONE[name]:
            monkeypatch.setattr(f"ddlf.extras.advice.{module}.{name}", lambda *of, **how: {})
    if rule.level == "cluster":
        monkeypatch.setattr("ddlf.extras.advice.advise.observe_batch", lambda *of: {})
    if rule.level == "cluster" and rule.id > "C05":  # this includes D18, which has workers
        monkeypatch.setattr("ddlf.extras.advice.advise.observe_second_process", nothing)


@pytest.mark.slow
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.level != "run"], ids=lambda rule: rule.id)
@pytest.mark.usefixtures("only_needed_analyses", "one_template")
async def test_a_rule_finds_its_defect_in_a_program_and_its_change_repairs_it(rule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad, near_miss = PROGRAMS[rule.id]
    labels = rule.id == "D18"  # this rule trains five times
    looks_at = frozenset(name for name, rules in ALONE.items() if rule.id in rules)
    answer, folder = await found_once(rule, bad, tmp_path, labels)
    assert answer.failed == ()
    (first, *_) = [advice for advice in answer.advice if advice.rule is rule]
    assert first.position.path == folder / "program.py"
    assert first.position.line > 8
    if first.edits:
        patch = diff(first.edits)
        text = next(iter(changed(first.edits).values()))
        assert await asyncio.to_thread(_patched, patch)
        assert (tmp_path / "program.py").read_text() == text
        again = await found_near(text, rule.level, False, looks_at, folder=tmp_path)
        assert rule.id not in [finding.partition(" ")[0] for finding in again], again
    near_findings = await found_near(near_miss, rule.level, labels, looks_at, folder=tmp_path)
    assert rule.id not in [finding.partition(" ")[0] for finding in near_findings], near_findings


async def rules_of_a_run(text, folder, name, workers):
    """Return the rules that a run of a program reports."""
    path = folder / f"{name}.py"
    path.write_text(text)
    app, rules = app_in(path), []
    app.cluster, app.verbose = workers, False
    app.subscribe(lambda event: rules.append(event.rule) if isinstance(event, Advised) else None)
    with contextlib.suppress(BadUpdate):
        await app.train_model()
    return rules


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "rule",
    # R06 needs a much slower worker, which cannot be arranged on a busy machine
    [rule for rule in RUN_RULES if rule.id != "R06"],
    ids=lambda rule: rule.id,
)
async def test_a_run_of_a_program_reports_its_defect(rule, tmp_path, monkeypatch, two_workers):
    monkeypatch.chdir(tmp_path)
    bad, near_miss = PROGRAMS[rule.id]
    assert rule.id in await rules_of_a_run(bad, tmp_path, "program", two_workers)
    assert rule.id not in await rules_of_a_run(near_miss, tmp_path, "near", two_workers)


@pytest.mark.slow
@pytest.mark.parametrize("path", APPS, ids=lambda path: path.stem)
async def test_quick_advice_finds_no_defect_in_the_apps(path):
    app = app_in(path)
    if app is not None:
        answer = await advise(app, "quick")
        assert [str(advice) for advice in answer.advice] == []
        assert answer.failed == ()
