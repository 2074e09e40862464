"""This tree beside another: each is measured with its own code, or not at all."""

import subprocess

import pytest

from benchmarks import against


def test_calls_are_measured_with_the_code_of_a_tree():
    found = against.run(against.ROOT, "rpc")
    assert len(found) == 8
    assert sum(what.endswith(against.COMPUTED) for what in found) == 4
    assert all(seconds > 0 for seconds in found.values())


def test_a_tree_whose_code_is_not_used_is_not_measured(tmp_path, monkeypatch):
    said = subprocess.CompletedProcess([], 0, stdout=f'{{"2.06 MB": 0.1, "code": "{against.ROOT}/ddlf/__init__.py"}}\n')
    monkeypatch.setattr(against.subprocess, "run", lambda *_, **__: said)
    assert against.run(against.ROOT, "rpc") == {"2.06 MB": 0.1}
    with pytest.raises(AssertionError, match="the other tree's code was measured"):
        against.run(tmp_path, "rpc")
