"""Maps as people use them: in scripts that are interrupted, and beside training."""

import asyncio
import hashlib
import itertools
import signal
import subprocess
import sys
import time

import psutil
import pytest

from apps.digits_cnn import DigitsCNN
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
def test_ctrl_c_ends_a_script_and_what_it_runs_on_its_workers(tmp_path, source):
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


def short(x):
    time.sleep(0.002)
    return x
