"""Tests of the block ``train`` of a text: its settings, and errors with line and column."""

import inspect

import pytest

from ddlf.errors import ConfigError, NotationError
from ddlf.extras.text.language.model import read
from ddlf.extras.text.language.problems import Problems
from ddlf.extras.text.language.values import Call, Word
from ddlf.extras.text.training.block import KEYS, NOT_WRITTEN, OPTIMIZERS, PENALTIES, SCHEDULES, read_key, read_train
from ddlf.training.registry import SETTINGS
from tests.extras.text.language.texts import DIGITS


def block(*lines):
    model = read(DIGITS + "\n".join(f"train:{line};" for line in lines))
    problems = Problems(model.text, model.file)
    settings = read_train(model.train, problems)
    problems.check()
    return settings


def test_train_block_takes_settings_by_name_and_short_form():
    settings = block(
        "epochs 3",
        "batch 16",
        "seed 7",
        'merge "trimmed:0.1"',
        "worker_steps 5",
        "class_weight [1, 2.5]",
        "verbose false",
    )
    assert settings.settings == {
        **dict(master_epochs=3, batch_size=16, seed=7, merge="trimmed:0.1", worker_steps=5),
        **dict(class_weight={0: 1, 1: 2.5}, verbose=False),
    }


def test_train_block_takes_every_setting_except_objects():
    for name in SETTINGS:
        text = f"train:{name} ~;"
        model = read(DIGITS + text.replace("~", "none"))
        problems = Problems(model.text, model.file)
        read_train(model.train, problems)
        message = str(problems._errors)
        assert ("objects of a program" in message) == (name in NOT_WRITTEN)
        assert "has no key" not in message


def test_train_block_keeps_its_own_keys_as_values():
    settings = block(
        "optimizer adam",
        "penalty L2(l2=0.1)",
        "metrics [accuracy, AUC()]",
    )
    assert settings.key_values["optimizer"] == Word("adam", 0)
    assert isinstance(settings.key_values["penalty"], Call)


WRONG = [
    ("~optimzer adam", "train has no key 'optimzer', did you mean 'optimizer'?"),
    ("~batchsize 3", "did you mean 'batch_size'?"),
    ("optimizer ~adamm", "did you mean 'Adam'?"),
    ("optimizer ~adma", "did you mean 'Adam'?"),
    ("optimizer SGD(~learning_rte=0.1)", "SGD has no argument 'learning_rte', did you mean 'learning_rate'?"),
    ("optimizer SGD(learning_rate=CosineDecay(~decay_step=3))", "did you mean 'decay_steps'?"),
    ("optimizer SGD(learning_rate=~CosinDecay(decay_steps=3))", "did you mean 'CosineDecay'?"),
    ("penalty L2(~l1=0.1)", "L2 has no argument 'l1'; it has l2"),
    ("scaling [none, Rescaling(~scal=2)]", "Rescaling has no argument 'scal', did you mean 'scale'?"),
    ("loss ~mean_squared_error", "did you mean 'MSE'?"),
    ("optimizer ~Sequential()", "optimizer must be an optimizer of Keras"),
    ("learning_rate ~0", "a number above 0"),
    ("learning_rate ~fast", "a number above 0"),
    ("epochs ~0", "epochs must be a whole number of 1 or more, got 0"),
    ("epochs ~many", "epochs must be a whole number"),
    ("mode ~asink", "did you mean 'async'?"),
    ("batch 3; train:~batch_size 4", "which are the same"),
    ("loss ~SSE", "did you mean 'SCE'?"),
    ("metrics ~[accuracy, 3]", "a metric of Keras"),
    ("metrics accuracy, ~mae", "a list in brackets"),
    ("data ~cifar", "did you mean 'cifar10'?"),
    ("patience ~0", "1 or more"),
    ("validation ~1", "between 0 and 1"),
    ("loss_weights ~[-1, 2]", "0 or more"),
    ("clipping ~0", "above 0"),
    ("penalty ~L3(l3=1)", "L1(l1=)"),
    ("scaling ~Dense(units=3)", "Rescaling(scale=)"),
    ("optimizer ~Adam(learning_rate=Lambda(function=f))", "an optimizer of Keras"),
    ("~callbacks [EarlyStopping()]", "objects of a program"),
    ("epochs ~relu()", "and no layer"),
    ("initial ~he_unifrm", "did you mean 'he_uniform'?"),
    ("optimizer SGD(learning_rate=0.1); train:learning_rate ~0.2", "optimizer has one, too"),
    ("optimizer SGD(clipnorm=1.0); train:clipping ~1", "optimizer has one, too"),
]


@pytest.mark.parametrize(("text", "sentence"), WRONG)
def test_train_block_error_names_its_place(text, sentence):
    lines = f"train:{text};"
    before, after = lines.split("~")
    with pytest.raises(NotationError) as error:
        block((before + after).removeprefix("train:").removesuffix(";"))
    line = DIGITS.count("\n") + 1
    assert f"model.nnm:{line}:{len(before) + 1}: " in str(error.value).splitlines()[0], str(error.value)
    assert sentence in str(error.value)


def test_train_block_reports_two_errors():
    with pytest.raises(NotationError) as error:
        block("optimzer adam", "epochs 0")
    assert len(error.value.problems) == 2


def test_read_key_checks_a_value_from_outside_the_text():
    assert read_key("optimizer", "sgd", "-p optimizer").key_values["optimizer"] == Word("sgd", 0)
    with pytest.raises(ConfigError, match=r"^-p optimizer: optimizer must be .*did you mean 'SGD'"):
        read_key("optimizer", "sdg", "-p optimizer")


def test_unknown_key_lists_all_keys_when_none_is_near():
    with pytest.raises(NotationError) as error:
        block("zzzzz 3")
    assert all(key in str(error.value) for key in KEYS)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *SCHEDULES, *PENALTIES])
def test_known_arguments_equal_those_of_keras(name):
    import keras

    from ddlf.extras.stabilisers.rlion import Rlion

    homes = (keras.optimizers, keras.optimizers.schedules, keras.regularizers)
    kind = Rlion if name == "Rlion" else next(getattr(home, name) for home in homes if hasattr(home, name))
    parameters = [*inspect.signature(kind.__init__).parameters.values()][1:]
    named = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
    arguments = {**OPTIMIZERS, **SCHEDULES, **PENALTIES}[name]
    assert named <= set(arguments)
    # Rlion and one other optimizer have the remaining arguments of Keras's optimizers
    assert set(arguments) == named or len(named) < len(parameters)
