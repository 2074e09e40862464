"""Plans of an app on real workers."""

import json

import pytest

from ddlf.errors import ConfigError
from ddlf.extras.planner.model import Measured, Way
from ddlf.extras.planner.planning import plan
from ddlf.extras.planner.probe import LONG_ROUND_S, Budget, Probe, explore
from tests.training.models import Quick, app

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(autouse=True)
def own_plans(monkeypatch, tmp_path_factory):
    """No measurements of other tests."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setattr("ddlf.extras.planner.kept.state_folder", lambda: folder)


@pytest.fixture
def few(monkeypatch):
    """The budget allows four measurements after the first one, which are short."""
    room = iter((True,) * 4)
    monkeypatch.setattr(Budget, "has_room", lambda budget: next(room, False))
    monkeypatch.setattr("ddlf.extras.planner.probe.MEASURE_S", 0.01)


class Loud(Quick):
    """An app whose hooks and callbacks must not run."""

    samples = 4_000
    callbacks = ("not a callback",)

    def on_round(self, record):
        raise AssertionError("a hook ran")

    is_convergent = on_event = on_round


async def test_an_app_is_planned_and_does_not_change(two_workers, few, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = app(two_workers, Loud)
    before = dict(vars(asked))
    found = await asked.plan()
    assert vars(asked).keys() - {"run_context"} == before.keys() - {"run_context"}
    assert not asked.history
    assert list(tmp_path.iterdir()) == []
    assert found.samples == 4_000
    assert found.workers == two_workers.N
    assert found.now.setting.slots == two_workers.N
    assert found.best.epoch.seconds <= found.now.epoch.seconds
    assert found.best.low <= found.best.factor <= found.best.high
    assert {one.setting.slots for one in found.measured} >= {1, two_workers.N}
    assert json.loads(json.dumps(found.to_data()))["verdict"] == found.best.verdict
    monkeypatch.setattr(Probe, "rounds", None)  # a second plan measures nothing
    second = await plan(app(two_workers, Loud))
    assert (second.measured, second.now, second.best) == (found.measured, found.now, found.best)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "downpour"}, "no model of time for mode='downpour'.*--mode sync or async"),
        ({"batch_size": 5_000}, "no round of 40000 samples was measured: the data has 4000"),
    ],
)
async def test_what_cannot_be_planned_is_refused(two_workers, settings, said):
    with pytest.raises(ConfigError, match=said):
        await plan(app(two_workers, Loud, **settings))


async def test_too_little_time_is_refused(two_workers):
    with pytest.raises(
        ConfigError, match=r"no training with one slot could be measured in 0\.001 s.*--budget 0\.002s.*plan\(0\.002\)"
    ):
        await plan(app(two_workers, Loud), 0.001)


async def test_the_first_measurement_does_not_count_as_the_length_of_the_others():
    """It imports Keras on the workers. Here it takes 30 s of 40 s, and others take 2 s."""
    now = [0.0]

    class Made:
        samples = 10_000

        async def rounds(self, setting):
            now[0] += 2.0 if now[0] else 30.0
            return Measured(setting=setting, seconds=(0.1,))

    budget = Budget(40.0, lambda: now[0])
    way = Way("sync", "star", "float32")
    found = await explore(Made(), [way], [64, 128], 2, budget, [].append)
    assert {one.setting.slots for one in found} == {1, 2}
    assert budget.spent <= 40.0


async def test_a_long_round_is_long_where_a_round_takes_mostly_for_other_things_than_its_steps():
    """A step takes 1 ms and the rest of a round 70 ms, as with a small dense network."""
    way, said = Way("sync", "star", "float32"), [].append

    class Made:
        samples = 100_000

        async def rounds(self, setting):
            return Measured(setting=setting, seconds=(0.070 + 0.001 * setting.steps,))

    found = await explore(Made(), [way], [64], 2, Budget(60.0), said)
    assert max(one.setting.steps for one in found) == pytest.approx(LONG_ROUND_S / 0.001)
