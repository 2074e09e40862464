"""Tests of the code that depends on the framework under Keras.

The errors come from the installed frameworks. Errors that need a card are copies of their texts.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from ddlf.worker import determinism
from ddlf.worker.frameworks import FRAMEWORKS, OTHER, framework

INSTALLED = [name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None]


@pytest.mark.parametrize(
    ("backend", "text", "op"),
    [
        (
            "jax",
            "UNIMPLEMENTED: HLO instruction %select-and-scatter.2 = f32[8,8]{1,0} select-and-scatter(...) does not have a "
            "deterministic implementation, but run-to-run determinism is required.",
            "select-and-scatter.2 = f32[8,8]{1,0} select-and-scatter(...)",
        ),
        (
            "torch",
            "cumsum_cuda_kernel does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms(True)'.",
            "cumsum_cuda_kernel",
        ),
        (
            "tensorflow",
            "A deterministic GPU implementation of DepthwiseConvBackpropFilter is not currently available with this version of cuDNN.",
            "DepthwiseConvBackpropFilter",
        ),
        ("tensorflow", "Determinism is not yet supported in GPU implementation of DenseBincount.", "DenseBincount"),
        ("tensorflow", "Random ops require a seed to be set when determinism is enabled.", "Random ops"),
        ("tensorflow", "something else is not available", ""),
    ],
)
def test_framework_names_the_op_without_determinism(backend, text, op):
    assert FRAMEWORKS[backend].op_without_determinism(RuntimeError(text)) == op


@pytest.mark.parametrize("backend", INSTALLED)
def test_framework_knows_its_error_of_full_memory(backend):
    framework = FRAMEWORKS[backend]
    assert framework.is_full(framework.full_error())
    assert not framework.is_full(RuntimeError("RESOURCE_EXHAUSTED: Out of memory"))  # an error of the user's code


def test_keras_wraps_the_error_of_pytorch_about_full_memory():
    text = (
        "Unable to automatically build the model. Exception encountered: 'Exception encountered when calling Conv2D.call(). "
        "CUDA out of memory. Tried to allocate 8.00 GiB.'"
    )
    assert FRAMEWORKS["torch"].is_full(RuntimeError(text))
    assert not FRAMEWORKS["tensorflow"].is_full(RuntimeError(text))


def test_a_backend_without_cards_says_that_it_has_no_setting(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "numpy")
    assert framework() is OTHER
    assert framework().determine(True) == "the backend numpy has no setting for it"
    assert framework().determine(False) == ""
    assert (framework().card(), framework().tf32(), framework().peak()) == ("", "", 0)
    assert framework().is_full(MemoryError())


SETTINGS = """
import json, os
from ddlf.worker.frameworks import framework
here = framework()
found = [here.tf32(), here.card()]
def state():
    if here.name == "tensorflow":
        import tensorflow as tf
        from tensorflow.python.framework import config
        return [config.is_op_determinism_enabled(), tf.config.experimental.tensor_float_32_execution_enabled()]
    if here.name == "jax":
        import jax
        return [None, jax.config.jax_default_matmul_precision]
    import torch
    return [torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.allow_tf32]
for on, tf32 in ((True, "off"), (True, "on"), (False, "auto")):
    here.set_tf32(tf32)
    found += [here.determine(on) != "", *state()]
print(json.dumps(found))
"""


STATES = {  # the state of a framework before and after each of the three calls
    "tensorflow": [False, True, False, False, True, True, False, False, True],
    "jax": [True, None, "highest", True, None, "tensorfloat32", False, None, None],
    "torch": [False, True, False, False, True, True, False, False, True],
}


@pytest.mark.parametrize("backend", INSTALLED)
def test_framework_obeys_the_settings_and_returns_to_its_defaults(backend):
    environment = {**os.environ, "KERAS_BACKEND": backend}
    ended = subprocess.run(
        [sys.executable, "-c", SETTINGS], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(ended.stdout.splitlines()[-1]) == ["", "", *STATES[backend]]


def test_environment_is_set_and_restored(monkeypatch):
    monkeypatch.setattr(determinism, "_set_here", set())
    monkeypatch.setattr(determinism, "jax_was_used", lambda: False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x")
    assert determinism.set_environment(True)
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/tmp/x --xla_gpu_deterministic_ops=true"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert determinism.set_environment(True)
    assert os.environ["XLA_FLAGS"].count("deterministic") == 1
    assert not determinism.set_environment(False)
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=/tmp/x"
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    monkeypatch.delenv("XLA_FLAGS")
    determinism.set_environment(True)
    determinism.set_environment(False)
    assert "XLA_FLAGS" not in os.environ


def test_flags_of_the_user_are_kept(monkeypatch):
    monkeypatch.setattr(determinism, "_set_here", set())
    monkeypatch.setattr(determinism, "jax_was_used", lambda: False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("XLA_FLAGS", determinism.DETERMINISTIC_OPS)
    determinism.set_environment(True)
    determinism.set_environment(False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["XLA_FLAGS"] == determinism.DETERMINISTIC_OPS


def test_jax_keeps_its_flags_after_its_first_use(monkeypatch):
    monkeypatch.setattr(determinism, "jax_was_used", lambda: True)
    monkeypatch.setenv("XLA_FLAGS", "")
    assert not determinism.set_environment(True)
    monkeypatch.setenv("XLA_FLAGS", determinism.DETERMINISTIC_OPS)
    assert determinism.set_environment(False)


def test_error_of_a_batch_that_cannot_be_divided_among_cards_is_recognised():
    import jax

    text = "implies that array axis 0 is partitioned 8 times, but the dimension size is 29 (full shape: (29, 8))"
    assert FRAMEWORKS["jax"].indivisible(jax.errors.JaxRuntimeError(text)) == (29, 8)
    assert FRAMEWORKS["jax"].indivisible(ValueError(text)) is None
    assert FRAMEWORKS["tensorflow"].indivisible(ValueError(text)) is None
