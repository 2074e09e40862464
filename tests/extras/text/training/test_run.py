"""Tests of training texts on workers.

The weights have the bits of the same model in Python, even after a loss. Workers get the text, and a changed text is named.
"""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import ddlf
from ddlf.cluster.sources import Sources
from ddlf.errors import AppError, CheckpointMismatch, ConfigError
from ddlf.events import WorkerLost
from ddlf.extras.text.text_app import app_of
from ddlf.extras.text.training import text_bytes
from tests.commands import several
from tests.extras.text.language.texts import DIGITS

pytestmark = pytest.mark.asyncio(loop_scope="session")
TEXT = DIGITS + "train:data digits; train:optimizer SGD(learning_rate=0.1); train:epochs 2; train:batch 16;"


class InPython(ddlf.IApp):
    """An app with the same model and data in Python."""

    verbose = False
    master_epochs = 2
    batch_size = 16

    def load_dataset(self):
        (x, y), (x_test, y_test) = ddlf.load_digits()
        self.x_train, self.y_train = x.reshape(-1, 64), y.argmax(axis=1).astype("int32")
        self.x_test, self.y_test = x_test.reshape(-1, 64), y_test.argmax(axis=1).astype("int32")

    def create_model(self):
        import keras
        from keras import layers

        he = dict(
            activation="relu", kernel_initializer="he_uniform", bias_initializer=keras.initializers.Constant(0.01)
        )
        self.model = keras.Sequential(
            [keras.Input((64,)), layers.Dense(48, **he), layers.Dense(24, **he), layers.Dense(10, activation="softmax")]
        )
        self.model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])


class OnlyData(InPython):
    """An app with a text as its model."""

    notation = "digits.nnm"
    create_model = ddlf.IApp.create_model


class Loading(InPython):
    """An app that loads a text in ``create_model``."""

    def create_model(self):
        self.model = ddlf.load_notation("digits.nnm")


@pytest.fixture
def text(tmp_path, monkeypatch):
    path = tmp_path / "digits.nnm"
    path.write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    return path


def quiet(app):
    app.verbose = False
    return app


async def bits(app):
    await app.train_model()
    return [array.tobytes() for array in app.model.get_weights()]


@pytest.mark.slow
async def test_text_trains_to_the_bits_of_python_after_losing_a_worker(two_workers, text):
    def kill(record):
        if record.round == 1:
            os.kill(two_workers.workers[1].executor.pid, signal.SIGKILL)

    expected = await bits(InPython(two_workers))
    assert await bits(OnlyData(two_workers)) == expected
    assert await bits(Loading(two_workers)) == expected
    lost, events = quiet(app_of(text)(two_workers)), []
    lost.subscribe(events.append)
    lost.on_round = kill
    assert await bits(lost) == expected
    assert any(isinstance(event, WorkerLost) for event in events)
    assert "SCE" not in [event.value for event in events if type(event).__name__ == "Decided"]
    assert (await lost.evaluate_model())["accuracy"] > 0.5
    await two_workers.connect()


@pytest.mark.slow
async def test_resume_refuses_a_changed_text(two_workers, text):
    first = quiet(app_of(text)(two_workers))
    first.checkpoint = text.parent / "kept"
    await first.train_model()
    text.write_text(TEXT.replace("learning_rate=0.1", "learning_rate=0.2"))
    other = quiet(app_of(text)(two_workers))
    other.checkpoint, other.resume, other.master_epochs = first.checkpoint, "auto", 3
    with pytest.raises(CheckpointMismatch, match=r"text: '[0-9a-f]{16}' in the checkpoint, '[0-9a-f]{16}' now"):
        await other.train_model()
    text.write_text("# only this comment is new\n" + TEXT)
    same = quiet(app_of(text)(two_workers))
    same.checkpoint, same.resume, same.master_epochs = first.checkpoint, "auto", 3
    assert len(await same.train_model()) == 1


@pytest.mark.slow
async def test_run_command_trains_a_text_without_python_code(text, standing_template):
    folder = text.parent
    words = ["ddlf", "run", text.name, "--local", "2", "--out", "runs", "--save", "out.safetensors"]
    (output,) = several([[*words, "-p", "learning_rate=0.2", "--ui", "plain"]], folder, standing_template)
    assert "decided   train:scaling none: inputs lie between -0.5 and 0.5 (scaling-fine)" in output
    assert "test      accuracy" in output
    assert ddlf.load_notation(folder / "out.safetensors").text.count("train:") > 8
    (copy,) = (folder / "runs").glob("*/model.nnm")
    assert "train:learning_rate 0.2;" in copy.read_text()
    assert "train:optimizer SGD();" in copy.read_text()
    assert copy.parent.name.endswith("digits")


# -- refusals before the start ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "values", "kind", "sentence"),
    [
        ("", {"data": "mnst"}, ConfigError, "--data mnst: .*did you mean 'mnist'"),
        ("", {"optimizer": "addam"}, ConfigError, "-p optimizer: optimizer must be .*did you mean 'Adam'"),
        ("train:mode downpour; train:merge median;", {}, ConfigError, "merge='median' is for synchronous training"),
    ],
)
async def test_run_command_refuses_impossible_values(text, more, values, kind, sentence):
    text.write_text(TEXT + more)
    app = app_of(text)()
    for name, value in values.items():
        setattr(app, name, value)
    with pytest.raises(kind, match=sentence):
        await app.run_context.check()


async def test_text_without_data_explains_how_to_name_it(text):
    text.write_text(DIGITS)
    with pytest.raises(ConfigError, match="does not say what data it is to learn") as error:
        await app_of(text)().run_context.check()
    assert "--data digits|mnist|cifar10|iris|FILE.npz" in str(error.value)


async def test_app_uses_a_text_instead_of_create_model(text):
    app = OnlyData()
    await app.run_context.check_written()
    assert app.notation.inputs == {"digits": (64,)}
    assert (app.master_epochs, app.seed) == (2, 0)
    text.write_text(TEXT.replace("epochs 2", "epochs 7") + "train:seed 5;")
    other = OnlyData()
    await other.run_context.check_written()
    assert (other.master_epochs, other.seed) == (2, 5)  # the class sets its own epochs
    wrong = type("Wrong", (OnlyData,), {"notation": 3})()
    with pytest.raises(AppError, match="notation must be the file of a text"):
        await wrong.run_context.check_written()


RARE = "a:input shape=[4]; a:output shape=[3]; a:layers Dense(units=3, activation=softmax);"


async def test_open_settings_of_a_run_are_decided(tmp_path):
    """Values from the text, the class, an option or a callback are kept, including the value "none"."""
    (tmp_path / "rare.nnm").write_text(RARE)
    x, y = np.ones((100, 4), "float32"), np.zeros(100, int)
    x[7], y[:3] = 1e6, 1
    np.savez(tmp_path / "rare.npz", x_train=x, y_train=y, x_test=x, y_test=y)

    async def app(**settings):
        instance = app_of(tmp_path / "rare.nnm", str(tmp_path / "rare.npz"))()
        vars(instance).update(settings)
        await instance.run_context.check()
        return instance

    assert (await app()).clip == "rolling"
    assert (await app()).class_weight == {0: 0.515464, 1: 16.6667}
    assert (await app(clip="none", class_weight=None)).class_weight is None
    assert (await app(clip="agc")).clip == "agc"
    assert {decision.key for decision in (await app(clip="agc")).notation.decisions}.isdisjoint({"clip"})
    assert "schedule" in {decision.key for decision in (await app()).notation.decisions}
    for settings, key in ((dict(rate_decay="webnn"), "schedule"), (dict(mode="downpour"), "clip")):
        assert key not in {decision.key for decision in (await app(**settings)).notation.decisions}


async def test_app_takes_settings_from_its_text(text):
    assert (app_of(text).master_epochs, app_of(text).batch_size, app_of(text).__name__) == (2, 16, "digits")


# -- sending texts to workers -----------------------------------------------------------------------------------------


async def test_master_gives_only_texts_below_its_folders(text, monkeypatch):
    folder = text.parent
    monkeypatch.setattr(sys, "path", [str(folder / "elsewhere")])
    inner, outer = folder / "inner", folder / "outer"
    inner.mkdir()
    outer.mkdir()
    for path in (inner / "one.nnm", outer / "two.nnm", inner / "data.txt", inner / ".hidden.nnm"):
        path.write_text("a")
    (inner / "link.nnm").symlink_to(outer / "two.nnm")
    monkeypatch.chdir(inner)
    give = Sources(inner)
    assert give.answer("text", "one.nnm") == b"a"
    assert give.answer("text", str(inner / "one.nnm")) == b"a"
    for name in ("../outer/two.nnm", str(outer / "two.nnm"), "link.nnm", "data.txt", ".hidden.nnm", "none.nnm", ""):
        assert give.answer("text", name) is None


async def test_worker_takes_the_text_of_the_master(text, monkeypatch):
    monkeypatch.setattr(text_bytes, "ask", lambda name: DIGITS.encode() if name == "digits.nnm" else None)
    assert "train" not in ddlf.load_notation("digits.nnm").text
    with pytest.raises(ddlf.DDLFError, match=r"the master gives no text .other\.nnm."):
        ddlf.load_notation("other.nnm")


async def test_worker_gets_the_text_from_a_file_of_weights(text, monkeypatch):
    from safetensors.numpy import save_file

    save_file({"w": np.ones(3, "float32")}, text.parent / "some.safetensors", {"ddlf.model": DIGITS})
    save_file({"w": np.ones(3, "float32")}, text.parent / "other.safetensors")
    give = Sources(text.parent)
    assert give.answer("text", "some.safetensors") == DIGITS.encode()
    with pytest.raises(ConfigError, match=r"other.safetensors has no text of a model"):
        give.answer("text", "other.safetensors")
    monkeypatch.setattr(text_bytes, "ask", lambda name: give.answer("text", name))
    monkeypatch.chdir(text.parent.parent)
    monkeypatch.setattr(sys, "path", [str(text.parent), *sys.path])
    loaded = ddlf.load_notation("some.safetensors")
    assert (loaded.outputs, loaded.tensors) == ({"digits": (10,)}, None)


async def test_text_beside_the_script_is_read(text, monkeypatch):
    monkeypatch.chdir(Path(text.parent).parent)
    monkeypatch.setattr(sys, "path", [str(text.parent), *sys.path])
    assert ddlf.load_notation("digits.nnm").outputs == {"digits": (10,)}


async def test_text_app_keeps_text_and_data_when_pickled(text, tmp_path):
    import pickle

    np.savez(tmp_path / "some.npz", x=np.ones((10, 64), "float32"), y=np.arange(10))
    app = app_of(text, str(tmp_path / "some.npz"))()
    await app.run_context.check()
    data = pickle.dumps(app)
    text.unlink()
    (tmp_path / "some.npz").unlink()
    received = pickle.loads(data)
    await received.load_dataset()
    assert received.x_train.shape == (8, 64)
    assert received.notation.digest == app.notation.digest
    assert (type(received).__name__, received.batch_size) == ("digits", 16)
