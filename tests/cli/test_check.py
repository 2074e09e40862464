"""Tests of ``ddlf check``, which compares an app with plain Keras: its results, exit codes and refusals."""

import json

import pytest

from tests.commands import several
from tests.processes import command

APP = """
import ddlf

class Same(ddlf.IApp):
    async def load_dataset(self):
        (self.x_train, self.y_train), _ = ddlf.load_digits()

    async def create_model(self):
        import keras
        from keras import layers

        flat = [keras.Input((8, 8, 1)), layers.Flatten(), layers.BatchNormalization(), layers.Dropout(0.5)]
        self.model = keras.Sequential([*flat, layers.Dense(10, activation="softmax")])
        self.model.compile(keras.optimizers.Adam(use_ema=True), "categorical_crossentropy")

class Other(Same):
    mode, staleness, arrival, checkpoint = "async", "inverse", "fedbuff:2", "there"

    def train(self, weights, worker_epochs, batch_size):
        self.model.set_weights(weights)
        x, y = self.x_train[self.indices], self.y_train[self.indices]
        for begin in range(0, len(x), batch_size):
            right = y[begin : begin + batch_size]
            self.model.train_on_batch(x[begin : begin + batch_size], right[::-1] if begin == 2 * batch_size else right)
        return [before - after for before, after in zip(weights, self.model.get_weights())]
"""


def checked(tmp_path, source, *arguments):
    path = tmp_path / "app.py"
    path.write_text(source)
    return command("ddlf.cli.main", "check", path, *arguments, cwd=tmp_path)


def test_check_refuses_a_function(tmp_path):
    ended = checked(tmp_path, "async def main(cluster):\n    pass\n")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "error  main is not an app, so there is nothing to compare; check a subclass of ddlf.IApp\n"


def test_check_refuses_unsupported_settings_before_anything_starts(tmp_path):
    ended = checked(tmp_path, APP, "--target", "Same", "-p", "batch_size=0")
    assert (ended.returncode, ended.stderr) == (2, "error  batch_size must be a whole number of 1 or more, got 0\n")
    assert checked(tmp_path, APP, "--batches", "0").returncode == 2
    ended = checked(tmp_path, APP, "--target", "Same", "-p", "exchange=gradient")
    assert ended.stderr.startswith("error  local training is compared, and with exchange='gradient' there is none")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, standing_template):
    """Return the outputs of two checks, which share a process, and their folder: of an app that trains like Keras, and of another one."""
    folder = tmp_path_factory.mktemp("checked")
    (folder / "app.py").write_text(APP)
    check = ["ddlf", "check", "app.py", "--target"]
    commands = [[*check, "Same", "--json"], [*check, "Other", "--batches", "6"]]
    return *several(commands, folder, standing_template, codes=[0, 1]), folder


@pytest.mark.slow
def test_check_agrees_to_the_bit_with_dropout_batch_statistics_and_averages(outputs):
    same, _, _ = outputs
    assert json.loads(same) == {
        "batches": 20,
        "batch_size": 32,
        "same_bits": True,
        "most": 0.0,
        "differs": None,
    }


@pytest.mark.slow
def test_check_names_first_differing_batch_weight_and_cause(outputs):
    _, other, folder = outputs
    differs, where, cause = other.splitlines()[-3:]
    assert not (folder / "there").exists()
    assert differs == "differs   Other, with one slot, from batch 3 on, of 6 batches of 32 samples"
    assert where.startswith("where     sequential/")
    assert cause == "cause     your own Other.train does something else than fit"
