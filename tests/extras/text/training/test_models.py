"""Tests of the texts of ``apps/models``: each is valid and formatted, has training settings and the expected parameters."""

from pathlib import Path

import pytest

from ddlf.extras.text.language.model import load
from ddlf.extras.text.language.printer import format
from ddlf.extras.text.text_app import app_of
from ddlf.extras.text.training.notation import load_notation

MODELS = Path(__file__).parents[4] / "apps" / "models"
COUNTS = {
    "autoencoder": 65 * 32 + 33 * 8 + 9 * 32 + 33 * 64,
    "cifar10_cnn": 712_330,  # Phan and Do (2023)
    "digits": 4_546,
    "digits_cnn": 10 * 32 + 289 * 64 + 650,
    "iris": 5 * 16 + 17 * 3,
    "lenet5": 61_706,  # the usual count
    "lm": 99_968,
    "lstm": 81_674,
    "mixer": 49 * 64 + 2 * (128 + 65 * 32 + 33 * 64 + 128 + 65 * 128 + 129 * 64) + 128 + 650,
    "mnist": 114_450,
    "mnist_cnn": 515_146,  # Phan and Do (2023)
    "mobilenet": 27 * 16 + 64 + 9 * 16 + 64 + 16 * 32 + 128 + 9 * 32 + 128 + 32 * 64 + 256 + 9 * 64 + 256 + 64 * 64 + 256 + 650,
    "private_digits": 2_410,
    "resnet20": 272_474 + 2 * (7 * 16 + 7 * 32 + 7 * 64),  # the usual count with projections, plus the parameters of batch normalization
    "unet": 80 + 584 + 1168 + 2320 + 4640 + 9248 + 2064 + 4624 + 2320 + 520 + 1160 + 584 + 9,
    "vgg": 28 * 32 + 289 * 32 + 289 * 64 + 577 * 64 + 577 * 128 + 1153 * 128 + 2049 * 128 + 129 * 10,
    "xor": 3 * 4 + 5,
}  # fmt: skip


def test_every_example_text_has_a_count():
    assert sorted(path.stem for path in MODELS.glob("*.nnm")) == sorted(COUNTS)


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_example_text_is_formatted_and_has_no_warning(name):
    path = MODELS / f"{name}.nnm"
    assert format(path.read_text()) == path.read_text()
    assert load(path).warnings == ()
    assert load(path).graph.parameters in (None, COUNTS[name])


@pytest.mark.slow  # it builds seventeen models
@pytest.mark.parametrize("name", sorted(COUNTS))
def test_example_model_has_the_published_parameter_count(name):
    assert load_notation(MODELS / f"{name}.nnm").keras.count_params() == COUNTS[name]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "accuracy"), [("digits", 0.9), ("digits_cnn", 0.9), ("iris", 0.9), ("xor", 1.0)])
async def test_short_example_models_learn(name, accuracy):
    app = app_of(MODELS / f"{name}.nnm")()
    app.settle()
    await app.load_dataset()
    loaded = app.notation
    loaded.train(app.x_train, app.y_train)
    assert loaded.test(app.x_test, app.y_test)["accuracy"] >= accuracy
