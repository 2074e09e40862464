"""The benchmark of the sharded exchange: what it makes of counters, and in its shortest form real machines, links and workers."""

import json

import pytest

from benchmarks import distbelief, network
from benchmarks.distbelief import Row, rate_of, report, row
from benchmarks.stand_in import StandInRun
from ddlf.testing import in_process_cluster

MB = 10**6


def found(seconds, moved):
    rest = {"busy": 1.5, "computed": 1.0, "idle": 400.0, "most": 120 * MB, "grown": 0}
    return {"seconds": seconds, "moved": moved, "at": seconds, **rest}


def test_a_row_has_the_busiest_link_how_much_shards_differ_and_what_went_through_the_master():
    moved = [(3000, 5000), (70 * MB, 71 * MB), (70 * MB, 69 * MB), (77 * MB, 70 * MB), (70 * MB, 70 * MB)]
    made = row("sharded", 10 * MB, 25 * MB, [found(3.0, moved)], tls=False)
    assert made.workers == 4
    assert made.least == 2 * 3 / 4 * 4 * 10 * MB
    assert made.bound_s == made.least / (25 * MB)
    assert made.busiest == [77 * MB]
    assert made.uneven == [pytest.approx(0.1)]
    assert made.master == [8000 / 4]
    assert made.exchanged == 8000 / 4 - 3.0 * 400 / 4
    assert made.cores == [0.5]
    assert made.memory == (120 * MB, 0)


def test_the_star_is_compared_with_the_link_of_its_master():
    moved = [(320 * MB, 320 * MB), *[(40 * MB, 40 * MB)] * 8]
    made = row("star", 10 * MB, 25 * MB, [found(25.6, moved)], tls=False)
    assert made.bound_s == 25.6
    cells = [cell.strip() for cell in report([made]).splitlines()[-1].split("|")[1:-1]]
    assert cells[:8] == ["star", "10 M", "no", "25.60 s", "25.60 s", "1.00", "320.0 MB", "1.000"]


@pytest.mark.parametrize(("text", "rate"), [("200mbit", 25e6), ("1gbit", 125e6)])
def test_a_rate_is_read_as_tc_does(text, rate):
    assert rate_of(text) == rate


async def test_stand_ins_exchange_and_push_as_replicas_do():
    async with in_process_cluster(3) as cluster:
        run = StandInRun(cluster, 1000, master_epochs=2, exchange="sharded", optimizer_state="fresh")
        assert len(await run.train_model()) == 2
        cluster.one_thing_at_a_time = False  # stand-ins wait on the event loop, and hold nobody up
        how = {"mode": "downpour", "warm_start": 0, "push_rule": "sgd:rate=0.001", "staleness": "constant"}
        run = StandInRun(cluster, 1000, batch_size=1, master_epochs=2, samples=12, **how)
        records = await run.train_model()
        assert [len(record.pushes) for record in records] == [4] * 6  # of each of three slots in each of two rounds


@pytest.mark.slow
def test_rounds_are_measured_on_limited_links(tmp_path):
    assert network.available(), "needs root on Linux, with ip, tc and network namespaces"
    file = tmp_path / "found.json"
    said = "--workers 3 --parameters 3e5 --rate 100mbit --tls no --rounds 1"
    distbelief.main([*said.split(), "--json", str(file)])
    found = {one["way"]: Row(**one) for one in json.loads(file.read_text())["rows"]}
    assert set(found) == {"sharded", "star"}
    sharded, star = found["sharded"], found["star"]
    assert sharded.seconds[0] > sharded.bound_s
    assert star.seconds[0] > star.bound_s / 2  # what was sent to one worker may come back while others still get theirs
    assert sharded.least < sharded.busiest[0] < 1.05 * sharded.least
    assert sharded.uneven[0] < 0.01
    assert sharded.master[0] < 64_000
    assert star.master[0] > 2 * 4 * 3e5
