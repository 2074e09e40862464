"""Tests of secure aggregation: exact sums, no plain updates on the wire, workers lost in each phase, refused steps."""

import numpy as np
import pytest

from ddlf import events
from ddlf.errors import AppError, BadUpdate, ClusterTooSmall, ConfigError, ProtocolError
from ddlf.monitor.terminal.lines import line
from ddlf.privacy.accountant import Noise, epsilon
from ddlf.privacy.secure_sum import LEVELS
from ddlf.testing import in_process_cluster, local_cluster, network
from ddlf.training.exchanges.carrier import Carrier
from tests.later import Later
from tests.training.models import Quick, blobs, small_model
from tests.training.private_apps import Private, kill_in_round, private_samples
from tests.training.test_private import ByHand, federated_averaging
from tests.training.test_private_noise import clipped_averaging

stats = Later("scipy.stats")


class Masked(ByHand):
    """Three workers whose updates have masks."""

    secure_aggregation = True


class Plain(ByHand):
    """Four workers without masks."""

    async def load_dataset(self):
        self.x_train, self.y_train = private_samples(self.worker.id, 30 + 10 * self.worker.id)


class Four(Plain):
    """Four workers whose updates have masks. Three of them can continue without the fourth."""

    secure_aggregation = True
    master_epochs = 3


def weights_of(app):
    return np.concatenate([array.ravel() for array in app.model.get_weights()])


async def test_weights_are_those_of_federated_averaging_and_no_worker_reports_a_metric():
    async with in_process_cluster(3) as cluster:
        app = Masked(cluster)
        await app.prepare()
        first = app.model.get_weights()
        history = await app.train_sync()
        trained = app.model.get_weights()
        expected = federated_averaging(app.model, first, 5)
    assert max(np.abs(a - b).max() for a, b in zip(trained, expected, strict=True)) < 5e-6
    assert [record.metrics for record in history] == [{}] * 5
    assert not history[-1].test
    assert app.ledger.is_exact(5)


async def test_workers_without_samples_are_named_if_too_few_remain_for_a_sum():
    class Empty(Masked):
        async def load_dataset(self):
            await super().load_dataset()
            if self.worker is not None and self.worker.id == 2:
                self.x_train, self.y_train = self.x_train[:0], self.y_train[:0]

    async with in_process_cluster(3) as cluster:
        with pytest.raises(
            ClusterTooSmall, match="needs 3 workers with samples, and there are 2; look in load_dataset"
        ):
            await Empty(cluster).train_sync()


async def test_one_round_differs_from_the_plain_run_by_the_rounding_of_its_numbers_only():
    weights = []
    for app_class in (Plain, Four):
        async with in_process_cluster(4) as cluster:
            app = app_class(cluster)
            app.master_epochs = 1
            await app.train_sync()
            weights.append(weights_of(app).astype(float))
    shares = np.array([40, 50, 60, 70]) / 70
    rounding = 4 * (8.0 / LEVELS) / 2 / shares.sum() + 2 * np.finfo("float32").eps * np.abs(weights[0]).max()
    assert 0 < np.abs(weights[1] - weights[0]).max() < rounding


@pytest.mark.slow
@pytest.mark.usefixtures("one_template")
async def test_real_processes_add_up_under_masks():
    weights = []
    async with local_cluster(3) as cluster:
        for masks in (False, True):
            app = Masked(cluster)
            app.secure_aggregation, app.master_epochs = masks, 2
            await app.train_sync()
            weights.append(weights_of(app))
    np.testing.assert_allclose(weights[1], weights[0], atol=2e-6)


class Writing(Plain):
    """Each worker writes its updates into files. The test searches the wire for them."""

    log = ""
    master_epochs = 2

    def train(self, weights, worker_epochs, batch_size):
        update, metrics = Quick.train(self, weights, worker_epochs, batch_size)
        flat = np.concatenate([array.ravel() for array in update])
        np.save(f"{self.log}-{self.worker.id}-{self.replica.round}.npy", flat)
        return update, metrics


def on_the_wire(update, share, wire):
    """Whether 16 successive values of an update, or of its numbers without masks, are on the wire."""
    numbers = np.rint(update.astype(float) * share * LEVELS / 8.0).astype("<i4")
    plain = (update[at : at + 16].tobytes() for at in range(0, update.size - 16, 16))
    return any(part in wire for part in plain) or any(
        numbers[at : at + 16].tobytes() in wire for at in range(0, numbers.size - 16, 16)
    )


@pytest.mark.parametrize("masks", [True, False])
async def test_the_wire_and_the_files_of_the_master_have_no_plain_update(masks, tmp_path, monkeypatch):
    wire = bytearray()
    put = network._Way.put

    def captured(self, message):
        wire.extend(message if isinstance(message, bytes) else b"")
        put(self, message)

    monkeypatch.setattr(network._Way, "put", captured)
    async with in_process_cluster(4, proxied=True) as cluster:
        app = Writing(cluster)
        app.secure_aggregation, app.log = masks, str(tmp_path / "update")
        app.out, app.checkpoint = tmp_path / "runs", tmp_path / "there"
        await app.train_sync()
    content = bytes(wire) + b"".join(
        path.read_bytes() for folder in ("runs", "there") for path in (tmp_path / folder).rglob("*") if path.is_file()
    )
    updates = {
        (worker, round): np.load(f"{app.log}-{worker}-{round}.npy") for worker in range(1, 5) for round in (1, 2)
    }
    assert all(np.abs(update).max() > 0 for update in updates.values())
    are_plain = [on_the_wire(update, (30 + 10 * worker) / 70, content) for (worker, _), update in updates.items()]
    assert are_plain == [not masks] * 8  # without masks, this search finds each update


def kill_at_step(monkeypatch, cluster, verb, *, worker, slot):
    """Kill a worker when the master first asks the worker of a slot for a step of a sum."""
    ask, killed = Carrier.ask, []

    async def kill(self, to, step, *arguments):
        if step == verb and to.id == slot and not killed:
            killed.append(worker)
            cluster.machine(worker).kill()
        return await ask(self, to, step, *arguments)

    monkeypatch.setattr(Carrier, "ask", kill)
    return killed


@pytest.mark.parametrize("verb", ["offer", "mask", "sign"])
async def test_round_continues_without_a_worker_that_is_lost_before_the_sum_is_unmasked(verb, monkeypatch):
    async with in_process_cluster(4) as cluster:
        app, received = Four(cluster), []
        app.subscribe(received.append)
        killed = kill_at_step(monkeypatch, cluster, verb, worker=2, slot=2)
        await app.train_sync()
    assert killed
    first, *later = app.history
    assert first.without == ((2, 2, 50),)
    assert first.workers == (1, 3, 4)
    assert first.samples == 170
    assert first.recomputed == 0
    assert [(item.without, item.workers) for item in later] == [((), (1, 2, 3, 4))] * 2
    [missed] = [item for item in received if isinstance(item, events.SlotMissed)]
    assert "without slot 2 and its 50 samples: its worker was lost before the secure sum" in line(missed)
    assert [share.epochs for share in app.ledger.shares] == [3, 2, 3, 3]


@pytest.mark.parametrize("lost", [2, 4])
async def test_sum_without_a_lost_worker_is_the_mean_of_the_others(lost, monkeypatch):
    """Worker 4 has the most samples, and the numbers of all workers depend on the most samples."""
    async with in_process_cluster(4) as cluster:
        app = Four(cluster)
        app.master_epochs = 1
        await app.prepare()
        kill_at_step(monkeypatch, cluster, "mask", worker=lost, slot=lost)
        await app.train_sync()
        after = weights_of(app)
    async with in_process_cluster(4) as cluster:
        app = Plain(cluster)
        app.wait_for_workers_s, app.master_epochs = 0.0, 1
        kill_in_round(cluster, app, worker=lost, round=1)
        await app.train_sync()
    assert app.history[0].without == ((lost, lost, 30 + 10 * lost),)
    np.testing.assert_allclose(after, weights_of(app), atol=1e-6)


async def test_round_is_void_if_a_worker_is_lost_while_the_sum_is_unmasked(monkeypatch):
    async with in_process_cluster(4) as cluster:
        app, received, weights = Four(cluster), [], []
        app.subscribe(received.append)
        await app.prepare()
        first = weights_of(app)
        app.on_round = lambda record: weights.append(weights_of(app))
        killed = kill_at_step(monkeypatch, cluster, "unmask", worker=2, slot=2)
        await app.train_sync()
    assert killed
    void, *later = app.history
    assert void.without == ((1, 1, 40), (2, 2, 50), (3, 3, 60), (4, 4, 70))
    assert void.recomputed == 0
    np.testing.assert_array_equal(weights[0], first)
    assert not np.array_equal(weights[1], first)
    assert [item.without for item in later] == [(), ()]
    assert [share.epochs for share in app.ledger.shares] == [2, 2, 2, 2]
    assert all(share.left_out == (0,) for share in app.ledger.shares)
    missed = [line(item) for item in received if isinstance(item, events.SlotMissed)]
    assert len(missed) == 4
    assert all("the round is void: a worker was lost while the sum was unmasked" in item for item in missed)


async def test_round_is_void_below_three_workers_and_the_next_one_waits_for_the_lost_worker(monkeypatch):
    async with in_process_cluster(3) as cluster:
        app = Four(cluster)
        kill_at_step(monkeypatch, cluster, "mask", worker=2, slot=2)
        await app.train_sync()
    assert [len(record.without) for record in app.history] == [3, 0, 0]


async def test_run_ends_if_fewer_than_three_workers_are_left():
    async with in_process_cluster(3) as cluster:
        app = Four(cluster)
        app.wait_for_workers_s = 0.0
        kill_in_round(cluster, app, worker=2, round=2)
        with pytest.raises(
            ClusterTooSmall, match="a secure sum needs 3 workers, and 2 of 3 are here; start the others"
        ):
            await app.train_sync()
    assert len(app.history) == 1


async def test_resumed_run_ends_with_the_bits_of_one_run(tmp_path):
    """Each run has other masks, but they cancel each other exactly."""
    bits_of_runs = []
    for epochs, resume, folder in ((3, None, "a"), (1, None, "b"), (3, "auto", "b")):
        async with in_process_cluster(4) as cluster:
            app = Four(cluster)
            app.master_epochs, app.resume, app.checkpoint = epochs, resume, tmp_path / folder
            await app.train_sync()
            bits_of_runs.append(weights_of(app).tobytes())
    assert bits_of_runs[2] == bits_of_runs[0] != bits_of_runs[1]
    assert app.ledger.is_exact(3)


class ExtraStep(Carrier):
    """Records the steps of a master, and makes one more step."""

    async def ask(self, worker, verb, *arguments):
        answer = await super().ask(worker, verb, *arguments)
        if verb == self.after and worker.id == 1:
            self.messages.append((arguments, answer))
            for extra_verb, extra_arguments in self.more(arguments):
                with pytest.raises(ProtocolError) as error:
                    await super().ask(worker, extra_verb, *extra_arguments)
                self.messages.append(str(error.value))
        return answer


@pytest.mark.parametrize(
    ("after", "more", "sentence"),
    [
        ("mask", lambda arguments: [("mask", arguments)], "twice"),
        ("mask", lambda arguments: [("unmask", (arguments[0], {}))], "the server has named no survivors"),
        ("sign", lambda arguments: [("sign", (arguments[0], [1, 2, 3]))], "two lists of survivors of one sum"),
        (
            "sign",
            lambda arguments: [("unmask", (arguments[0], dict.fromkeys(arguments[1], bytes(64))))],
            "peer 1 has not signed the list",
        ),
        ("unmask", lambda arguments: [("sign", (arguments[0], [1, 2, 3]))], "a secure sum that this worker is not in"),
        (
            "unmask",
            lambda arguments: [("offer", ("other", 0, 0))],
            "the update of round 1 again, which this worker has helped",
        ),
    ],
)
async def test_worker_refuses_a_step_that_could_unmask_its_update(after, more, sentence, monkeypatch):
    messages = []
    monkeypatch.setattr(ExtraStep, "after", after, raising=False)
    monkeypatch.setattr(ExtraStep, "more", staticmethod(more), raising=False)
    monkeypatch.setattr(ExtraStep, "messages", messages, raising=False)
    monkeypatch.setattr("ddlf.training.start.Carrier", ExtraStep)
    async with in_process_cluster(4) as cluster:
        app = Four(cluster)
        app.master_epochs = 1
        await app.train_sync()
    assert sentence in messages[1]


async def test_update_beyond_the_limit_ends_the_run_and_says_what_to_do():
    async with in_process_cluster(3) as cluster:
        app = Masked(cluster)
        app.update_limit = 1e-9
        with pytest.raises(
            BadUpdate, match=r"beyond the limit of 1e-09, or not finite; raise .* update_limit of the app"
        ):
            await app.train_sync()
    assert not app.history


class Counting(Private):
    """The model has a counter, and normalizes by statistics of other data. Each worker adds 100 to both counters."""

    def train(self, weights, worker_epochs, batch_size):
        step = 0.01 * float(self.x_train.mean())
        return [np.full_like(array, -100 if array.dtype.kind == "i" else step) for array in weights], {}

    async def create_model(self):
        import keras

        class Counter(keras.layers.Layer):
            def build(self, shape):
                self.batches = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

            def call(self, inputs):
                return inputs

        norm = keras.layers.Normalization()
        norm.adapt(blobs(50)[0])
        layers = [norm, Counter(), keras.layers.Dense(4, activation="softmax")]
        self.model = keras.Sequential([keras.Input((8,)), *layers])
        self.model.compile(keras.optimizers.SGD(0.05), "categorical_crossentropy")


async def test_integer_weights_stay_unchanged_with_and_without_masks():
    weights = []
    for masks in (True, False):
        async with in_process_cluster(3) as cluster:
            app = Counting(cluster)
            app.secure_aggregation, app.master_epochs = masks, 2
            await app.train_sync()
            weights.append({weight.path: np.asarray(weight) for weight in app.model.weights})
    assert [array.dtype.kind for array in weights[0].values()].count("i") == 2
    for (name, masked), plain in zip(weights[0].items(), weights[1].values(), strict=True):
        np.testing.assert_allclose(masked, plain, atol=5e-6 if masked.dtype.kind == "f" else 0, err_msg=name)


class Broken(Four):
    """Worker 3 computes an update that is not finite."""

    def train(self, weights, worker_epochs, batch_size):
        update, metrics = Quick.train(self, weights, worker_epochs, batch_size)
        return [array * np.nan if self.worker.id == 3 else array for array in update], metrics


async def test_update_that_is_not_finite_ends_the_run_and_names_its_worker():
    async with in_process_cluster(4) as cluster:
        with pytest.raises(BadUpdate, match=r"slot 3: .* are NaN or infinite"):
            await Broken(cluster).train_sync()


class Noised(Masked):
    """Two rounds with negligible noise."""

    master_epochs = 2
    update_clip = 0.1
    noise_multiplier = 1e-6


async def test_clipped_updates_are_averaged_under_masks():
    async with in_process_cluster(3) as cluster:
        app = Noised(cluster)
        await app.prepare()
        first = app.model.get_weights()
        history = await app.train_sync()
        trained = app.model.get_weights()
        expected = clipped_averaging(app, first, 2)
    assert max(np.abs(a - b).max() for a, b in zip(trained, expected, strict=True)) < 2e-6
    assert all(record.metrics.keys() == {"epsilon"} for record in history)
    after_one, after_two = (
        {f"{slot}": epsilon({Noise(multiplier=1e-6): n}, 1e-5) for slot in (1, 2, 3)} for n in (1, 2)
    )
    assert [record.epsilons for record in history] == [after_one, after_two]


class Wide(Four):
    """One round of a model with 52,004 weights."""

    master_epochs = 1

    async def create_model(self):
        self.model = small_model(self.learning_rate, width=4000)


async def test_masked_updates_are_hardly_larger_than_plain_ones():
    sent_bytes = []
    for masks in (True, False):
        async with in_process_cluster(4) as cluster:
            app = Wide(cluster)
            app.secure_aggregation = masks
            await app.train_sync()
            sent_bytes.append(app.history[0].bytes_back)
    assert sent_bytes[1] > 4 * 4 * 52_004
    assert sent_bytes[0] < 1.02 * sent_bytes[1]


class Loud(Wide):
    """One round in which noise is the only change."""

    update_clip = 1e-3
    noise_multiplier = 3e3


async def test_sum_of_clipped_updates_has_at_least_the_stated_noise(monkeypatch):
    """A share is a third of the whole noise. One of the four workers is lost, and three shares remain."""
    async with in_process_cluster(4) as cluster:
        app = Loud(cluster)
        await app.prepare()
        first = weights_of(app)
        kill_at_step(monkeypatch, cluster, "mask", worker=2, slot=2)
        await app.train_sync()
        noise = 4 * (weights_of(app) - first).astype(float)  # the divisor is the number of all slots
    assert app.history[0].without == ((2, 2, 50),)
    assert noise.size > 5e4
    assert noise.std() == pytest.approx(3.0, rel=5 / np.sqrt(2 * noise.size))
    assert stats.kstest(noise / 3.0, "norm").pvalue > 1e-6


async def test_two_workers_are_refused():
    async with in_process_cluster(2) as cluster:
        with pytest.raises(
            ConfigError, match="secure_aggregation=True needs 3 workers, and there are 2: with two, each"
        ):
            await Masked(cluster).train_sync()


async def test_test_data_of_workers_is_refused_with_the_method_that_the_master_calls():
    async with in_process_cluster(3) as cluster:
        app = Masked(cluster)
        app.evaluate_every = 1
        with pytest.raises(AppError, match="there is no x_test; set x_test, y_test in load_test_dataset"):
            await app.train_sync()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"rate_decay": "plateau"},
            "looks at the loss, but workers report no metrics, .*; set x_val, y_val in load_test_",
        ),
        (
            {"rate_decay": "webnn"},
            "looks at validation data, but there is no x_val; set x_val, y_val in load_test_dataset",
        ),
        (
            {"converge": "target:metric=val_loss"},
            "looks at 'val_loss', but there is no x_val; set x_val, y_val in load_test_dataset",
        ),
    ],
)
async def test_rules_that_look_at_metrics_of_workers_are_refused(settings, sentence):
    async with in_process_cluster(3) as cluster:
        app = Masked(cluster)
        for name, value in settings.items():
            setattr(app, name, value)
        with pytest.raises(AppError, match=sentence):
            await app.train_sync()


class Called(Masked):
    """Three callbacks on the master, and validation data there."""

    master_epochs = 2

    async def load_test_dataset(self):
        self.x_val, self.y_val = blobs(30, seed=5)

    async def create_model(self):
        import keras

        await super().create_model()
        self.callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (epoch + 1)),
            keras.callbacks.EarlyStopping("loss"),
            keras.callbacks.EarlyStopping("val_loss", patience=5),
        ]


async def test_callbacks_of_the_master_see_its_validation_data_and_run_warns_of_missing_metrics():
    async with in_process_cluster(3) as cluster:
        app, received = Called(cluster), []
        app.subscribe(received.append)
        with pytest.warns(UserWarning, match="conditioned on metric `loss` which is not available"):
            history = await app.train_sync()
    assert [record.metrics.keys() for record in history] == [{"val_loss", "val_accuracy", "learning_rate"}] * 2
    warnings = [event.why for event in received if isinstance(event, events.Warned) and event.about == "callback"]
    assert warnings == [
        "EarlyStopping looks at loss, but workers report no metrics, which have neither noise nor masks"
    ]


class Adam(Masked):
    """The state of Adam has sums of gradients."""

    optimizer_state = "kept"
    train = Private.train

    async def create_model(self):
        self.model = small_model(self.learning_rate, optimizer="adam")


@pytest.mark.parametrize("state", ["kept", "stays"])
async def test_states_of_optimizers_that_reveal_updates_are_refused(state):
    async with in_process_cluster(3) as cluster:
        app = Adam(cluster)
        app.optimizer_state = state
        with pytest.raises(
            ConfigError, match=f"secure_aggregation with optimizer_state='{state}' of an optimizer with"
        ):
            await app.train_sync()


async def test_adam_trains_if_its_state_restarts_in_each_round():
    async with in_process_cluster(3) as cluster:
        app = Adam(cluster)
        app.optimizer_state, app.master_epochs = "fresh", 2
        history = await app.train_sync()
    assert [record.without for record in history] == [(), ()]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"private": False}, "secure_aggregation without private=True cannot work"),
        ({"mode": "async"}, "secure_aggregation with mode='async' cannot work"),
        ({"merge": "median"}, "secure_aggregation with merge='median' cannot work"),
        ({"update_policy": "clip"}, "secure_aggregation with update_policy='clip' cannot work"),
        ({"codec": "int8"}, "secure_aggregation with codec='int8' cannot work"),
        ({"weights_codec": "delta:int8"}, "secure_aggregation with weights_codec='delta:int8' cannot work"),
        ({"exchange": "sharded"}, "exchange='sharded' contradicts private=True"),
        ({"exchange": "gradient"}, "exchange='gradient' contradicts private=True"),
        (
            {"update_clip": 1.0, "noise_multiplier": 1.0, "privacy_unit": "sample"},
            "secure_aggregation with privacy_unit='sample' cannot work",
        ),
        ({"batchnorm": "local"}, "secure_aggregation with batchnorm='local' cannot work"),
        ({"local_rule": "scaffold"}, "secure_aggregation with local_rule='scaffold' cannot work"),
        ({"update_limit": 1e6}, r"update_limit = 1e\+06 would round usual updates to 0"),
        ({"secure_aggregation": False, "update_limit": 4.0}, "update_limit without secure_aggregation cannot work"),
        (
            {"update_clip": 1.0, "noise_multiplier": 1.0, "update_limit": 0.01},
            "update_limit below the values that .* cannot work: .* leave out update_limit",
        ),
    ],
)
async def test_settings_that_contradict_masks_are_refused(settings, sentence):
    async with in_process_cluster(3) as cluster:
        app = Masked(cluster)
        for name, value in settings.items():
            setattr(app, name, value)
        with pytest.raises(ConfigError, match=sentence):
            await app.train_model()
