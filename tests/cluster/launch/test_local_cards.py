"""Tests of cards of local workers and of ``ddlf-worker``.

An executor has its mask before it imports a framework. A stand-in replaces NVML.
"""

import asyncio
import os
import sys
import time

import pytest

from ddlf.cli.card_lines import card_lines
from ddlf.cli.workers import describe
from ddlf.cluster.cluster import Cluster
from ddlf.errors import ConfigError, ConnectError, DDLFError
from ddlf.events import CardRead, WorkerConnected
from ddlf.worker.lost_cards import forget_lost, lost_cards
from tests.cards import GIB, card
from tests.patience import PATIENCE_S
from tests.processes import command

FIRST, SECOND = "GPU-00000000-0000", "GPU-10000000-0000"


def mask():
    return os.environ.get("CUDA_VISIBLE_DEVICES"), "sched" in sys.modules


def wait():
    while True:
        time.sleep(0.05)


def die():
    os._exit(3)


async def test_each_card_gets_one_worker_whose_executors_know_it(cards):
    events = []
    cluster = Cluster.local()
    cluster.subscribe(events.append)
    async with cluster:
        assert await cluster.run_method(mask) == [(FIRST, False), (SECOND, False)]
        assert [worker.executor.gpus for worker in cluster.workers] == [["0 (Test Card)"], ["1 (Test Card)"]]
        assert (await cluster.workers[1].status()).gpus == ["1 (Test Card)"]
        with pytest.raises(DDLFError):
            await cluster.workers[1].run_method(die)
        assert await cluster.workers[1].run_method(mask) == (SECOND, False)
    connected = [event for event in events if isinstance(event, WorkerConnected)]
    assert {(event.worker, event.gpus) for event in connected} == {(1, ("0 (Test Card)",)), (2, ("1 (Test Card)",))}


async def test_status_and_events_have_the_readings_of_cards(cards):
    cards.has(card(0, utilisation=87, watts=310.5, celsius=61))
    read = asyncio.Event()
    cluster, events = Cluster.local(1), []

    def look(event):
        if isinstance(event, CardRead):
            events.append(event)
            read.set()

    cluster.subscribe(look)
    async with cluster, asyncio.timeout(PATIENCE_S):
        await read.wait()
        (reading,) = (await cluster.workers[0].status()).cards
        status = await cluster.workers[0].status()
    assert events[0] == CardRead(
        worker=1,
        name="worker 1",
        card="0 (Test Card)",
        memory=0,
        total=16 * GIB,
        utilisation=87,
        watts=310.5,
        celsius=61,
    )
    assert reading.celsius == 61
    assert "on card 0 (Test Card) (0: 87 %, 0.0 of 17.2 GB, 310 W, 61 °C)" in describe(status, "")


async def test_lost_card_ends_its_worker_with_the_reason(cards):
    cluster = Cluster.local()
    async with cluster:
        assert [card_mask for card_mask, _ in await cluster.run_method(mask)] == [FIRST, SECOND]
        waiting = asyncio.ensure_future(cluster.workers[0].run_method(wait))
        cards.has(card(0, xid=79), card(1), card(2))
        try:
            with pytest.raises(DDLFError, match=r"the card 0 \(Test Card\) has fallen off the bus \(Xid 79\)"):
                await waiting
            assert lost_cards()[FIRST].startswith("has fallen off the bus (Xid 79) at")
            await cluster.workers[0].reconnect()
            assert await cluster.workers[0].run_method(mask) == ("GPU-20000000-0000", False)
        finally:
            forget_lost(FIRST)


async def test_fork_of_the_warm_template_has_the_mask(cards):
    cluster = Cluster.local()
    await cluster.connect(modules=("sched",))
    async with cluster:
        for worker in cluster.workers:
            await worker.preload("sched")
        assert await cluster.run_method(mask) == [(FIRST, True), (SECOND, True)]


async def test_workers_share_a_card_on_request(cards):
    async with Cluster.local(2, gpus=[1], gpu_memory="4GiB") as cluster:
        assert [card_mask for card_mask, _ in await cluster.run_method(mask)] == [SECOND, SECOND]
        cards.has(card(1))
        with pytest.raises(ConfigError, match=r"each card of this machine has a worker"):
            Cluster.local()


async def test_local_worker_says_that_another_worker_has_its_card(cards):
    async with Cluster.local(1, gpus=[0]):
        with pytest.raises(
            ConfigError, match=r"the card 0 \(Test Card\) has another worker of DDLF; name another card"
        ):
            await Cluster.local(1, gpus=[0]).connect()


async def test_worker_of_a_cluster_file_must_have_the_cards_that_it_names(cards, start_worker, tmp_path):
    worker = start_worker("--gpus", "1", "--gpu-memory", "4GiB")
    assert "card      1 (Test Card), at most 4.3 GB" in worker.output
    line = f"{{host: 127.0.0.1, port: {worker.port}, gpus: %s, gpu_memory: 4GiB}}"
    (tmp_path / "cluster.yaml").write_text(f"workers: [{line % [1]}]\n")
    async with Cluster.from_config(tmp_path / "cluster.yaml", token_file=worker.token_file) as cluster:
        assert await cluster.run_method(mask) == [(SECOND, False)]
    for other_card in ("0", "GPU-0"):
        (tmp_path / "cluster.yaml").write_text(f"workers: [{line % f'[{other_card}]'}]\n")
        sentence = rf"computes on 1 \(Test Card\), at most 4.3 GB, and cluster.yaml says --gpus {other_card} --gpu-memory 4GiB; end it"
        with pytest.raises(ConfigError, match=sentence):
            await Cluster.from_config(tmp_path / "cluster.yaml", token_file=worker.token_file).connect()


def test_worker_says_why_it_uses_no_card(cards, monkeypatch, start_worker):
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    assert "card      none is used: tensorflow" in start_worker().output


def test_run_says_which_cards_it_uses():
    (used,) = card_lines(["1 (Test Card)"], False)
    assert used == "1 (Test Card) for 1 worker. Two runs on cards may differ in bits: --deterministic prevents it"
    assert [*card_lines(["1 (Test Card)"], True)] == ["1 (Test Card) for 1 worker"]


async def test_program_is_told_why_its_workers_leave_cards_unused(cards, caplog):
    cards.has(card(0, error=15), card(1))
    for gpus, count in ((None, 1), ([1], 0)):
        caplog.clear()
        async with Cluster.local(1, gpus=gpus):
            messages = [record.message for record in caplog.records if "cards of this machine unused" in record.message]
        assert len(messages) == count
        assert all("unused: the card 0 has fallen off the bus; reset it" in line for line in messages)


async def test_worker_that_does_not_run_is_started_with_the_cards_of_its_line(cards, tmp_path, free_port):
    line = f"{{host: 127.0.0.1, port: {free_port}, gpus: [1], gpu_memory: 8GiB}}"
    (tmp_path / "cluster.yaml").write_text(f"workers: [{line}]\n")
    with pytest.raises(ConnectError, match=f"ddlf-worker --port {free_port} --gpus 1 --gpu-memory 8GiB"):
        await Cluster.from_config(tmp_path / "cluster.yaml").connect()


def test_second_worker_on_a_card_is_refused(cards, start_worker):
    start_worker("--gpus", "0")
    second = start_worker("--gpus", "0")
    assert second.process.wait(PATIENCE_S) == 2
    assert "ddlf-worker: the card 0 (Test Card) has another worker of DDLF" in second.output
    assert "\n  hint: name another card" in second.output or "; name another card" in second.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--gpus", "0,,1"], "argument --gpus: must name cards, such as 0 or 0,1, or be none, got '0,,1'"),
        (["--gpus", "0,0"], "argument --gpus: names the card 0 twice"),
        (["--gpus", "0", "--gpu-memory", "much"], "argument --gpu-memory: it must be a size such as"),
        (["--gpus", "7"], "this machine has no card 7; it has: 0 (Test Card), 1 (Test Card)"),
    ],
)
def test_worker_refuses_wrong_cards_in_one_sentence(cards, arguments, sentence):
    ended = command("ddlf.cli.worker", "--port", "0", *arguments, env=dict(os.environ))
    assert ended.returncode == 2
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr
