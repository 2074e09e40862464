"""Tests of the tree of errors, and of the properties of all errors."""

import asyncio
import inspect
import re
import traceback

import pytest

from ddlf import IApp, errors
from ddlf.errors import BadUpdate, ExecutorCrashed, LeaseError, RequestFailed, RequestTimeout, WorkerLost


def drawn():
    """Return each class in the tree of the module's docstring, with its parent class and its builtin base class."""
    above, bases = ["DDLFError"], {"DDLFError": ("Exception", "")}
    for line in inspect.getdoc(errors).splitlines():
        if match := re.match(r" {4}([|` -]*)-- (\w+)(?: \((\w+)\))?", line):
            depth = 1 + len(match[1]) // 4
            bases[match[2]] = above[depth - 1], match[3] or ""
            above[depth:] = [match[2]]
    return bases


def test_tree_in_the_docstring_matches_the_classes():
    names = {name: getattr(errors, name) for name in errors.__all__}
    bases = {name: [base.__name__ for base in kind.__bases__] for name, kind in names.items()}
    assert drawn() == {name: (*parents, "")[:2] for name, parents in bases.items()}


@pytest.mark.parametrize("kind", [WorkerLost, ExecutorCrashed, RequestTimeout, LeaseError])
def test_every_failed_request_says_whether_it_may_have_run_and_how_often_it_was_tried(kind):
    error = kind("text", may_have_run=False, attempts=3)
    assert isinstance(error, RequestFailed)
    assert (error.may_have_run, error.attempts) == (False, 3)
    assert kind("text").may_have_run is (kind is not LeaseError)


def test_an_error_accepts_only_the_facts_of_its_class():
    assert BadUpdate("text", tensor="kernel").tensor == "kernel"
    assert BadUpdate("text").count == 0
    with pytest.raises(TypeError, match="BadUpdate has no fact 'tensr'"):
        BadUpdate("text", tensr="kernel")


@pytest.mark.parametrize("name", errors.__all__)
def test_every_class_says_when_it_is_raised_and_what_to_do(name):
    text = errors.explained(name)
    assert re.match(rf"{name} \(.*\)\n\n[A-Z]", text)
    assert name == "DDLFError" or "\nWhat to do:\n    " in text
    assert text.endswith(f"Exit code of the command line: {getattr(errors, name).exit_code}\n")


def test_all_errors_name_ddlf_errors_as_their_module():
    assert {getattr(errors, name).__module__ for name in errors.__all__} == {"ddlf.errors"}


def test_a_notebook_shows_the_users_own_lines_of_both_sides():
    keras = '  File "/v/lib/python3.11/site-packages/keras/model.py", line 9, in fit\n    return call(x)\n'
    lines = f'Traceback on the worker (most recent call last):\n{keras}  File "cell", line 1, in f\nValueError: no'
    with pytest.raises(errors.RemoteError) as caught:
        raise errors.RemoteError("ValueError", "no", lines, worker="worker 1")
    shown = caught.value._render_traceback_()
    assert shown[0] == "Traceback (most recent call last):"
    assert __file__ in shown[1]
    assert shown[-3:] == [
        "Traceback on the worker (most recent call last):",
        '  File "cell", line 1, in f',
        "ValueError: no",
    ]
    assert not any("keras" in line for line in shown)


class App(IApp):
    async def load_dataset(self): ...
    async def create_model(self): ...


def test_traceback_of_a_workers_error_hides_the_lines_that_received_it(monkeypatch):
    async def carry(*_, **__):
        raise errors.RemoteError("ValueError", "no", "lines of the worker", worker="worker 1") from KeyError("why")

    monkeypatch.setattr("ddlf.training.start.train", carry)
    with pytest.raises(errors.RemoteError) as caught:
        asyncio.run(App().train_model())
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "_train"
    assert isinstance(caught.value.__cause__, KeyError)
