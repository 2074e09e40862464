"""The benchmarks of the transport run, here with tiny settings. Their figures are not tested: those depend on the machine."""

import asyncio
import json

import pytest

from benchmarks import bulk, call, load, rpc, scale


def test_calls_are_measured_for_ddlf_and_the_peers_that_need_nothing_installed(tmp_path, capsys):
    file = tmp_path / "rpc.json"
    rpc.main(["--quick", "--repeats", "1", "--json", str(file)])
    found = json.loads(file.read_text())
    assert set(found["seconds"]) == {case.name for case in rpc.cases(quick=True)}
    for case in rpc.cases(quick=True):
        peers = found["seconds"][case.name]
        assert set(peers) == ({"DDLF"} if case.pipelined else {"DDLF", "raw blocking socket", "raw asyncio streams"})
        assert all(seconds > 0 for values in peers.values() for seconds in values)
    assert found["machine"]["cores"] >= 1
    assert "DDLF / it = " in capsys.readouterr().out


def test_the_processor_time_of_a_call_is_measured_beside_asyncio(capsys):
    call.main(["--calls", "100", "--repeats", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(" 0.0 us" not in line for line in lines)


def test_rounds_are_measured_with_real_and_with_simulated_workers(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(
        "DDLF_TOKEN", ""
    )  # the benchmark sets one; what was there comes back, here and in what was read of it
    monkeypatch.setattr("ddlf.rpc.tokens._FROM_ENVIRONMENT", {})
    file = tmp_path / "scale.json"
    scale.main(["--workers", "2", "--simulated", "3,5", "--rounds", "1", "--json", str(file)])
    found = json.loads(file.read_text())
    assert [row["workers"] for row in found["real"] + found["simulated"]] == [2, 3, 5]
    assert "per worker" in capsys.readouterr().out


def test_a_line_through_figures_that_lie_on_one_is_found():
    slope, base, explained = scale.fit([{"workers": n, "round_s": 0.5 + 0.25 * n} for n in (1, 2, 5)], "round_s")
    assert (slope, base, explained) == pytest.approx((0.25, 0.5, 1.0))


def test_answers_are_timed_while_a_worker_computes_while_arrays_stream_and_while_an_app_trains(capsys):
    load.main(["--seconds", "0.2", "--data", "digits", "--samples", "64"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert [line.split()[1] for line in lines[::2]] == ["nothing", "computing", "streaming", "training"]


def test_a_large_array_needs_its_own_memory_once_and_nothing_on_the_side_that_sends_it(tmp_path):
    file = tmp_path / "bulk.json"
    bulk.main(["--megabytes", "100", "--no-large", "--json", str(file)])
    found = json.loads(file.read_text())
    allowed = 32 * 2**20 / found["bytes"]
    for side in ("worker", "master"):
        assert found[f"receiving_{side}"] < 1.1 + allowed
        assert found[f"sending_{side}"] < allowed


def test_a_broadcast_needs_no_memory_on_the_master_and_what_is_gathered_one_copy_for_each_worker():
    size, workers = 50_000_000, 4
    found = asyncio.run(bulk.broadcast(size, workers))
    allowed = 32 * 2**20 / size
    assert found["broadcasting_master"] < allowed
    assert found["gathering_master"] < workers + allowed
