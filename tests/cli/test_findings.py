"""Tests of the findings that ``ddlf doctor`` derives from facts, without processes and sockets."""

import pytest

from ddlf.cli.findings import (
    Problem,
    clock_problems,
    joined,
    machine_problems,
    problem_of_error,
    problem_of_pair,
    speed_problems,
    version_problems,
)
from ddlf.errors import AuthError, ConfigError
from tests.cli.facts import card, machine, with_cards

GB = 10**9


def texts_of(findings):
    return [finding.what for finding in findings]


def test_healthy_machine_and_worker_have_no_findings():
    assert list(machine_problems(machine(), "here")) == []
    assert (
        list(
            version_problems(
                machine(), machine(python="3.11.9", packages={**machine()["packages"], "numpy": "2.9.0"}), "w"
            )
        )
        == []
    )
    assert list(clock_problems(1.5, "w")) == []
    assert list(speed_problems({"a": (110.0, 500.0), "b": (112.0, 3000.0), "c": (800.0, 101.0)})) == []


@pytest.mark.parametrize(
    ("facts", "sentence", "do"),
    [
        (
            dict(packages={"tensorflow": "2.20.0", "tensorflow-cpu": "2.21.0", "keras": "3.15.1"}),
            "tensorflow 2.20.0 and tensorflow-cpu 2.21.0 are both installed",
            "pip uninstall -y tensorflow tensorflow-cpu && python -m pip install 'ddlf[tensorflow]'",
        ),
        (
            dict(unmet=["numpy>=1.26 (1.24.0 is installed)"]),
            "needed, and not there: numpy>=1.26 (1.24.0 is installed)",
            "python -m pip install 'numpy>=1.26'",
        ),
        (dict(has_backend=False), "Keras would use tensorflow, which is not installed", "KERAS_BACKEND"),
        (
            dict(without_bytecode=["keras"]),
            "there is no bytecode of keras: each start",
            "python -m compileall -q -j 0 /v/lib",
        ),
        (
            dict(without_bytecode=["tensorflow", "keras"], may_write_bytecode=False),
            "no bytecode of tensorflow and keras, and PYTHONDONTWRITEBYTECODE is set",
            "unset PYTHONDONTWRITEBYTECODE",
        ),
        (
            dict(gpus=with_cards(problem="the driver of NVIDIA was updated", do="restart the machine")),
            "the driver of NVIDIA was updated",
            "restart the machine",
        ),
        (
            dict(gpus=with_cards(card(), package="tensorflow-cpu 2.21.0", build_cuda="", extra="tensorflow-gpu")),
            "tensorflow-cpu 2.21.0 computes on CPUs only, and the machine has cards",
            "python -m pip uninstall -y tensorflow-cpu && python -m pip install 'ddlf[tensorflow-gpu]'",
        ),
        (
            dict(gpus=with_cards(card(), cuda="11.4", driver="470.82")),
            "jax 0.10.2 is built for CUDA 12, and the driver 470.82 supports CUDA up to 11.4",
            "install a driver for CUDA 12",
        ),
        (
            dict(gpus=with_cards(card(), cuda="12.4", driver="550.54", build_cuda="13")),
            "jax 0.10.2 is built for CUDA 13, and the driver 550.54 supports CUDA up to 12.4",
            "install a driver for CUDA 13, or a jax for CUDA 12",
        ),
        (
            dict(gpus=with_cards(card(), wrong="CUDA_VISIBLE_DEVICES=7 names the card 7", seen=[])),
            "CUDA_VISIBLE_DEVICES=7 names the card 7",
            "change CUDA_VISIBLE_DEVICES, or unset it",
        ),
        (
            dict(gpus=with_cards(card(free=GB // 2, processes=[7, 8]), card(1))),
            "the card 0 (Test Card) has 0.5 GB of 16.0 GB memory free",
            "end what uses it (processes 7, 8), or choose another card with --gpus",
        ),
        (
            dict(gpus=with_cards(card(processes=[7, 8, 9]), programs={"7": "blender", "8": "", "9": "ddlf:9000"})),
            "the card 0 (Test Card) is busy with process 7 (blender), process 8: a worker would be slow there",
            "choose another card with --gpus",
        ),
        (
            dict(gpus=with_cards(card(free=0, memory=0, lost="has fallen off the bus (Xid 79) at 12:00:00"), card(1))),
            "no worker takes the card 0 (Test Card), because it has fallen off the bus (Xid 79) at 12:00:00",
            "reset it with nvidia-smi --gpu-reset",
        ),
        (
            dict(gpus=with_cards(problem="the card 0 is divided (MIG), but has no instance", do="make one")),
            "the card 0 is divided (MIG), but has no instance",
            "make one",
        ),
        (dict(memory_free=GB // 2), "0.5 GB of 16.0 GB memory is free", "fewer workers"),
        (
            dict(disks=[{"folder": "/tmp", "size": 20 * GB, "free": GB // 10}]),
            "the disk of /tmp has 0.1 GB of 20.0 GB left",
            "du -xh /tmp",
        ),
    ],
)
def test_each_problem_of_a_machine_is_named_with_its_remedy(facts, sentence, do):
    (finding,) = machine_problems(machine(**facts), "here")
    assert sentence in finding.what
    assert do in finding.do
    assert (finding.level, finding.where) == ("warning", ("here",))


def test_unknown_memory_is_not_a_finding():
    assert list(machine_problems(machine(memory=None, memory_free=None), "here")) == []


@pytest.mark.parametrize(
    ("facts", "level", "sentence", "do"),
    [
        (dict(python="3.12.1"), "error", "Python 3.12.1 there, 3.11.7 here", "install Python 3.11 there"),
        (dict(ddlf="0.0.9"), "warning", "DDLF 0.0.9 there, 0.1.0 here", "python -m pip install ddlf==0.1.0"),
        (
            dict(packages={**machine()["packages"], "keras": "3.14.0"}),
            "warning",
            "keras 3.14.0 there, 3.15.1 here",
            "pip install 'keras==3.15.1' there",
        ),
        (
            dict(packages={"keras": "3.15.0", "numpy": "1.26.4", "tensorflow": "2.21.1"}),
            "warning",
            "numpy 1.26.4 there, 2.4.6 here",
            "numpy==2.4.6",
        ),
        (dict(packages={"numpy": "2.4.6"}), "error", "Keras is here, but not there", "'ddlf[tensorflow]' there"),
    ],
)
def test_each_version_mismatch_is_named_with_its_remedy(facts, level, sentence, do):
    (finding,) = version_problems(machine(), machine(**facts), "worker 1")
    assert sentence in finding.what
    assert do in finding.do
    assert finding.level == level


def test_clock_finding_names_direction():
    assert ["37 s ahead of" in text for text in texts_of(clock_problems(37.2, "w"))] == [True]
    assert ["3600 s behind" in text for text in texts_of(clock_problems(-3600, "w"))] == [True]


def test_connection_is_slow_absolutely_or_relatively():
    assert texts_of(speed_problems({"a": (11.8, 11.6), "b": (200.0, 300.0)})) == ["11.8 MB/s to it, 11.6 MB/s from it"]
    slow = list(speed_problems({"a": (110.0, 111.0), "b": (112.0, 30.0), "c": (108.0, 112.0)}))
    assert [(finding.where, finding.what) for finding in slow] == [
        (("b",), "112.0 MB/s to it, 30.0 MB/s from it: 27% of the usual speed")
    ]
    assert "--codec int8" in slow[0].do


def test_problems_between_workers_are_joined_to_one_finding():
    pairs = [("worker 1", "worker 3", "refused"), ("worker 2", "worker 3", "refused")]
    (finding,) = joined(problem_of_pair(*pair) for pair in pairs)
    assert finding.where == ("worker 1", "worker 2")
    assert finding.what == "it cannot reach worker 3: refused"
    assert "--advertise" in finding.do


def test_findings_are_joined_and_errors_come_first():
    low = [finding for name in ("here", "worker 1") for finding in machine_problems(machine(has_backend=False), name)]
    refused = problem_of_error(AuthError("it holds another token", hint="copy it"), "worker 2")
    merged = joined([*low, refused])
    assert merged[0] == Problem("error", ("worker 2",), "it holds another token", "copy it", 4)
    assert merged[1].where == ("here", "worker 1")
    assert len(merged) == 2


def test_every_error_finding_has_a_remedy():
    assert problem_of_error(ConfigError("cluster.yaml:3:1: unknown key"), "here").do
