"""Tests of the setting ``split``, and of settings that are refused beside it before a worker starts."""

import pytest

import ddlf
from ddlf.errors import ConfigError
from ddlf.training.exchanges.split.cut import CUT, Cut
from ddlf.training.refusals import check_spec, check_workers
from ddlf.training.registry import spec_of


class App(ddlf.IApp):
    batch_size = 16


def spec(**settings):
    app = App()
    for name, value in settings.items():
        setattr(app, name, value)
    built = spec_of(app)
    check_spec(built)
    return built


def test_split_selects_its_exchange():
    assert spec().exchange.name == "star"
    run_spec = spec(split="stages:2", micro_batches=4)
    assert (run_spec.exchange.name, run_spec.train.name) == ("split", "sync")
    assert (run_spec.exchange.parts.parts, run_spec.exchange.micro_batches) == (2, 4)
    assert spec(exchange=ddlf.Split(parts="layers:a,b")).exchange.parts.layers == ("a", "b")
    assert spec(exchange="split:parts=memory:2GB").exchange.parts.nbytes == 2_000_000_000
    assert run_spec.slots_on(5) == 1
    assert spec(split="stages:2", slots=2).slots_on(5) == 2


@pytest.mark.parametrize("text", ["stages:2", "within:3", "stages:2,within:3", "memory:2GB", "layers:a,b"])
def test_a_cut_is_read_from_its_text_and_written_as_it(text):
    assert str(CUT("split", text)) == text
    assert CUT("split", CUT("split", text)) == CUT("split", text)
    assert isinstance(CUT("split", text), Cut)


BAD = [
    ({"split": "2"}, "split must be `stages:2`"),
    ({"split": "stages:0"}, "needs a number of stages of 1 or more"),
    ({"split": "stages:two"}, "needs a number of stages"),
    ({"split": "within:0"}, "needs a number of workers of 1 or more"),
    ({"split": "stages:2,within:two"}, "needs a number of workers of 1 or more"),
    ({"split": "stages:2,layers:a"}, "split must be `stages:2`"),
    ({"split": "stages:2,images:rows"}, "without within they cut no layers"),
    ({"split": "memory:lots"}, "split='memory:lots' needs the memory of a part"),
    ({"split": "memory:0"}, "split='memory:0' needs the memory of a part"),
    ({"split": "layers:"}, "names no layer"),
    ({"split": "layers:a,b,a"}, "names the layer 'a' twice"),
    ({"exchange": "split"}, "needs to know how the model is cut"),
    ({"micro_batches": 4}, "micro_batches=4 is for exchange='split'"),
    ({"split": "stages:2", "exchange": "sharded"}, "is for exchange='split', and exchange='sharded' does not use it"),
    ({"split": "stages:2", "mode": "async"}, "split='stages:2' is for synchronous and Downpour training"),
    ({"split": "within:2", "mode": "downpour"}, "a server has whole layers of a part"),
    ({"split": "stages:2", "micro_batches": 0}, "micro_batches must be a whole number of 1 or more"),
    ({"split": "stages:2", "micro_batches": 17}, "micro_batches=17 are more than the 16 samples of a batch"),
    ({"split": "stages:2", "precision": "mixed_float16"}, "precision='mixed_float16' is not supported with split"),
    ({"split": "stages:2", "clip": "agc"}, "wraps the optimizer"),
    ({"split": "stages:2", "multipliers": "freeze:0.5"}, "wraps the optimizer"),
    *(
        ({"split": "stages:2", name: value}, f"{name}=")
        for name, value in {
            "merge": "median",
            "outer": "nesterov",
            "codec": "int8",
            "weights_codec": "float16",
            "update_policy": "reject",
            "local_rule": "fedprox:0.1",
            "optimizer_state": "fresh",
            "partition": "classes:2",
            "balance": "speed",
            "batchnorm": "local",
            "evaluate_on": "workers",
            "on_bad": "skip",
        }.items()
    ),
]


@pytest.mark.parametrize(("settings", "sentence"), BAD, ids=[str(settings) for settings, _ in BAD])
def test_settings_without_effect_are_refused(settings, sentence):
    with pytest.raises(ConfigError) as caught:
        spec(**settings)
    assert sentence in caught.value.message


@pytest.mark.parametrize(("split", "workers"), [("stages:3", 2), ("stages:2", 1), ("stages:2,within:2", 3)])
def test_too_few_workers_are_refused(split, workers):
    with pytest.raises(ConfigError, match="workers, and there"):
        check_workers(spec(split=split), workers)
    check_workers(spec(split=split), workers + 1)


def test_too_few_workers_for_all_slots_are_refused_before_they_start():
    with pytest.raises(ConfigError, match="needs 4 workers for 2 slots, and there are 3"):
        check_workers(spec(split="stages:2", slots=2), 3)
    check_workers(spec(split="stages:2", slots=2), 4)


def test_another_exchange_beside_split_is_refused():
    with pytest.raises(ConfigError, match="exchange='star' does not go with split='stages:2'"):
        spec_of(App(), overrides={"exchange": "star", "split": "stages:2"})
    with pytest.raises(ConfigError) as caught:
        spec(split="stages:2", codec="int8")
    assert caught.value.hint == "leave codec at 'float32', or leave out split"


def test_workers_that_take_turns_are_refused():
    with pytest.raises(ConfigError, match="one thing at a time"):
        check_workers(spec(split="stages:2"), 2, one_at_a_time=True)
