"""Tests of the steps of an export, which run in other processes: their results, and the package that refused."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.extras.export.steps import Refused, StepRunner, refusal


def raised(file, sentence, tmp_path):
    """Return an error that is raised by code in a file at this path."""
    path = tmp_path / file
    source = f"def fail():\n    raise ZeroDivisionError({sentence!r})\n"
    scope = {}
    exec(compile(source, str(path), "exec"), scope)
    with pytest.raises(ZeroDivisionError) as error:
        scope["fail"]()
    return error.value


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("lib/site-packages/tf2onnx/convert.py", "tf2onnx"),
        ("lib/site-packages/keras/src/export/litert.py", "Keras"),
        ("lib/site-packages/iree/compiler/tools.py", "IREE"),
        ("lib/site-packages/numpy/core.py", "Python"),
        ("own/layers.py", "Python"),
    ],
)
def test_refusal_names_the_raising_package(tmp_path, file, package):
    error = raised(file, "no such\n  operator: X. More of it", tmp_path)
    assert refusal(error) == Refused(package, "no such operator: X")


def test_refusal_cuts_long_sentences_and_names_silent_errors(tmp_path):
    assert len(refusal(raised("a.py", "x" * 1000, tmp_path)).reason) == 300
    assert refusal(raised("a.py", "", tmp_path)).reason == "ZeroDivisionError"


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """Return a function that makes a ``StepRunner`` with other code in its process. The code gets the path of the job."""

    def doing(code):
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{code}' \"$4\"\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return StepRunner(tmp_path, None)

    return doing


def leaving(done):
    return f'import pathlib, sys; pathlib.Path(sys.argv[1]).with_suffix(".done.json").write_text(r"""{done}""")'


def test_step_returns_its_results(steps):
    assert steps(leaving('{"seconds": [1.0]}')).do("a", "jax") == {"seconds": [1.0]}


def test_refused_step_names_the_package(steps):
    refusal = steps(leaving('{"refused": {"who": "JAX", "why": "no"}}')).do("a", "jax")
    assert refusal == Refused("JAX", "no")
    assert str(refusal) == "JAX refuses: no"


def test_step_raises_errors_of_the_user(steps):
    with pytest.raises(ConfigError, match=r"^never built; build it$"):
        steps(leaving('{"error": "never built", "hint": "build it"}')).do("a", "jax")


def test_dead_step_is_refused_with_its_last_line(steps):
    code = 'import os, signal; os.write(2, b"all is lost\\n"); os.kill(os.getpid(), signal.SIGKILL)'
    refusal = steps(code).do("a", "jax")
    assert refusal == Refused("its process", "it ended with SIGKILL; its last line of output: all is lost")


def test_step_arrays_keep_their_order(steps, tmp_path):
    np.savez(tmp_path / "a.7.npz", **{str(number): np.full(2, number) for number in range(12)})
    arrays = steps("").outputs("a", 7)
    assert [array[0] for array in arrays] == list(range(12))
    assert Path(tmp_path / "a.7.npz").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "failed: -- No conversion rule found for operations: TensorListReserve, While To facilitate it, see",
            "it has no rule for TensorListReserve, While",
        ),
        (
            "Load model from a.onnx failed:This is an invalid model. No Op registered for Erfc with 15",
            "ONNX has no operator Erfc",
        ),
        (
            "Error code: 1 Diagnostics: /a.py:1:2: error: failed to legalize operation 'x'",
            "failed to legalize operation 'x'",
        ),
        (
            "Exception encountered when calling Odd.call().\n\n\x1b[1mNo such axis. Really\x1b[0m\n\nArguments received by Odd.call():",
            "in Odd.call(): No such axis",
        ),
    ],
    ids=["openvino", "onnx", "iree", "keras"],
)
def test_refusal_finds_the_relevant_sentence(tmp_path, text, reason):
    assert refusal(raised("a.py", text, tmp_path)).reason == reason
