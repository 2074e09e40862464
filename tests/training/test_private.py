"""Tests of private data on the workers: the mathematics, the refusals, and the data that the master sees."""

import base64
import contextlib
import hashlib
import os
import re
import zlib

import numpy as np
import pytest

from ddlf import events
from ddlf.algorithms.partition import shuffled
from ddlf.data.app_data import content
from ddlf.data.datasets import fingerprint
from ddlf.errors import AppError, CheckpointMismatch, ConfigError, DatasetError, DatasetMismatch, ProtocolError
from ddlf.extras.planner.planning import plan
from ddlf.monitor.terminal.lines import line
from ddlf.testing import in_process_cluster, network
from ddlf.training.samples.policy import DataDescription, PrivateData
from ddlf.training.samples.shares import ShareLedger
from ddlf.training.slot.task import NOTHING_COUNTED, Reply, Task
from tests.training.models import Quick, blobs, small_model
from tests.training.private_apps import SIZES, Private, kill_in_round, private_samples


def federated_averaging(model, weights, rounds, seed=0, batch_size=16):
    """Plain FedAvg (McMahan et al. 2016): return the mean of the workers' weights, weighted by samples."""
    n = sum(SIZES.values())
    for round in range(rounds):
        after = []
        for number in SIZES:
            x, y = private_samples(number)
            order = shuffled(len(x), seed, round)
            model.set_weights(weights)
            for begin in range(0, len(x), batch_size):
                batch = order[begin : begin + batch_size]
                model.train_on_batch(x[batch], y[batch])
            after.append(model.get_weights())
        weights = [
            sum(SIZES[number] / n * array.astype(float) for number, array in zip(SIZES, arrays, strict=True))
            for arrays in zip(*after, strict=True)
        ]
    return weights


async def test_weights_and_metrics_are_those_of_federated_averaging_by_samples():
    async with in_process_cluster(3) as cluster:
        app = Private(cluster)
        app.master_epochs = 2
        await app.prepare()
        first = app.model.get_weights()
        history = await app.train_sync()
        trained = app.model.get_weights()
        assert (
            max(np.abs(a - b).max() for a, b in zip(trained, federated_averaging(app.model, first, 2), strict=True))
            < 1e-6
        )
        app.model.set_weights(trained)
        for part, seed, share in (("val", 20, 2), ("test", 30, 3)):
            data = [blobs(size // share, seed=seed + number) for number, size in SIZES.items()]
            expected = app.model.evaluate(*map(np.concatenate, zip(*data, strict=True)), verbose=0, return_dict=True)
            metrics = (
                history[-1].test
                if part == "test"
                else {name[4:]: history[-1].metrics[name] for name in ("val_loss", "val_accuracy")}
            )
            assert metrics == pytest.approx(expected, abs=1e-6)
        assert not hasattr(app, "x_train")
        assert not hasattr(app, "x_test")
        assert app.ledger.is_exact(2)
        assert [share.trained for share in app.ledger.shares] == [80, 200, 46]


def inflated(data):
    """Return the inflated form of all compressed data within some bytes."""
    inflated_bytes = bytearray()
    for begin in [match.start() for match in re.finditer(b"\x78[\x01\x5e\x9c\xda]", data)]:
        with contextlib.suppress(zlib.error):
            inflated_bytes += zlib.decompressobj().decompress(data[begin:])
    return bytes(inflated_bytes)


def forms(data):
    """Return the bytes themselves, and their base64 form in each of the three alignments."""
    yield data
    for shift in range(3):
        text = base64.b64encode(b"\0" * shift + data)
        yield text[4 if shift else 0 : -4]


def traces(number):
    """Yield traces of the data of a worker: samples, labels, and plain hashes."""
    x, y = private_samples(number)
    for row in x[:: len(x) // 8]:
        yield from forms(row.tobytes())
        yield from forms(row.astype("float64").tobytes())
    labels = y.argmax(1)
    for kind in ("uint8", "int32", "int64", "float32"):
        yield from forms(labels.astype(kind)[:20].tobytes())
    yield from forms(y[:20].tobytes())
    yield repr(labels[:20].tolist()).encode()
    hashes = {fingerprint(x), fingerprint(y), content({"x_train": fingerprint(x), "y_train": fingerprint(y)})}
    hashes |= {
        hashlib.new(kind, array.tobytes()).hexdigest() for array in (x, y, labels) for kind in ("md5", "sha1", "sha256")
    }
    for text in hashes:
        yield text[:16].encode()
        yield bytes.fromhex(text[:16])


@pytest.mark.slow
async def test_neither_wire_nor_run_folder_nor_checkpoints_have_a_trace_of_private_data(tmp_path, monkeypatch):
    wire = bytearray()
    put = network._Way.put

    def captured(self, message):
        wire.extend(message if isinstance(message, bytes) else b"")
        put(self, message)

    monkeypatch.setattr(network._Way, "put", captured)
    async with in_process_cluster(3, proxied=True) as cluster:
        app = Private(cluster)
        app.master_epochs, app.out, app.checkpoint, app.evaluate_every = 2, tmp_path / "runs", tmp_path / "there", 1
        await app.train_sync()
        weights = app.model.get_weights()
    files = b"".join(path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file())
    for captured_bytes in (bytes(wire), files):
        searched = captured_bytes + inflated(captured_bytes)
        # The search finds weights, so it would find samples.
        assert any(form in searched for form in forms(weights[0].tobytes()[:64]))
        assert not [trace for number in SIZES for trace in traces(number) if trace in searched]


class ByHand(Private):
    """Trains by hand, for tests that hold for any computation."""

    train = Quick.train


class Watched(ByHand):
    """Each worker writes the number of its samples into its log."""

    log = ""

    def train(self, weights, worker_epochs, batch_size):
        with open(f"{self.log}-{self.worker.id}", "a") as file:
            file.write(f"{len(self.indices)} {len(self.x_train)}\n")
        return super().train(weights, worker_epochs, batch_size)


@pytest.mark.slow
async def test_round_waits_for_a_lost_worker_and_no_other_trains_its_slot(tmp_path):
    async with in_process_cluster(3) as cluster:
        app = Watched(cluster)
        app.log, app.master_epochs = str(tmp_path / "log"), 3
        received = kill_in_round(cluster, app, worker=2, round=2)
        await app.train_sync()
    assert [record.without for record in app.history] == [(), (), ()]
    assert app.history[1].recomputed == 1
    assert {(event.slot, event.worker) for event in received if isinstance(event, events.SlotStarted)} == {
        (1, 1),
        (2, 2),
        (3, 3),
    }
    assert app.ledger.is_exact(3)
    for number, size in SIZES.items():
        assert set((tmp_path / f"log-{number}").read_text().split()) == {str(size)}


@pytest.mark.slow
async def test_run_begins_with_a_worker_that_is_lost_before_its_first_round():
    async with in_process_cluster(3) as cluster:
        app = ByHand(cluster)
        app.master_epochs = 1
        kills = []

        def kill_while_sending(event):
            if isinstance(event, events.PhaseBegan) and (event.worker, event.what) == (2, "sending") and not kills:
                kills.append(cluster.machine(2).kill())

        app.subscribe(kill_while_sending)
        await app.train_sync()
    assert kills == [True]
    assert [share.samples for share in app.ledger.shares] == [*SIZES.values()]
    assert app.ledger.is_exact(1)


def test_reply_with_another_number_of_samples_than_its_task_is_refused():
    """A wrong number would give the update a wrong weight."""
    task = Task(
        slot=0,
        round=0,
        slots=1,
        first_epoch=0,
        epochs=1,
        batch_size=2,
        seed=0,
        indices=np.arange(5),
        weights=[],
        version=0,
    )
    facts = {
        "codec_error": 0.0,
        "fed": None,
        "metrics": {},
        "counted": NOTHING_COUNTED,
        "compute_s": 0.0,
        "wait_data_s": 0.0,
    }
    facts |= {"files": (), "stopped": False, "state": {}}
    message = Reply(task=task, update=None, samples=5, **facts).to_message()
    assert Reply.from_message(message, task, [], None, "worker 1", stays=True).weight == 5
    for samples in (6, 10**9, 0, -5, 5.0, True):
        message["samples"] = samples
        with pytest.raises(ProtocolError, match="trained samples, and was given 5"):
            Reply.from_message(message, task, [], None, "worker 1", stays=True)


@pytest.mark.slow
async def test_round_continues_without_a_worker_that_stays_away_and_takes_it_back():
    async with in_process_cluster(3) as cluster:
        app = ByHand(cluster)
        app.wait_for_workers_s, app.master_epochs = 0.0, 1000
        received = kill_in_round(cluster, app, worker=2, round=2)
        app.is_convergent = lambda record: record.round > 2 and 2 in record.workers
        await app.train_sync()
    missed = [record.round for record in app.history if record.without]
    assert missed
    assert missed[0] == 2
    assert missed == list(range(2, len(app.history)))
    second = app.history[1]
    assert second.without == ((2, 2, 100),)
    assert second.workers == (1, 3)
    assert second.samples == 63
    assert "without slot 2 (100 samples)" in str(second)
    reported = [event for event in received if isinstance(event, events.SlotMissed)]
    assert [event.round for event in reported] == missed
    assert [bool(line(event)) for event in reported] == [True, *[False] * (len(missed) - 1)]
    warned = [event.why for event in received if isinstance(event, events.Warned) and "evaluated without" in event.why]
    assert len(warned) <= 1
    assert any(isinstance(event, events.WorkerReturned) for event in received)
    ledger = app.ledger.summary()
    assert ledger["slots"][1]["left_out"] == missed
    assert ledger["slots"][1]["epochs"] == 2
    assert not ledger["exact"]
    assert ledger["slots"][0]["epochs"] == len(app.history)


class Changing(Watched):
    """Worker 2 has other data when it loads its data again."""

    async def load_dataset(self):
        await super().load_dataset()
        if self.worker.id == 2 and os.path.exists(f"{self.log}-2"):  # noqa: ASYNC240
            self.x_train = self.x_train + 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_worker_that_comes_back_with_other_data_is_excluded(mode, tmp_path):
    async with in_process_cluster(3) as cluster:
        app = Changing(cluster)
        app.log, app.mode, app.master_epochs = str(tmp_path / "log"), mode, 60  # enough for worker 2 to come back
        received = kill_in_round(cluster, app, worker=2, round=3)
        await app.train_model()
    (exclusion,) = [event for event in received if isinstance(event, events.WorkerGone)]
    assert "worker 2 has other private data than before, when it had 100 samples" in exclusion.why
    assert [share.epochs for share in app.ledger.shares] == [60, 2, 60]
    assert app.ledger.shares[1].left_out == tuple(range(2, 60))
    assert app.run_context.progress.is_complete
    assert (tmp_path / "log-2").read_text() == "100 100\n" * 2


@pytest.mark.slow
async def test_asynchronous_slot_waits_for_its_worker_while_other_slots_continue():
    async with in_process_cluster(3) as cluster:
        app = ByHand(cluster)
        app.mode, app.wait_for_workers_s, app.max_staleness = "async", 0.0, 1
        app.master_epochs = 60  # enough for worker 2 to come back
        received = kill_in_round(cluster, app, worker=2, round=2)
        await app.train_model()
    assert [event.round for event in received if isinstance(event, events.SlotMissed)] == [2]
    assert any(record.without == ((2, 2, 100),) for record in app.history)
    assert app.ledger.is_exact(60)


class Elsewhere(Private):
    """Workers 1 and 3 have exchanged their data."""

    swapped = False
    more = 0

    async def load_dataset(self):
        await super().load_dataset()
        number = self.worker.id
        samples = SIZES[4 - number if self.swapped else number]
        self.x_train, self.y_train = private_samples(4 - number if self.swapped else number, samples + self.more)

    async def create_model(self):
        self.model = small_model(self.learning_rate, optimizer="adam")


@pytest.mark.slow
async def test_resumed_run_gives_each_slot_to_the_worker_that_has_its_data(tmp_path):
    bits = []
    for epochs, resume, swapped, folder in ((2, None, False, "a"), (1, None, False, "b"), (2, "auto", True, "b")):
        async with in_process_cluster(3) as cluster:
            app = Elsewhere(cluster)
            app.master_epochs, app.resume, app.swapped, app.checkpoint = epochs, resume, swapped, tmp_path / folder
            await app.train_sync()
            bits.append([array.tobytes() for array in app.model.get_weights()])
    assert bits[2] == bits[0] != bits[1]
    assert app.ledger.is_exact(2)
    async with in_process_cluster(3) as cluster:
        app = Elsewhere(cluster)
        app.master_epochs, app.resume, app.checkpoint, app.more = 3, "auto", tmp_path / "b", 1
        with pytest.raises(CheckpointMismatch, match="worker 1 has other private data than each worker of the"):
            await app.train_sync()


def description(samples=9, shape=(8,), labels=4, name="a"):
    """Return the description that a worker reports of its data."""
    rows = [np.zeros((0, *shape), "float32"), np.zeros((0, labels), "float32")]
    return DataDescription(samples=samples, shape=[samples, *shape], dtype="float32", fingerprint=name, rows=rows)


@pytest.mark.parametrize(
    ("opened", "sentence"),
    [
        (
            {1: description()},
            "private=True with 1 worker: the new weights would show what that worker alone has learned",
        ),
        (
            {1: description(), 2: description(shape=(7,))},
            r"worker 1: x \(8,\) float32, .*\n  worker 2: x \(7,\) float32",
        ),
        (
            {1: description(), 2: description(labels=5)},
            r"y \(4,\) float32\n  worker 2: x \(8,\) float32, y \(5,\) float32",
        ),
    ],
)
def test_data_of_workers_that_does_not_fit_together_is_refused(opened, sentence):
    with pytest.raises(DatasetMismatch, match=sentence):
        PrivateData().compare("", opened)


def test_workers_with_equal_data_keep_their_slots():
    data = PrivateData()
    data.compare("", {1: description(), 2: description(), 3: description(name="c")})
    data.accept(2, description())
    assert data.homes == {0: 1, 1: 2, 2: 3}
    data.continue_with(ShareLedger(data.ledger(None).shares[::-1]))
    assert data.homes == {0: 3, 1: 1, 2: 2}
    data.accept(7, description(name="c"))  # the machine returns as another worker
    assert data.homes[0] == 7


@pytest.mark.parametrize("name", ["x_train", "train_data"])
async def test_private_data_on_the_master_is_refused(name):
    app = Private()
    app.load_test_dataset = lambda: setattr(app, name, np.zeros((3, 8)))
    with pytest.raises(AppError, match=f"private=True, but the master has {name}; set it in load_dataset, which only"):
        await PrivateData().load(app)


def test_worker_refuses_private_data_with_nan():
    app = Private()
    app.x_train, app.y_train = private_samples(1)
    app.x_train[3, 1] = np.nan
    with pytest.raises(DatasetError, match="1 of 320 values of x_train are NaN or infinite, which would ruin"):
        PrivateData().describe(app, {})


class Beyond(Private):
    """Worker 2 has a label without an output of the model. The others leave the weights as they are."""

    def train(self, weights, worker_epochs, batch_size):
        return [np.zeros_like(array) for array in weights], {}

    async def load_dataset(self):
        await super().load_dataset()
        self.y_train, self.y_val, self.y_test = (y.argmax(1) for y in (self.y_train, self.y_val, self.y_test))
        if self.worker.id == 2:
            self.y_train[7] = 48151

    async def create_model(self):
        await super().create_model()
        self.model.compile("sgd", "sparse_categorical_crossentropy")


async def test_worker_counts_labels_without_an_output_and_reveals_none():
    async with in_process_cluster(3) as cluster:
        app, received = Beyond(cluster), []
        app.subscribe(received.append)
        await app.train_sync(1)
    (exclusion,) = [event for event in received if isinstance(event, events.WorkerGone)]
    assert exclusion.worker == 2
    assert "1 of 100 labels in y_train are not in 0 to 3, the outputs of the model" in exclusion.why
    assert "48151" not in "\n".join(map(str, received))
    assert "spare" not in "\n".join(map(line, received))  # worker 2 is excluded


@pytest.mark.parametrize(("ignored", "label"), [(None, -1), (255, 4), (-1, 255)])
def test_only_ignored_labels_may_be_beyond_the_outputs(ignored, label):
    import keras

    app = Private()
    app.model = small_model()
    app.model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=ignored))
    app.y_val = np.array([0, 3, *[ignored] * (ignored is not None)])
    PrivateData().check_model(app)
    app.y_val = np.array([[0], [label]], "float32")
    with pytest.raises(DatasetError, match="1 of 2 labels in y_val are not in 0 to 3"):
        PrivateData().check_model(app)


@pytest.mark.parametrize("part", ["val", "test"])
def test_worker_refuses_samples_for_evaluation_that_the_model_does_not_take(part):
    app = Private()
    app.model = small_model()
    x, y = blobs(4)
    app.x_train, app.y_train = x, y
    setattr(app, f"y_{part}", y)
    setattr(app, f"x_{part}", x)
    PrivateData().check_model(app)
    setattr(app, f"x_{part}", x[:, :-1])
    with pytest.raises(
        DatasetError, match=rf"the model does not take the samples of x_{part}, whose shape is \(\d+,\)"
    ):
        PrivateData().check_model(app)


async def test_adviser_and_planner_refuse_private_data_by_name():
    with pytest.raises(ConfigError, match="private=True: the adviser looks at samples, and only workers have them"):
        await Private().advise("quick")
    with pytest.raises(ConfigError, match="private=True: a plan compares numbers of slots, and each worker is one"):
        await plan(Private(), 1.0)


@pytest.mark.slow
async def test_master_evaluates_its_own_test_data_and_rejects_nothing_of_present_workers():
    async with in_process_cluster(3) as cluster:
        app = Private(cluster)
        app.wait_for_workers_s, app.master_epochs, app.update_policy = 0.0, 3, "clip"
        app.load_test_dataset = lambda: vars(app).update(zip(("x_test", "y_test"), blobs(50, seed=5), strict=True))
        kill_in_round(cluster, app, worker=2, round=2)
        history = await app.train_sync()
        assert history[1].without == ((2, 2, 100),)
        assert history[1].workers == (1, 3)
        assert history[1].verdicts == ()
        assert [record.test for record in history] == [{}, {}, {}]  # the master can test at any time
        expected = app.model.evaluate(*blobs(50, seed=5), verbose=0, return_dict=True)
        assert await app.evaluate_model() == pytest.approx(expected, abs=1e-6)
