"""Tests of a template that is started early, before a cluster needs it: it is used if it fits, and always ended."""

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch import local
from ddlf.worker.process import Template
from tests.daemons import preload

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODULE = "json.tool"


@pytest.fixture
def early(descendants):
    """Return a function that starts an early template, and returns its process id.

    The test must call it, because pytest changes the environment between the phases of a test.
    """

    def begin():
        local.start_template_early((MODULE,))
        return local._early._process.pid

    yield begin
    local.end_early_template()
    assert descendants() == []


async def test_workers_use_the_early_template(early):
    pid = early()
    async with Cluster.local(1) as cluster:
        assert local._early is None
        assert cluster._launcher._template._process.pid == pid
        await preload(cluster, MODULE)


async def test_an_early_template_that_fails_to_preload_is_ended(monkeypatch, descendants):
    def refuse(self, modules):
        raise OSError("no descriptors left")

    monkeypatch.setattr(Template, "begin_preload", refuse)
    assert local.start_template((MODULE,)) is None
    assert descendants() == []


async def test_variables_that_a_backend_sets_do_not_replace_the_early_template(early, monkeypatch):
    pid = early()
    monkeypatch.setenv("TF2_BEHAVIOR", "1")
    async with Cluster.local(1) as cluster:
        assert cluster._launcher._template._process.pid == pid


async def test_workers_start_another_template_if_the_environment_has_changed(early, monkeypatch):
    pid = early()
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    async with Cluster.local(1) as cluster:
        assert cluster._launcher._template._process.pid != pid
        assert await cluster.run_code("import os; os.environ['KERAS_BACKEND']") == ["jax"]


async def test_an_unused_early_template_is_ended(early):
    early()
    local.end_early_template()
    local.end_early_template()


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("class App(ddlf.IApp): ...", ["--local", "2"], True),
        ("class App(ddlf.IApp): ...", [], True),
        ("class App(ddlf.IApp): ...", ["--hosts", "10.0.0.1:9000"], False),
        ("async def main(cluster): ...", ["--local", "2"], False),
    ],
)
async def test_only_an_app_on_local_workers_starts_an_early_template(tmp_path, monkeypatch, text, options, expected):
    from ddlf.cli.main import parse
    from ddlf.cli.run import _will_train_here

    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(text)
    _, parsed = parse(["run", "app.py", *options])
    assert _will_train_here(parsed.app, parsed) is expected
    assert not _will_train_here(tmp_path / "missing.py", parsed)
