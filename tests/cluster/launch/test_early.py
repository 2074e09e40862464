"""A template that is started before it is known that it is needed: taken when it fits, and never left behind."""

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.launch import local
from ddlf.worker.process import Template
from tests.daemons import preload

pytestmark = pytest.mark.asyncio(loop_scope="session")

MODULE = "json.tool"


@pytest.fixture
def early(descendants):
    """Starts one, in the test itself: pytest changes the environment between its phases. Returns its process number."""

    def begin():
        local.start_template_early((MODULE,))
        return local._early._process.pid

    yield begin
    local.end_early_template()
    assert descendants() == []


async def test_workers_take_it(early):
    pid = early()
    async with Cluster.local(1) as cluster:
        assert local._early is None
        assert cluster._launcher._template._process.pid == pid
        await preload(cluster, MODULE)


async def test_one_that_cannot_be_asked_for_anything_is_not_left_behind(monkeypatch, descendants):
    def refuse(self, modules):
        raise OSError("no descriptors left")

    monkeypatch.setattr(Template, "begin_preload", refuse)
    assert local.start_template((MODULE,)) is None
    assert descendants() == []


async def test_what_importing_a_backend_sets_makes_no_difference(early, monkeypatch):
    pid = early()
    monkeypatch.setenv("TF2_BEHAVIOR", "1")
    async with Cluster.local(1) as cluster:
        assert cluster._launcher._template._process.pid == pid


async def test_workers_start_another_one_when_the_environment_has_changed_since(early, monkeypatch):
    pid = early()
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    async with Cluster.local(1) as cluster:
        assert cluster._launcher._template._process.pid != pid
        assert await cluster.run_code("import os; os.environ['KERAS_BACKEND']") == ["jax"]


async def test_it_ends_when_nobody_takes_it(early):
    early()
    local.end_early_template()
    local.end_early_template()


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        ("class App(ddlf.IApp): ...", ["--local", "2"], True),
        ("class App(ddlf.IApp): ...", [], True),
        ("class App(ddlf.IApp): ...", ["--hosts", "10.0.0.1:9000"], False),
        ("async def main(cluster): ...", ["--local", "2"], False),
    ],
)
async def test_only_an_app_on_local_workers_needs_it(tmp_path, monkeypatch, text, options, wanted):
    from ddlf.cli.main import parse
    from ddlf.cli.run import _will_train_here

    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(text)
    _, parsed = parse(["run", "app.py", *options])
    assert _will_train_here(parsed.app, parsed) is wanted
    assert not _will_train_here(tmp_path / "missing.py", parsed)
