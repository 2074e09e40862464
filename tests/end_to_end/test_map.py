"""Tests of maps: in interrupted scripts, beside training, and with killed processes."""

import asyncio
import contextlib
import hashlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter

import psutil
import pytest

from apps.digits_cnn import DigitsCNN
from ddlf import Cluster
from ddlf.errors import ExecutorCrashed, WorkerLost
from tests.patience import PATIENCE_S

POOL = """
import time, ddlf
def slow(x):
    time.sleep(1000 * (x > 3))
    return x
with ddlf.Pool(2) as pool:
    for result in pool.map(slow, range(1000)):
        print(result, flush=True)
"""
CLUSTER = """
import asyncio, time, ddlf
def slow(x):
    time.sleep(1000 * (x > 3))
    return x
async def main():
    async with ddlf.Cluster.local(2) as cluster:
        async for result in cluster.map(slow, range(1000)):
            print(result, flush=True)
asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", [POOL, CLUSTER], ids=["pool", "cluster"])
def test_ctrl_c_ends_a_script_and_its_functions_on_workers(tmp_path, source):
    (tmp_path / "script.py").write_text(source)
    with subprocess.Popen(
        [sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert [process.stdout.readline() for _ in range(4)] == ["0\n", "1\n", "2\n", "3\n"]
        started = psutil.Process(process.pid).children(recursive=True)
        assert started
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert psutil.wait_procs(started, timeout=PATIENCE_S)[1] == []


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
async def test_a_map_beside_training_changes_no_bit_of_it(two_workers):
    async def trained():
        app = DigitsCNN(two_workers)
        app.verbose, app.master_epochs = False, 2
        await app.train_sync()
        return hashlib.sha256(b"".join(array.tobytes() for array in app.model.get_weights())).hexdigest()

    alone = await trained()
    training = asyncio.create_task(trained())
    count = 0
    async for result in two_workers.map(short, itertools.count()):
        assert result == count
        count += 1
        if training.done():
            break
    assert await training == alone
    assert count > 0


@pytest.mark.slow
@pytest.mark.parametrize("idempotent", [False, True])
async def test_each_item_has_one_result_and_runs_once_unless_it_is_idempotent(tmp_path, idempotent):
    """Kill executors and daemons at random moments. Each item records its beginning."""
    file, chance, count = tmp_path / "begun", random.Random(0), 600

    def note(x):
        with open(file, "a") as begun:
            begun.write(f"{x}\n")
        time.sleep(0.004)
        return x

    async with Cluster.local(3) as cluster:

        async def kill():
            for part in ("executor", "daemon") * 3:
                await asyncio.sleep(chance.uniform(0.05, 0.2))
                number = chance.randrange(3)
                worker, daemon = cluster.workers[number], cluster._launcher._processes[number]
                if worker.is_open and daemon.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(daemon.pid if part == "daemon" else worker.executor.pid, signal.SIGKILL)

        killing = asyncio.create_task(kill())
        results = await cluster.options(idempotent=idempotent, on_error="return").map(note, range(count))
        await killing
    times = Counter(map(int, file.read_text().split()))
    assert len(results) == count
    for x, result in enumerate(results):
        if isinstance(result, Exception):
            assert isinstance(result, ExecutorCrashed | WorkerLost)
            assert result.may_have_run or not times[x]  # three executors ended before its turn
            assert result.item_index == x
            assert result.attempts == 3 if idempotent else times[x] <= 1
        else:
            assert result == x
            assert times[x] >= 1 if idempotent else times[x] == 1
    assert idempotent or any(isinstance(result, Exception) for result in results)


def short(x):
    time.sleep(0.002)
    return x
