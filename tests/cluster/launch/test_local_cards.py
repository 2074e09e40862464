"""Cards of local workers and of ``ddlf-worker``: executors have their mask before a framework is imported. NVML is a stand-in."""

import os
import sys

import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.errors import ConfigError, DDLFError
from ddlf.events import WorkerConnected
from tests.cards import card
from tests.patience import PATIENCE_S
from tests.processes import command

FIRST, SECOND = "GPU-00000000-0000", "GPU-10000000-0000"


def mask():
    return os.environ.get("CUDA_VISIBLE_DEVICES"), "sched" in sys.modules


def die():
    os._exit(3)


async def test_each_card_gets_one_worker_whose_executors_know_it(cards):
    events = []
    cluster = Cluster.local()
    cluster.subscribe(events.append)
    async with cluster:
        assert await cluster.run_method(mask) == [(FIRST, False), (SECOND, False)]
        assert [worker.facts["gpus"] for worker in cluster.workers] == [["0 (Test Card)"], ["1 (Test Card)"]]
        assert (await cluster.workers[1].status())["gpus"] == ["1 (Test Card)"]
        with pytest.raises(DDLFError):
            await cluster.workers[1].run_method(die)
        assert await cluster.workers[1].run_method(mask) == (SECOND, False)
    connected = [event for event in events if isinstance(event, WorkerConnected)]
    assert {(event.worker, event.gpus) for event in connected} == {(1, ("0 (Test Card)",)), (2, ("1 (Test Card)",))}


async def test_fork_of_the_warm_template_has_the_mask(cards):
    cluster = Cluster.local()
    await cluster.connect(modules=("sched",))
    async with cluster:
        for worker in cluster.workers:
            await worker.preload("sched")
        assert await cluster.run_method(mask) == [(FIRST, True), (SECOND, True)]


async def test_workers_share_a_card_on_request(cards):
    async with Cluster.local(2, gpus=[1], gpu_memory="4GiB") as cluster:
        assert [found for found, _ in await cluster.run_method(mask)] == [SECOND, SECOND]
        cards.has(card(1))
        with pytest.raises(ConfigError, match=r"each card of this machine has a worker"):
            Cluster.local()


async def test_worker_of_a_cluster_file_must_have_the_cards_that_it_names(cards, start_worker, tmp_path):
    worker = start_worker("--gpus", "1", "--gpu-memory", "4GiB")
    assert "card      1 (Test Card), at most 4.3 GB" in worker.output
    line = f"{{host: 127.0.0.1, port: {worker.port}, gpus: %s, gpu_memory: 4GiB}}"
    (tmp_path / "cluster.yaml").write_text(f"workers: [{line % [1]}]\n")
    async with Cluster.from_config(tmp_path / "cluster.yaml", token_file=worker.token_file) as cluster:
        assert await cluster.run_method(mask) == [(SECOND, False)]
    (tmp_path / "cluster.yaml").write_text(f"workers: [{line % [0]}]\n")
    sentence = (
        r"computes on 1 \(Test Card\), at most 4.3 GB, and cluster.yaml says --gpus 0 --gpu-memory 4294967296; end it"
    )
    with pytest.raises(ConfigError, match=sentence):
        await Cluster.from_config(tmp_path / "cluster.yaml", token_file=worker.token_file).connect()


def test_second_worker_on_a_card_is_refused(cards, start_worker):
    start_worker("--gpus", "0")
    second = start_worker("--gpus", "0")
    assert second.process.wait(PATIENCE_S) == 2
    assert "ddlf-worker: the card 0 (Test Card) has another worker of DDLF" in second.output
    assert "\n  hint: name another card" in second.output or "; name another card" in second.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
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
