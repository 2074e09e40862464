"""Run the short form of the trial of the browser's engine: five random models in WebAssembly, two in software WebGPU."""

from tests.later import Later

trial = Later("tests.trials.browser_engine")


def test_random_models_train_in_webassembly_like_in_keras():
    assert trial.differences("wasm", graphs=5, steps=2) == []


def test_random_models_train_on_software_webgpu_like_in_keras():
    assert trial.differences("webgpu", graphs=2, steps=1) == []
