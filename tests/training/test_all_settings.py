"""Tests that each setting is declared once: options, help, schema, pages and checkpoints follow from the declarations."""

import re
import runpy
from pathlib import Path

import pytest

import ddlf
from ddlf.algorithms.arrival import ARRIVAL
from ddlf.algorithms.codec import CODEC
from ddlf.algorithms.local_rules import LOCAL
from ddlf.algorithms.merge import MERGE
from ddlf.algorithms.outer import OUTER
from ddlf.algorithms.partitioners import PARTITION
from ddlf.algorithms.staleness import STALENESS
from ddlf.cli.options import GROUPS, OF_A_CLUSTER, RUN
from ddlf.cluster.config.cluster_file import RunConfig, schema
from ddlf.settings.setting import Use
from ddlf.testing import FakeRun
from ddlf.training.checkpoints.resume import settings_of
from ddlf.training.registry import KINDS_OF_GROUPS, SETTINGS, flat, option, spec_of
from ddlf.training.samples.policy import CommonData

ROOT = Path(__file__).parents[2]
MADE = runpy.run_path(str(ROOT / "docs/reference"))["PAGES"]
OF_THE_CLUSTER = {"min_workers", "connect_timeout_s", "heartbeat_s", "suspect_after_s", "dead_after_s"}


def test_an_app_has_every_setting_and_its_default():
    app = ddlf.IApp()
    fields = [field.name for kind in KINDS_OF_GROUPS for field in kind.settings()]
    assert {*fields, "mode", "exchange"} == set(SETTINGS)
    assert flat(spec_of(app)).keys() == SETTINGS.keys()
    assert all(getattr(app, name) == SETTINGS[name].default for name in SETTINGS)
    assert all(setting.help for setting in SETTINGS.values())


def test_command_line_has_each_setting_with_an_option_and_its_help():
    options = {entry.dest: entry for entry in RUN.parser("ddlf run").options}
    with_option = {name for name, setting in SETTINGS.items() if setting.flag is not None}
    without_setting = {
        *OF_A_CLUSTER,
        "help",
        "app",
        "data",
        "target",
        "save",
        "parameters",
        "dry_run",
        "quiet",
        "debug",
        "requeue",
    }
    assert set(options) == with_option | without_setting
    for name in with_option:
        assert options[name].names == (option(name),)
        assert options[name].help.startswith(SETTINGS[name].help)


def test_help_groups_have_every_setting_once():
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(SETTINGS)


def test_cluster_file_and_schema_have_each_setting_of_a_file():
    in_the_file = {name for name, setting in SETTINGS.items() if Use.FILE in setting.use} | OF_THE_CLUSTER
    assert set(RunConfig.model_fields) == set(schema()["$defs"]["RunConfig"]["properties"]) == in_the_file


def test_help_of_a_rule_setting_names_all_rules():
    help_text = RUN.parser("ddlf run").format_help(list(GROUPS))
    described = schema()["$defs"]["RunConfig"]["properties"]
    for name, family in (
        ("codec", CODEC),
        ("merge", MERGE),
        ("staleness", STALENESS),
        ("outer", OUTER),
        ("arrival", ARRIVAL),
        ("local_rule", LOCAL),
        ("partition", PARTITION),
    ):
        row = re.search(rf"^  {option(name)} .*\n(?:   .*\n)*", help_text, re.MULTILINE)[0]
        assert [rule for rule in family.names if rule not in row] == []
        if Use.FILE in SETTINGS[name].use:
            assert [rule for rule in family.names if rule not in described[name]["description"]] == []


def test_help_names_a_merge_rule_that_was_added_to_its_family_only(monkeypatch):
    last = MERGE.names[-1]
    monkeypatch.setitem(MERGE._rules, "middle", MERGE._rules["median"])
    assert f"{last}, middle" in " ".join(RUN.parser("ddlf run").format_help().split())


def test_checkpoint_has_each_setting_that_decides_the_result():
    app = FakeRun()
    app.run_context.data = CommonData()
    facts = settings_of(app, spec_of(ddlf.IApp()))
    decide = {name for name, setting in SETTINGS.items() if Use.FACT in setting.use}
    assert facts.keys() - {"samples", "data", "model"} == decide
    assert all(facts[name] is None or isinstance(facts[name], int | float | str) for name in decide)


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.name)
def test_generated_pages_match_the_declarations(path):
    assert path.read_text(encoding="utf-8") == MADE[path](), "run python docs/reference to update it"


def test_settings_page_has_every_setting_in_its_group():
    lines = (ROOT / "docs/reference/settings.md").read_text().splitlines()
    expected = [
        line
        for title, names in GROUPS.items()
        for line in (f"## {title.capitalize()}", *(f"### {name}" for name in names))
    ]
    assert [line for line in lines if line.startswith("##")] == expected
