"""Run the short form of the trial of the browser's engine: ten random models in WebAssembly, three in software WebGPU."""

from tests.later import Later

trial = Later("tests.trials.browser_engine")


def test_random_models_train_in_webassembly_like_in_keras():
    assert trial.differences("wasm", graphs=10, steps=2) == []


def test_random_models_train_on_software_webgpu_like_in_keras():
    assert trial.differences("webgpu", graphs=3, steps=1) == []
