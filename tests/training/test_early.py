"""Tests of wrong settings, which are refused before a worker starts. No test here has a worker."""

import numpy as np
import pytest

import ddlf
from ddlf.errors import AppError, CheckpointMismatch, ConfigError
from ddlf.training.checkpoints.resume import check_same_model
from ddlf.training.evaluation.master import check_path
from ddlf.training.refusals import check_backend, check_effect
from ddlf.training.registry import spec_of
from ddlf.training.start import check


class Plain(ddlf.IApp):
    async def load_dataset(self): ...

    async def create_model(self): ...


def app_with(**attributes):
    """Return an app whose class has these attributes."""
    return type("Mine", (Plain,), attributes)()


@pytest.mark.parametrize(
    ("attributes", "suggestion"),
    [
        (dict(master_epoch=3), "master_epochs"),
        (dict(batchsize=3), "batch_size"),
        (dict(batch_sizes=3), "batch_size"),
        (dict(checkpoints="runs/a"), "checkpoint"),
        (dict(evaluate_evry=1), "evaluate_every"),
        (dict(worker_epochs=1, workers_epochs=2), "worker_epochs"),
        (dict(epochs=3), "master_epochs"),
        (dict(strategy="async"), "mode"),
        (dict(compression="int8"), "codec"),
    ],
)
def test_a_misspelt_setting_is_refused_with_the_one_that_was_meant(attributes, suggestion):
    with pytest.raises(ConfigError, match=f"is not a setting, so it would have no effect; did you mean {suggestion}?"):
        check(app_with(**attributes), "sync")
    app = app_with()
    vars(app).update(attributes)
    with pytest.raises(ConfigError, match=f"did you mean {suggestion}?"):
        check(app, "async")


def test_test_data_of_the_master_without_private_training_data_is_refused():
    app = app_with(load_test_dataset=lambda self: None)
    with pytest.raises(AppError, match="load_test_dataset has no effect, because the training data is not private"):
        check(app, "sync")
    app.private = True
    check(app, "sync")


@pytest.mark.parametrize(
    ("attributes", "hint"),
    [
        (dict(data={"batch_size": 8}), "write data = ddlf.Data(...)"),
        (dict(local="steps=3"), "write local = ddlf.Local(...)"),
        (dict(local={"worker_steps": 3}), "write local = ddlf.Local(...)"),
    ],
)
def test_settings_that_are_written_as_a_dict_or_a_text_are_refused(attributes, hint):
    with pytest.raises(ConfigError) as refused:
        check(app_with(**attributes), "sync")
    assert "so it would have no effect" in str(refused.value)
    assert refused.value.hint == hint
    check(app_with(data={"train": 1}, local="here", name_of_it=reads_attributes), "sync")


def test_two_settings_of_the_learning_rate_are_refused():
    with pytest.raises(ConfigError, match=r"schedule='cosine.* and rate_decay='plateau.*' both set the learning rate"):
        check(app_with(schedule="cosine", rate_decay="plateau"), "sync")
    assert check(app_with(schedule="cosine", rate_decay="never"), "sync")
    assert check(app_with(rate_decay="plateau"), "sync")


def reads_attributes(self):
    return self.seeds, self.batch_sizes


@pytest.mark.parametrize(
    "attributes",
    [
        dict(learning_rate=0.1, layers=2, optimizer="adam", width=3, model_name="x"),
        dict(seeds=[1, 2]),  # another type than that of a seed
        dict(batch_sizes=3, seeds=4, name_of_it=reads_attributes),  # a method reads them
        dict(epochs=3, name_of_it=lambda self: self.epochs),
        dict(_master_epoch=3),
    ],
)
def test_attributes_of_the_app_itself_are_left_alone(attributes):
    assert check(app_with(**attributes), "sync").data.batch_size == 32


def test_error_of_a_train_with_wrong_parameters_shows_the_right_ones():
    with pytest.raises(
        AppError, match=r"Mine.train cannot be .*; write train\(self, weights, worker_epochs, batch_size\)"
    ):
        check(app_with(train=lambda self, worker_epochs, batch_size: None), "sync")
    check(app_with(train=lambda self, weights, *rest, **more: None), "sync")


@pytest.mark.parametrize(
    ("attributes", "sentence"),
    [
        (dict(resume="auto"), r"needs a folder of checkpoints; set checkpoint, too \(--checkpoint DIR\)"),
        (dict(checkpoint=__file__), "checkpoint must be a folder, but .* is a file"),
        (dict(resume=__file__), "resume must be a folder, but .* is a file"),
        (dict(checkpoint=f"{__file__}/runs/a"), "checkpoint=.* cannot be made, because .*early.py' is a file; choose"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused(attributes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check(app_with(**attributes), "sync")


def test_a_folder_for_checkpoints_that_cannot_be_written_to_is_refused_and_not_made(tmp_path, monkeypatch):
    # Like for any user except root, who may write to every folder.
    monkeypatch.setattr("os.access", lambda name, mode: name != tmp_path)
    for path in (tmp_path, tmp_path / "runs" / "a"):
        with pytest.raises(ConfigError, match="cannot be written to; choose another folder"):
            check(app_with(checkpoint=path), "sync")
    assert list(tmp_path.iterdir()) == []


def test_folder_with_checkpoints_of_another_run_is_refused(tmp_path):
    for number in (7, 12):
        (tmp_path / f"round-{number:06d}").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        ConfigError, match=r"has checkpoints already, the newest of round 12; continue from it with resu"
    ):
        check(app_with(checkpoint=tmp_path), "sync")
    check(app_with(checkpoint=tmp_path, resume="auto"), "sync")
    check(app_with(checkpoint=tmp_path / "new"), "sync")
    assert sorted(tmp_path.iterdir()) == before


def test_unknown_backend_is_refused_with_the_known_ones(monkeypatch):
    for name, guess in (("jx", ", did you mean 'jax'"), ("xyz", "")):
        monkeypatch.setenv("KERAS_BACKEND", name)
        with pytest.raises(ConfigError) as refused:
            check_backend()
        assert str(refused.value).startswith(
            f"KERAS_BACKEND must be one of tensorflow, jax, torch, got {name!r}{guess}"
        )
    for name in ("tensorflow", ""):
        monkeypatch.setenv("KERAS_BACKEND", name)
        check_backend()


def test_a_model_that_is_read_only_is_not_replaced(tmp_path, monkeypatch):
    path = tmp_path / "model.keras"
    path.touch()
    check_path(path)
    # Like for any user except root, who may write to every file.
    monkeypatch.setattr("os.access", lambda name, mode: name != path)
    with pytest.raises(ConfigError, match="already exists and is read-only; choose another name"):
        check_path(path)


def test_a_path_that_no_model_can_be_saved_to_is_refused(tmp_path):
    (tmp_path / "folder.keras").mkdir()
    for name, sentence in (
        ("model.h5", "a model is saved as a .keras or .safetensors file, got"),
        ("missing/model.keras", "does not exist; make it first"),
        ("folder.keras", "is a folder"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            check_path(tmp_path / name)
    check_path(tmp_path / "model.keras")
    assert [path.name for path in tmp_path.iterdir()] == ["folder.keras"]


def test_checkpoint_of_another_model_is_refused_by_its_first_weight():
    stored = {"0000 dense/kernel": np.zeros((8, 16)), "0001 dense/bias": np.zeros(16)}
    rows = [["dense_7/kernel", [8, 16], "float32"], ["dense_7/bias", [16], "float32"]]
    check_same_model(stored, rows)
    with pytest.raises(CheckpointMismatch) as refused:
        check_same_model(stored, [["dense/kernel", [8, 32], "float32"], ["dense/bias", [32], "float32"]])
    assert str(refused.value) == (
        "the checkpoint is of another model: weight 1 is dense/kernel of shape (8, 16) in it, but dense/kernel of shape (8, 32) "
        "here; use the model of the checkpoint, or start again in another folder"
    )
    with pytest.raises(CheckpointMismatch, match=r"weight 2 is dense/bias of shape .* in it, but not there here"):
        check_same_model(stored, rows[:1])
    with pytest.raises(
        CheckpointMismatch, match=r"weight 3 is not there in it, but out/kernel of shape \(16, 4\) here"
    ):
        check_same_model(stored, [*rows, ["out/kernel", [16, 4], "float32"]])


@pytest.mark.parametrize(
    ("backend", "installed", "sentence"),
    [
        (
            None,
            {"keras", "jax"},
            "tensorflow, which Keras would use here, is not installed; set KERAS_BACKEND=jax, which is installed",
        ),
        ("torch", {"keras"}, "torch, which Keras would use here, is not installed; install it: pip install torch"),
        (None, set(), "keras, which trains the models, is not installed; install it: pip install keras tensorflow"),
    ],
)
def test_a_backend_that_is_not_installed_is_refused_with_one_that_is(
    monkeypatch, tmp_path, backend, installed, sentence
):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    if backend:
        monkeypatch.setenv("KERAS_BACKEND", backend)
    with pytest.raises(ConfigError) as refused:
        check_backend()
    assert str(refused.value) == sentence
    (tmp_path / "keras.json").write_text("{}")
    if backend is None and installed:
        check_backend()


def spec_with(**settings):
    return spec_of(ddlf.IApp(), settings.pop("mode", None), settings)


LARGE, SMALL, DOUBLE = np.zeros((300, 2), "f4"), np.zeros(3, "f4"), np.zeros((300, 2))


@pytest.mark.parametrize(
    ("settings", "weights", "trainable", "beginning"),
    [
        ({"codec": "int8"}, [LARGE, SMALL], [True, True], ""),
        ({"codec": "int8"}, [LARGE, SMALL], [False, True], "codec='int8' has no effect: only float32 weights of 1024"),
        ({"codec": "int8"}, [DOUBLE], [True], "codec='int8' has no effect"),
        ({"weights_codec": "float16"}, [DOUBLE], [True], "weights_codec='float16' has no effect"),
        (
            {"codec": "topk:0.1", "weights_codec": "bfloat16"},
            [SMALL],
            [True],
            "codec='topk:fraction=0.1' and weights_codec='bfloat16' have no effect",
        ),
        ({"weights_codec": "delta:float32"}, [SMALL], [True], ""),
        ({}, [SMALL], [True], ""),
        ({"mode": "downpour", "weights_codec": "float16"}, [SMALL], [True], ""),
    ],
)
def test_run_warns_of_a_codec_without_effect_in_its_model(settings, weights, trainable, beginning):
    warning = check_effect(spec_with(**settings), weights, trainable)
    assert warning.startswith(beginning)
    assert bool(warning) == bool(beginning)


@pytest.mark.parametrize("rule", ["scaffold", "fedprox:0.1"])
def test_local_rule_of_an_untrained_model_is_refused(rule):
    with pytest.raises(
        ConfigError, match=r"^local_rule='.*' changes gradients, but no weight of this model is trained"
    ):
        check_effect(spec_with(local_rule=rule), [LARGE], [False])
