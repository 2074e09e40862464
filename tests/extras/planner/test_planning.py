"""Tests of planning an app on real workers."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from ddlf.errors import ClusterTooSmall, ConfigError
from ddlf.events import Committed, Event, RoundsMeasured, RoundsPredicted
from ddlf.events.record import RoundRecord
from ddlf.extras.planner import planning
from ddlf.extras.planner.choice import Length
from ddlf.extras.planner.explain import explain
from ddlf.extras.planner.model import Measured, Setting, TimeModel, Way
from ddlf.extras.planner.planning import plan, possible_ways, ways_of
from ddlf.extras.planner.probe import LONG_ROUND_S, Budget, Probe, check_samples, explore, own_ways
from ddlf.extras.planner.result import Plan
from tests.patience import PATIENCE_S
from tests.training.models import Blobs, Quick, app, blobs

COSTS = ("seconds", "compute_s", "transfer_s", "merge_s", "bytes_out", "bytes_back")
pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(autouse=True)
def own_plans(monkeypatch, tmp_path_factory):
    """Use an empty folder, without measurements of other tests."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setattr("ddlf.extras.planner.measurement_files.state_folder", lambda: folder)


@pytest.fixture
def few(monkeypatch):
    """Limit the plan to four short measurements after the first one. They need not show the time of a step."""
    room = iter((True,) * 4)
    monkeypatch.setattr(Budget, "has_room", lambda budget, needed: next(room, False))
    monkeypatch.setattr("ddlf.extras.planner.probe.MEASURE_S", 0.01)
    monkeypatch.setattr(TimeModel, "knows_step", lambda model, batch: True)


class Loud(Quick):
    """An app with hooks and callbacks that must not run."""

    samples = 4_000
    callbacks = ("not a callback",)
    _repeats, _more = 1, 0

    async def load_dataset(self):
        self.x_train, self.y_train = blobs(self.samples + self._more)

    def train(self, weights, worker_epochs, batch_size):
        for _ in range(self._repeats if self.worker.id == 2 else 1):
            result = super().train(weights, worker_epochs, batch_size)
        return result

    def on_round(self, record):
        raise AssertionError("a hook ran")

    is_convergent = on_event = on_round


async def test_an_app_is_planned_and_does_not_change(two_workers, few, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned_app = app(two_workers, Loud)
    before = dict(vars(planned_app))
    first = await planned_app.plan(60 * PATIENCE_S)  # enough time for a slow machine
    assert vars(planned_app).keys() - {"run_context"} == before.keys() - {"run_context"}
    assert not planned_app.history
    assert list(tmp_path.iterdir()) == []
    assert first.samples == 4_000
    assert first.workers == two_workers.N
    assert first.now.setting.slots == two_workers.N
    assert first.best.epoch.seconds <= first.now.epoch.seconds
    assert first.best.low <= first.best.factor <= first.best.high
    assert {item.setting.slots for item in first.measured} >= {1, two_workers.N}
    assert json.loads(json.dumps(first.to_data()))["verdict"] == first.best.verdict
    peaks = first.memory.peaks  # measured by a child process of a worker
    assert peaks.samples == 4_000
    assert 100e6 < peaks.framework < peaks.loaded
    assert peaks.master > 100e6
    monkeypatch.setattr(Probe, "rounds", None)  # a second plan measures nothing
    second = await plan(app(two_workers, Loud))
    assert (second.measured, second.now, second.best) == (first.measured, first.now, first.best)
    assert second.memory.peaks == peaks
    messages: list[str] = []
    with pytest.raises(TypeError):  # it measures again because of more samples, and the removed method fails
        await plan(app(two_workers, Loud, _more=1), 1.0, say=messages.append)
    assert messages == ["the data has changed since the measurements, so they are made again"]
    monkeypatch.setattr(Plan, "is_taken", True)  # the result of few rounds may be unclear
    events: list[Event] = []
    run = app(
        two_workers, Loud, planned=True, master_epochs=4, callbacks=(), on_round=events.append, on_event=events.append
    )
    run.is_convergent = lambda record: False
    run.subscribe(events.append)
    await run.train_model()
    (predicted,) = [event for event in events if isinstance(event, RoundsPredicted)]
    (compared,) = [event for event in events if isinstance(event, RoundsMeasured)]
    assert (run.slots, run.mode, run.codec) == (first.best.setting.slots, "sync", "float32")
    assert predicted.seconds == pytest.approx(first.model.predict(first.best.setting).seconds)
    assert compared.predicted == predicted.seconds
    assert (compared.rounds, compared.seconds > 0) == (2, True)
    timed: list[tuple[float, Event]] = []
    run.subscribe(lambda event: timed.append((time.perf_counter(), event)))
    run.slots, run._repeats = None, 40  # worker 2 computes 40 times as long
    run.balance = "equal"  # the plan may have chosen parts by speed, after so short measurements
    await run.train_model(fresh=True)
    explained = explain(timed)
    assert (explained.cause, explained.worker) == ("straggler", 2)


async def test_an_invalid_time_is_refused_before_the_workers_are_connected():
    with pytest.raises(ConfigError, match=r"the time of a plan must be seconds above 0.*got -1"):
        await Loud(None).plan(-1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "downpour"}, "no model of time for mode='downpour'.*--mode sync or async"),
        ({"slots": 9}, "slots=9 take turns on 2 workers.*one slot for each worker"),
        ({"batch_size": 5_000}, "a batch of 5000 samples is more than the 4000 samples of the data"),
        (
            {"batch_size": 2_500},
            "a plan trains a batch of 2,500 for each of the 2 workers, which are 5,000 samples, and the data has 4,000",
        ),
    ],
)
async def test_apps_that_cannot_be_planned_are_refused(two_workers, settings, message):
    with pytest.raises(ConfigError, match=message):
        await plan(app(two_workers, Loud, **settings))


@pytest.mark.parametrize(
    ("kind", "settings", "ways"),
    [
        (Blobs, {}, ["sync", "sync", "async", "sync, gradient"]),
        (Blobs, {"merge": "median"}, ["sync", "sync", "sync, gradient"]),
        (Loud, {}, ["sync", "sync", "async"]),  # an own train method is local training
        (Loud, {"exchange": "auto"}, ["sync", "sync, sharded", "sync", "async"]),
        (Loud, {"exchange": "auto", "weights_codec": "delta:int8"}, ["sync", "sync", "async"]),
    ],
)
async def test_ways_that_an_app_does_not_allow_are_left_out(two_workers, kind, settings, ways):
    limited = app(two_workers, kind, **settings)
    assert [str(way) for way in possible_ways(limited, ways_of(own_ways(limited)))] == ways


async def test_other_batches_than_the_data_has_are_refused_before_a_measurement(two_workers, monkeypatch):
    monkeypatch.setattr(Probe, "rounds", None)
    monkeypatch.setattr("ddlf.extras.planner.planning.memory_of", None)
    with pytest.raises(ConfigError, match="a batch of 5000 samples is more than the 4000 samples of the data"):
        await plan(app(two_workers, Loud), batches=[64, 5_000])


async def test_too_little_time_is_refused(two_workers, monkeypatch):
    with pytest.raises(
        ConfigError, match=r"not ready to train for 3 rounds in 0\.001 s.*--budget 0\.002s.*plan\(0\.002\)"
    ):
        await plan(app(two_workers, Loud), 0.001)
    monkeypatch.setattr(Budget, "has_room", lambda budget, needed: False)
    monkeypatch.setattr("ddlf.extras.planner.planning.LEAST_S", 60 * PATIENCE_S)  # measure no memory
    with pytest.raises(ConfigError, match=r"no training with one slot could be measured in 1200 s.*--budget 2400s"):
        await plan(app(two_workers, Loud), 10 * PATIENCE_S)


class Slow(Loud):
    """An app that trains endlessly if ``until`` is set, until this file exists."""

    until = ""

    def train(self, weights, worker_epochs, batch_size):
        while self.until and not Path(self.until).exists():
            time.sleep(0.01)
        return super().train(weights, worker_epochs, batch_size)


async def test_a_plan_ends_with_its_budget_even_in_the_middle_of_a_round(two_workers, tmp_path):
    """The steps would never end. The plan ends because of its budget, not because of a limit of the round."""
    until = tmp_path / "until"
    with pytest.raises(ConfigError, match=r"the workers (did not train|were not ready to train) for 3 rounds in 3 s"):
        await asyncio.wait_for(plan(app(two_workers, Slow, until=str(until)), 3.0), PATIENCE_S)
    until.touch()
    await app(two_workers, Quick, master_epochs=1).train_model()


async def test_rounds_until_the_time_is_over_count_and_other_time_limits_are_errors(two_workers):
    probe = Probe(app(two_workers, Loud))
    setting, costs = Setting(way=Way("sync", "star", "float32"), slots=2, batch=16, steps=4), dict.fromkeys(COSTS, 1)

    async def hangs(fresh):
        for number in range(1, 6):
            record = RoundRecord(round=number, rounds=9, version=number, epochs=1, samples=128, **costs)
            probe.app.run_context.emit(Committed(record=record))
        await asyncio.Event().wait()

    async def fails(fresh):
        raise TimeoutError("a worker does not answer")

    probe.app.train_model = hangs
    assert len((await probe.rounds(setting, 0.1)).seconds) == 3  # the first two compile
    probe.app.train_model = fails
    with pytest.raises(TimeoutError, match="a worker does not answer"):
        await probe.rounds(setting, PATIENCE_S)


def whole_epochs(samples):
    return Length(samples=samples)


async def test_the_first_measurement_counts_in_the_budget_but_not_for_the_expected_length():
    """The first measurement imports Keras on the workers. It takes 30 s of a budget of 40 s, and other ones take 2 s."""
    now = [0.0]

    class FakeMachine:
        samples = 10_000

        async def rounds(self, setting, most_s):
            assert most_s == 40.0 - now[0]
            now[0] += 2.0 if now[0] else 30.0
            return Measured(setting=setting, seconds=(0.1,))

    budget = Budget(40.0, lambda: now[0])
    way = Way("sync", "star", "float32")
    results = await explore(FakeMachine(), [way], [64, 128], 2, budget, [].append, whole_epochs)
    assert {item.setting.slots for item in results} == {1, 2}
    assert budget.spent == now[0] == 40.0


async def test_a_way_that_create_model_forbids_is_left_out_and_named():
    messages, tried = [], []

    class FakeMachine:
        samples = 10_000

        async def rounds(self, setting, most_s):
            tried.append(setting.way)
            if setting.way.is_one_step:
                raise ConfigError("worker_callbacks are for local training")
            return Measured(setting=setting, seconds=(0.1 + 0.001 * setting.steps,))

    ways = [Way("sync", "star", "float32"), Way("sync", "gradient", "float32")]
    results = await explore(FakeMachine(), ways, [64], 2, Budget(60.0), messages.append, whole_epochs)
    assert {item.setting.way for item in results} == {ways[0]}
    assert tried.count(ways[1]) == 1
    assert "sync, gradient is left out: worker_callbacks are for local training" in messages
    with pytest.raises(ConfigError, match="local training"):
        await explore(FakeMachine(), ways[1:], [64], 2, Budget(60.0), messages.append, whole_epochs)


class Noting(Blobs):
    """Its ``create_model`` sets a callback that leaves a file."""

    file = ""

    async def create_model(self):
        import keras

        await super().create_model()
        file = self.file
        self.worker_callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: Path(file).touch())]


async def test_callbacks_of_workers_that_create_model_sets_do_not_run(two_workers, tmp_path):
    setting = Setting(way=Way("sync", "star", "float32"), slots=2, batch=16, steps=2)
    result = await Probe(app(two_workers, Noting, file=str(tmp_path / "called"))).rounds(setting)
    assert result is not None
    assert list(tmp_path.iterdir()) == []
    await app(two_workers, Noting, file=str(tmp_path / "called"), master_epochs=1).train_model()
    assert (tmp_path / "called").exists()  # in a training it does


class SlowMachine:
    """Each measurement takes 50 s of a clock. A step takes 1 ms."""

    samples = 10_000

    def __init__(self):
        self.now, self.tried, self.allowed = 0.0, [], []

    async def rounds(self, setting, most_s):
        self.now += min(50.0, most_s)
        self.allowed.append(most_s)
        if most_s < 50.0:
            return None
        self.tried.append(setting)
        return Measured(setting=setting, seconds=(0.1 + 0.001 * setting.steps,) * 3)


async def test_a_budget_that_nobody_chose_is_exceeded_by_what_is_necessary():
    machine = SlowMachine()
    way = Way("sync", "star", "float32")
    results = await explore(machine, [way], [64], 2, Budget(60.0, lambda: machine.now, 240.0), [].append, whole_epochs)
    assert [(trial.slots, trial.steps) for trial in machine.tried] == [(2, 4), (1, 2), (1, 20)]
    assert machine.allowed == [240.0, 190.0, 140.0]
    assert TimeModel(results).knows_step(64)


@pytest.mark.parametrize(("knows", "again"), [([True], 0), ([False, True], 1), ([False] * 9, 3)])
async def test_what_noise_hides_is_measured_again_with_a_budget_that_nobody_chose(monkeypatch, knows, again):
    machine, answers = SlowMachine(), iter(knows)
    monkeypatch.setattr(TimeModel, "knows_step", lambda model, batch: next(answers))
    way = Way("sync", "star", "float32")
    await explore(machine, [way], [64], 2, Budget(60.0, lambda: machine.now, 1000.0), [].append, whole_epochs)
    assert [(trial.slots, trial.steps) for trial in machine.tried[3:]] == [(1, 2), (1, 20)] * again


async def test_a_chosen_budget_is_not_exceeded():
    machine = SlowMachine()
    way = Way("sync", "star", "float32")
    results = await explore(machine, [way], [64], 2, Budget(60.0, lambda: machine.now), [].append, whole_epochs)
    assert [item.setting.slots for item in results] == [2]
    assert machine.allowed == [60.0, 10.0]


async def test_a_plan_says_that_it_takes_longer_than_usual():
    """The first measurement ends only after the line."""
    messages, has_message = [], asyncio.Event()

    def say(text):
        messages.append(text)
        has_message.set()

    class FakeMachine:
        samples = 10_000

        async def rounds(self, setting, most_s):
            await asyncio.wait_for(has_message.wait(), PATIENCE_S)
            return Measured(setting=setting, seconds=(0.1 + 0.001 * setting.steps,))

    await explore(
        FakeMachine(), [Way("sync", "star", "float32")], [64], 2, Budget(0.01, most=PATIENCE_S), say, whole_epochs
    )
    assert messages[0] == (
        f"the usual 0.01 s are not enough on these machines now: necessary measurements may take up to {PATIENCE_S:g} s"
    )


@pytest.mark.parametrize(("seconds", "most"), [((), 240.0), ((60.0,), 60.0), (("60s",), 60.0)])
async def test_only_a_budget_that_nobody_chose_may_be_exceeded(two_workers, monkeypatch, seconds, most):
    budgets = []

    async def samples(app):
        raise ConfigError("enough")

    monkeypatch.setattr(planning, "_samples", samples)
    monkeypatch.setattr(planning, "Budget", lambda *args, **how: budgets.append(Budget(*args, **how)) or budgets[0])
    with pytest.raises(ConfigError, match="enough"):
        await app(two_workers, Loud).plan(*seconds)
    assert (budgets[0].seconds, budgets[0].most) == (60.0, most)


async def test_rounds_are_no_longer_than_small_data():
    """The data has 10 samples, but the first round of all workers would need 32."""
    tried = []

    class FakeMachine:
        samples = 0

        async def rounds(self, setting, most_s):
            self.samples = 10
            tried.append(setting)
            if setting.samples > self.samples:
                return None
            return Measured(setting=setting, seconds=(0.070 + 0.001 * setting.steps,))

    way = Way("sync", "star", "float32")
    results = await explore(FakeMachine(), [way], [4], 2, Budget(60.0), [].append, whole_epochs)
    assert [trial.samples for trial in tried if trial.samples > 10] == [32]
    assert {(item.setting.slots, item.setting.steps) for item in results} == {(1, 1), (1, 2), (2, 1)}
    assert TimeModel(results).knows_step(4)


async def test_rounds_that_the_data_cannot_fill_end_after_the_first_one(two_workers):
    probe = Probe(app(two_workers, Loud, samples=100, batch_size=32))
    assert await probe.rounds(Setting(way=Way("sync", "star", "float32"), slots=2, batch=32, steps=4)) is None
    assert (probe.samples, len(probe.app.history)) == (100, 1)


@pytest.mark.parametrize(
    ("batch", "slots", "message"),
    [
        (4, 3, "a batch of 4 for each of the 3 workers, which are 12 samples, and the data has 10"),
        (6, 1, "two batches of 6, which are 12 samples, and the data has 10"),
    ],
)
async def test_data_that_are_too_small_for_a_plan_are_refused_in_the_numbers_of_the_user(batch, slots, message):
    with pytest.raises(ConfigError, match=message):
        check_samples(batch, slots, 10)
    check_samples(4, 2, 10)
    check_samples(5, 1, 10)


async def test_a_plan_that_loses_a_worker_reports_that_nothing_is_kept(two_workers, monkeypatch):
    async def rounds(probe, setting, most_s=None):
        raise ClusterTooSmall("1 of 2 workers could not be reached")

    monkeypatch.setattr(Probe, "rounds", rounds)
    with pytest.raises(ClusterTooSmall) as lost:
        await plan(app(two_workers, Loud), 1.0)
    assert lost.value.__notes__ == [
        "the rounds measured until then are not kept: plan again when all workers are there"
    ]


async def test_a_long_round_has_many_steps_if_a_step_is_short_compared_to_the_round():
    """A step takes 1 ms and the remaining work of a round 70 ms, like in a small dense network."""
    way, messages = Way("sync", "star", "float32"), [].append

    class FakeMachine:
        samples = 100_000

        async def rounds(self, setting, most_s):
            return Measured(setting=setting, seconds=(0.070 + 0.001 * setting.steps,))

    results = await explore(FakeMachine(), [way], [64], 2, Budget(60.0), messages, whole_epochs)
    assert max(item.setting.steps for item in results) == pytest.approx(LONG_ROUND_S / 0.001)


async def test_each_way_is_measured_with_rounds_of_the_length_of_the_app():
    """A worker trains 2 steps between two exchanges of 1 s. Rounds of 20 steps would tell little about the exchange."""
    now, ways = [0.0], [Way("sync", "star", "float32"), Way("async", "star", "float32"), Way("sync", "star", "int8")]

    class FakeMachine:
        samples = 100_000

        async def rounds(self, setting, most_s):
            seconds = {"float32": 0.9, "int8": 0.6}[setting.way.codec] + 0.012 * setting.steps
            now[0] += 1.0 + 4 * seconds
            return Measured(setting=setting, seconds=(seconds,) * 2)

    budget = Budget(40.0, lambda: now[0])
    results = await explore(
        FakeMachine(), ways, [64], 2, budget, [].append, lambda samples: Length(samples=samples, steps=2)
    )
    assert {(item.setting.way, item.setting.steps) for item in results if item.setting.slots == 2} >= {
        (way, 2) for way in ways
    }
    assert TimeModel(results).step(64) == pytest.approx(0.012, rel=1e-6)


async def test_each_way_is_measured_with_all_workers_before_its_short_rounds():
    """The machines are so busy that the time ends before the short rounds."""
    now, ways = [0.0], [Way(mode, "star", codec) for mode in ("sync", "async") for codec in ("float32", "int8")]
    ways.append(Way("sync", "gradient", "float32"))

    class FakeMachine:
        samples = 100_000

        async def rounds(self, setting, most_s):
            now[0] += 5.0
            return Measured(setting=setting, seconds=(0.050 + 0.001 * setting.steps,) * 3)

    results = await explore(FakeMachine(), ways, [64, 128], 2, Budget(60.0, lambda: now[0]), [].append, whole_epochs)
    assert {item.setting.way for item in results if item.setting.slots == 2} == {*ways}
    short = [
        item for item in results if item.setting.slots == 2 and item.setting.way != ways[0] and item.setting.steps == 2
    ]
    assert len(short) < 3


@pytest.mark.parametrize("exchange", ["star", "gradient"])
async def test_few_measurements_show_how_long_a_step_takes_on_one_worker(exchange):
    """The machines are so busy that the time allows only a few measurements."""
    now, ways = [0.0], [Way("sync", exchange, "float32"), Way("async", "star", "float32")]

    class FakeMachine:
        samples = 100_000

        async def rounds(self, setting, most_s):
            now[0] += 5.0
            seconds = 0.050 + setting.steps * (0.001 + 0.0005 * (setting.slots - 1))
            return Measured(setting=setting, seconds=(seconds,) * 3)

    results = await explore(FakeMachine(), ways, [64, 128], 2, Budget(25.0, lambda: now[0]), [].append, whole_epochs)
    model = TimeModel(results)
    assert model.knows_step(64)
    assert model.step(64) == pytest.approx(0.001, rel=1e-6)


async def test_the_budget_counts_the_loading_of_the_data_on_the_master(two_workers, monkeypatch):
    begun = list[str]()

    async def samples(app):
        begun.append("data")
        raise ConfigError("enough")

    def budget(seconds, most):
        begun.append("budget")
        return Budget(seconds, most=most)

    monkeypatch.setattr(planning, "_samples", samples)
    monkeypatch.setattr(planning, "Budget", budget)
    with pytest.raises(ConfigError, match="enough"):
        await plan(app(two_workers, Loud), again=True)
    assert begun == ["budget", "data"]
