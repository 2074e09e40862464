"""Tests that each benchmark runs with its smallest settings and prints a table.

They check figures only for memory and bytes, which do not depend on the speed of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import runpy
import shlex
import sys

import pytest

from benchmarks import (
    against,
    bulk,
    distbelief,
    downpour,
    footprint,
    learning,
    measure,
    network,
    reading,
    stable,
    training,
)
from ddlf import IApp
from ddlf.training.registry import spec_of
from tests.mnist import folder_with_mnist
from tests.patience import PATIENCE_S

TINY = "--data digits --samples 64 --batch-size 16 --repeats 1"
SHORT = [
    ("arrivals", "--data digits --rules published,fedasync --samples 400 --epochs 3 --batch-size 4 --seeds 1"),
    ("cards", "--quick --only weights,share --backend jax --rounds 1"),
    ("call", "--calls 100 --repeats 2"),
    ("compressors", "--data digits --samples 64 --repeats 1"),
    ("downpour", "xor --seeds 1 --samples 2000 --orders turns --rules plain,aware"),
    ("honest", "--rounds 1 --samples 300 --only digits-sgd"),
    ("language", "--epochs 1 --sequences 64 --width 16 --blocks 1 --steps 5 --only 'streaming, int4'"),
    ("learning", "--data digits --rules average,gradient --epochs 1 --batch-size 16 --samples 400 --seeds 1 --looks 4"),
    ("left_out", "--rounds 2 --seeds 1"),
    ("load", "--seconds 0.2 --data digits --samples 64"),
    ("map", "--only ddlf,process --workers 2 --items 10 --repeats 1"),
    ("model_memory", "--width 100 --trainings 2"),
    ("overlap", "--workers 2 --parameters 5e4 --rate 20mbit --steps 8 --repeats 1"),
    ("paper", f"{TINY} --epochs 1 --worker-epochs 1 --systems plain"),
    (
        "peer_merges",
        "--slots 2 --samples 1280 --steps 2 --looks 1 --epochs 1 --repeats 1 --rules average --target 0.05",
    ),
    (
        "private_accuracy",
        "--data digits --samples 240 --workers 2 --peers 2 --rounds 1 --epochs 1 --noises 2 --no-plain --seeds 1",
    ),
    ("replicas", "--seeds 1 --replicas 2 --samples 4000 --ways default --orders turns"),
    ("rpc", "--quick --repeats 1"),
    ("scale", "--workers 2 --simulated 3,5 --rounds 1"),
    ("secure_sums", "--members 3,4 --lost 1 --values 1000 --repeats 1"),
    ("shard_copies", "kills --kills 1 --workers 3 --parameters 3e4 --cycles 20"),
    ("split", "--only idle --stages 2 --steps 1"),
    *(("stable", f"--quick --sizes 1e20 --workers 1 --parts {part}") for part in stable.PARTS),
    ("start", "--workers 1 --memory 1 --modules numpy --samples 600 --repeats 1"),
    ("step", "--data digits --samples 320 --batch-size 16 --epochs 1 --repeats 1 --ways gradients"),
    ("training", f"{TINY} --workers 1 --rounds 1 --only limit,sync,published-sync"),
    ("uneven", "--slots 6 --samples 1000 --rounds 1 --seeds 1 --rules mean,krum"),
    ("windows", "--epochs 1 --seeds 1 --files 4 --samples 256 --only 'arrays,split window:1,as they lie global'"),
]


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.usefixtures("few_imports", "one_template")
@pytest.mark.parametrize(("name", "arguments"), SHORT, ids=[name for name, _ in SHORT])
def test_benchmark_prints_table_with_smallest_settings(name, arguments, few_digits, monkeypatch, capsys):
    monkeypatch.setenv("DDLF_DATA", str(few_digits))
    monkeypatch.setenv("DDLF_TOKEN", "")  # a benchmark sets it; monkeypatch restores the old value
    monkeypatch.setattr("ddlf.rpc.tokens._FROM_ENVIRONMENT", {})
    monkeypatch.setattr(sys, "argv", [name, *shlex.split(arguments)])
    with contextlib.suppress(SystemExit) if name == "shard_copies" else contextlib.nullcontext():  # it always exits
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    assert any(character.isdigit() for character in capsys.readouterr().out)


def test_reader_reads_all_samples_in_another_process(tmp_path):
    options = reading.arguments().parse_args(["--repeats", "1"])
    reading.arrays(640, tmp_path / "arrays.npz")
    results = reading.compare(tmp_path / "arrays.npz", tmp_path / "files", reading.OURS[:1], options)
    assert min(results[reading.OURS[0]][0]) > 0


def test_contender_that_fails_is_reported_with_its_output():
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        measure.run_child("benchmarks.contender", "nobody", "{}", timeout_s=PATIENCE_S)


def test_ratios_compare_runs_of_one_repeat():
    runs = [("limit", 0, 2.0), ("sync", 0, 3.0), ("sync", 1, 9.0)]
    results = [{"name": name, "repeat": repeat, "seconds": seconds} for name, repeat, seconds in runs]
    assert training.ratios(results, "sync", "limit") == [1.5]


def test_tree_is_measured_with_its_own_code(tmp_path, monkeypatch):
    results = against.run(against.ROOT, "rpc", share=0.1)  # processor time is counted in ticks of 10 ms
    assert len(results) == 8
    assert all(seconds > 0 for seconds in results.values())
    with monkeypatch.context() as patch:
        patch.setattr(against.subprocess, "run", lambda *_, **__: Ran)
        with pytest.raises(AssertionError, match="the other tree's code was measured"):
            against.run(tmp_path, "rpc")


class Ran:
    """The result of a process that has measured this tree."""

    returncode, stdout = 0, f'{{"2.06 MB": 0.1, "code": "{against.ROOT}/ddlf/__init__.py"}}\n'


@pytest.mark.parametrize("base", [IApp, learning.Text])
@pytest.mark.parametrize("rule", learning.RULES.values(), ids=learning.RULES)
def test_run_accepts_rules_of_the_learning_study(rule, base):
    spec_of(type("App", (base,), rule)())


def test_16_replicas_learn_with_default_and_not_with_fixed_rate(monkeypatch, tmp_path):
    monkeypatch.setenv("DDLF_DATA", str(folder_with_mnist(tmp_path / "data")))
    results = downpour.main(
        downpour.parser().parse_args(["mnist", "--seeds", "1", "--samples", "20000", "--hidden", "16"])
    )
    assert {pair: accuracies[0] < 50 for pair, accuracies in results.items()} == {
        (rule, order): rule == "plain" for rule in ("plain", "default") for order in ("random", "turns")
    }


# Memory and bytes


def test_large_array_needs_its_memory_once_and_none_for_its_sender(tmp_path):
    file = tmp_path / "bulk.json"
    bulk.main(["--megabytes", "100", "--no-large", "--json", str(file)])
    results = json.loads(file.read_text())
    allowed = 32 * 2**20 / results["bytes"]
    for side in ("worker", "master"):
        assert results[f"receiving_{side}"] < 1.1 + allowed
        assert results[f"sending_{side}"] < allowed


def test_broadcast_needs_no_memory_and_gathering_one_copy_a_worker():
    size, workers = 50_000_000, 4
    results = asyncio.run(bulk.broadcast(size, workers))
    allowed = 32 * 2**20 / size
    assert results["broadcasting_master"] < allowed
    assert results["gathering_master"] < workers + allowed


def test_master_of_sharded_run_needs_no_memory_for_updates():
    results = footprint.main(["--parameters", "4e6", "--workers", "2", "--ways", "star,sharded"])
    assert results["sharded"]["until the end"] < results["star"]["until the end"]
    assert results["sharded"]["worker"] > 3  # at least its weights, the weights of the round, and its update


def test_sharded_round_moves_few_bytes_through_the_master(tmp_path):
    assert network.available(), "needs root on Linux, with ip, tc and network namespaces"
    file = tmp_path / "found.json"
    settings = "--workers 3 --parameters 3e5 --rate 100mbit --tls no --rounds 1"
    distbelief.main([*settings.split(), "--json", str(file)])
    results = {row["way"]: distbelief.Row(**row) for row in json.loads(file.read_text())["rows"]}
    sharded, star = results["sharded"], results["star"]
    assert sharded.seconds[0] > sharded.bound_s
    assert star.seconds[0] > star.bound_s / 2  # updates may return while other workers still receive weights
    assert sharded.least < sharded.busiest[0] < 1.05 * sharded.least
    assert sharded.uneven[0] < 0.01
    assert sharded.master[0] < 64_000
    assert star.master[0] > 2 * 4 * 3e5
