"""Tests of requests when processes are killed or frozen, when masters compete, and when a network fails.

They use real processes and real networks.
"""

import asyncio
import contextlib
import gc
import os
import random
import signal
import sys
import time

import numpy as np
import psutil
import pytest

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import MAX_ATTEMPTS, ProxyWorker
from ddlf.errors import ConnectError, ExecutorCrashed, LeaseError, RemoteError, WorkerLost
from ddlf.rpc.messages import Request
from ddlf.worker.calls import MAX_QUEUED_BYTES
from tests.patience import PATIENCE_S
from tests.processes import command, end_of
from tests.trials.machines import Link, inside
from tests.trials.workers import Workers, resume, stop

RARELY_S = 1000
"""Seconds for ``dead_after_s`` in tests of losses that the kernel reports at once: a silence must not end a request first."""


def add(a, b):
    return a + b


def spin():
    while True:
        pass


def hold_the_gil():
    import ctypes

    ctypes.PyDLL(None).usleep(1_000_000)


def array_of_ones(count):
    return np.ones(count, np.uint8)


def note(path):
    """Append the process id to a file, which shows that this method ran."""
    with open(path, "a") as file:
        file.write(f"{os.getpid()}\n")


def note_and_die(path, times):
    note(path)
    with open(path) as file:
        if len(file.readlines()) <= times:
            os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


async def end_after_this_turn(pipe):
    await asyncio.to_thread(pipe.read_text)
    asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGKILL)


def starts(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


async def busy(worker):
    async with asyncio.timeout(PATIENCE_S):
        while not (await worker.status()).busy:
            pass


@pytest.fixture
def workers():
    with Workers() as workers:
        yield workers


def cluster_of(workers, *ports, **options):
    return Cluster(["127.0.0.1"] * len(ports), list(ports), token_file=workers.token_file, **options)


# -- killed -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_executor_killed_at_any_moment_harms_nobody_else(workers):
    ports = [workers.start()[1] for _ in range(2)]
    async with cluster_of(workers, *ports, dead_after_s=RARELY_S) as cluster:
        first, second = cluster.workers
        pid = await second.run_method(os.getpid)
        for _ in range(5):
            call = asyncio.ensure_future(first.run_method(spin))
            await busy(first)
            await asyncio.sleep(random.uniform(0, 0.05))
            os.kill((await first.status()).executor_pid, signal.SIGKILL)
            with pytest.raises(ExecutorCrashed, match="SIGKILL while it ran 'spin'") as caught:
                await asyncio.wait_for(call, PATIENCE_S)
            assert (caught.value.signal, caught.value.attempts, caught.value.may_have_run) == ("SIGKILL", 1, True)
            assert first.state == "alive"
        assert await cluster.run_method(add, a=1, b=2) == [3, 3]
        assert (await first.status()).restarts == 5
        assert await second.run_method(os.getpid) == pid


async def test_executor_that_ends_between_turns_has_begun_no_waiting_call(workers, tmp_path):
    _, port = workers.start()
    async with cluster_of(workers, port) as cluster, asyncio.timeout(PATIENCE_S):
        worker, pipe = cluster.workers[0], tmp_path / "pipe"
        os.mkfifo(pipe)
        first = asyncio.ensure_future(worker.run_method(end_after_this_turn, pipe))
        await busy(worker)
        waiting = [asyncio.ensure_future(worker.run_method(add, 1, 2)) for _ in range(3)]
        while len(worker._link.data.pending) < 4:
            await worker.status()
        await asyncio.to_thread(pipe.write_text, "all are there")
        ended, *errors = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert ended is None or (isinstance(ended, ExecutorCrashed) and ended.may_have_run)
    assert [(type(error), error.may_have_run) for error in errors] == [(ExecutorCrashed, False)] * 3


async def test_daemon_killed_in_mid_frame_leaves_no_process_or_memory(workers):
    process, port = workers.start()
    async with cluster_of(workers, port, dead_after_s=RARELY_S) as cluster:
        worker = cluster.workers[0]
        assert (await worker.run_method(array_of_ones, 200_000_000)).size == 200_000_000
        executor = (await worker.status()).executor_pid
        gc.collect()
        before = psutil.Process().memory_info().rss
        received = worker.bytes_received
        call = asyncio.ensure_future(worker.run_method(array_of_ones, 200_000_000))
        while worker.bytes_received < received + 20_000_000:  # noqa: ASYNC110
            await asyncio.sleep(0)
        process.kill()
        with pytest.raises(WorkerLost, match="the connection was lost") as caught:
            await asyncio.wait_for(call, PATIENCE_S)
        assert caught.value.may_have_run
        assert worker.bytes_received < received + 200_000_000
        end_of(executor)
        del call
        gc.collect()
        assert psutil.Process().memory_info().rss < before + 20_000_000


async def test_a_master_killed_while_it_sends_a_value_leaves_the_old_value(workers):
    _, port = workers.start()
    code = (
        "import asyncio, os, signal, numpy as np\n"
        "from ddlf import Cluster\n"
        "async def main():\n"
        f"    cluster = Cluster(['127.0.0.1'], {port}, token_file={str(workers.token_file)!r})\n"
        "    await cluster.connect()\n"
        "    await cluster.set_variable('v', np.zeros(1000, np.uint8))\n"
        "    call = asyncio.ensure_future(cluster.set_variable('v', np.ones(200_000_000, np.uint8)))\n"
        "    while cluster.workers[0].bytes_sent < 50_000_000:\n"
        "        await asyncio.sleep(0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    master = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await master.wait() == -signal.SIGKILL
    async with cluster_of(workers, port) as cluster:
        (value,) = await cluster.get_variable("v")
        assert (value.size, value.any()) == (1000, False)


# -- frozen, or only busy -----------------------------------------------------------------------------------------------


async def test_frozen_worker_is_suspect_then_dead_then_usable(workers, tmp_path):
    process, port = workers.start()
    async with cluster_of(workers, port, dead_after_s=1) as cluster:
        worker = cluster.workers[0]
        await worker.run_method(array_of_ones, 1_000_000)
        sent = worker.bytes_sent
        begin = time.monotonic()
        stop(process.pid)
        calls = [asyncio.ensure_future(worker.run_method(note, str(tmp_path / "ran"))) for _ in range(3)]
        states = {worker.state}
        while not calls[0].done():
            await asyncio.sleep(0.01)
            states.add(worker.state)
        assert time.monotonic() - begin > 0.8
        assert states == {"alive", "suspect", "dead"}
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(outcome, WorkerLost)
            assert outcome.message.startswith("no heartbeat for ")
            assert outcome.last_seen_s >= 1
            assert outcome.may_have_run
        with pytest.raises(WorkerLost, match="connect again") as caught:
            await worker.run_method(add, 1, 2)
        assert not caught.value.may_have_run
        resume(process.pid)
        await worker.reconnect(PATIENCE_S)
        assert await worker.run_method(add, 1, 2) == 3
        assert worker.state == "alive"
        assert worker.bytes_sent > sent


async def test_a_worker_whose_method_holds_the_gil_is_busy_and_not_dead(workers):
    _, port = workers.start()
    async with cluster_of(workers, port, dead_after_s=0.5) as cluster:
        await cluster.run_method(hold_the_gil)
        assert cluster.workers[0].state == "alive"


MASTER = """
import asyncio, sys, time
from ddlf import Cluster, DDLFError

def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "ended"

async def main():
    port, token_file, dead_after_s, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    cluster = Cluster(["127.0.0.1"], port, token_file=token_file, dead_after_s=dead_after_s)
    await cluster.connect()
    print("connected", flush=True)
    worker = cluster.workers[0]
    for attempt in (lambda: cluster.run_method(spin, seconds=seconds), lambda: cluster.run_method(spin, seconds=0), lambda: worker.reconnect(120)):
        try:
            print(await attempt(), flush=True)
        except DDLFError as error:
            print(type(error).__name__, getattr(error, "may_have_run", None), error, flush=True)

asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def another_master(workers, port, dead_after_s, seconds):
    """Start a master in another process that runs a method for some seconds."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", MASTER, str(port), str(workers.token_file), str(dead_after_s), str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert await process.stdout.readline() == b"connected\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def lines_of(process):
    async with asyncio.timeout(PATIENCE_S):
        return (await process.stdout.read()).decode().splitlines()


@pytest.mark.parametrize("first", ["master", "worker"])
async def test_pause_of_master_and_worker_ends_nothing(workers, first):
    process, port = workers.start()
    async with another_master(workers, port, 1, 1.5) as master:
        pids = [master.pid, process.pid] if first == "master" else [process.pid, master.pid]
        await asyncio.sleep(0.3)
        for pid in pids:
            stop(pid)
        await asyncio.sleep(2.5)
        for pid in pids:
            resume(pid)
        assert await lines_of(master) == ["['ended']", "['ended']", "None"]


async def test_master_that_slept_through_a_takeover_gets_lease_errors(workers):
    _, port = workers.start()
    async with another_master(workers, port, 0.5, 3600) as old:
        looker = ProxyWorker("127.0.0.1", port, workers.token, guest=True)
        await looker.connect_control()  # a data connection would wait for the executor, which may be busy
        await busy(looker)
        await looker.close()
        stop(old.pid)
        async with asyncio.timeout(PATIENCE_S):
            while True:  # until the lease of the silent master ends
                new = cluster_of(workers, port)
                with contextlib.suppress(LeaseError):
                    await new.connect()
                    break
                await asyncio.sleep(0.05)
        assert await new.run_method(add, a=1, b=2) == [3]
        resume(old.pid)
        lines = await lines_of(old)
        assert len(lines) == 3
        for line, may_have_run in zip(lines, (True, False, False), strict=True):
            assert line.startswith(f"LeaseError {may_have_run} ")
            assert "was taken over by" in line
            assert "epoch 2 > 1" in line
        assert await new.run_method(add, a=1, b=2) == [3]
        await new.close()


# -- two masters --------------------------------------------------------------------------------------------------------


async def test_second_master_learns_the_owner_and_disturbs_nothing(workers):
    _, port = workers.start()
    async with cluster_of(workers, port) as first:
        await first.run_code("import asyncio\nself.gate = asyncio.Event()")
        call = asyncio.ensure_future(first.run_code("await self.gate.wait()\n'through'"))
        await busy(first.workers[0])
        with pytest.raises(
            LeaseError, match=rf"leased by .*@.* pid {os.getpid()} .*since \d\d:\d\d; this process already has it"
        ):
            await cluster_of(workers, port).connect()
        assert await first.run_code("self.id, self.N") == [(1, 1)] if call.done() else not call.done()
        status = command("ddlf.cli.main", "status", "--hosts", f"127.0.0.1:{port}", "--token-file", workers.token_file)
        assert status.returncode == 0, status.stderr
        assert "busy with 'run_code'" in status.stdout
        assert f"pid {os.getpid()}" in status.stdout
        opener = ProxyWorker("127.0.0.1", port, workers.token, guest=True)
        await opener.connect()
        await opener.run_method(open_gate)
        assert await call == ["through"]
        assert await first.run_code("self.id, self.N") == [(1, 1)]
        await opener.close()
        assert await first.run_method(add, a=1, b=2) == [3]


def open_gate(self):
    self.gate.set()


open_gate.concurrent = True


async def test_takeover_ends_requests_of_the_previous_master(workers, tmp_path):
    _, port = workers.start()
    async with cluster_of(workers, port) as old:
        running = asyncio.ensure_future(old.run_method(spin))
        await busy(old.workers[0])
        waiting = [asyncio.ensure_future(old.run_method(note, path=str(tmp_path / "ran"))) for _ in range(5)]
        await old.ping()
        async with cluster_of(workers, port, takeover=True) as new:
            for call in (running, *waiting):
                with pytest.raises(LeaseError, match=r"was taken over by .*, epoch 2 > 1; end this run, or close"):
                    await asyncio.wait_for(call, PATIENCE_S)
            assert await new.run_method(add, a=1, b=2) == [3]
            with pytest.raises(LeaseError, match="was taken over by"):
                await old.workers[0].reconnect(5)
        assert starts(tmp_path / "ran") == 0
        with pytest.raises(LeaseError, match="was taken over by"):
            await old.connect()
        await old.close()  # it forgets its lease, so from here on it is a new master
        async with old:
            assert await old.run_method(add, a=1, b=2) == [3]


async def test_a_request_with_the_key_of_another_lease_is_refused(workers):
    _, port = workers.start()
    async with cluster_of(workers, port) as cluster:
        worker = cluster.workers[0]
        other = ProxyWorker("127.0.0.1", port, workers.token, guest=True)
        await other.connect_control()
        other._link.identity.guest = False  # it has a connection, and a key without a lease
        for key in (bytes(24), bytes(16), b"x" * 24, worker._link.identity.master_id + bytes(8)):
            other._link.identity.master_id, other._link.identity.epoch = key[:16], int.from_bytes(key[16:], "little")
            with pytest.raises(LeaseError, match="no longer has the worker"):
                await other.run_method(add, 1, 2)
        await other.close()
        assert await worker.run_method(add, 1, 2) == 3


async def test_one_worker_under_two_addresses_is_noticed(workers):
    _, port = workers.start()
    cluster = Cluster(["127.0.0.1", "localhost"], port, token_file=workers.token_file)
    with pytest.raises(LeaseError, match=r"1 of 2 .*\n.*this process already has it: .* or list the worker only once"):
        await cluster.connect()


async def test_the_same_master_may_come_back_after_its_connection_was_reset(workers):
    """Its open request ends once."""
    _, port = workers.start()
    async with cluster_of(workers, port, dead_after_s=RARELY_S) as cluster:
        worker = cluster.workers[0]
        await worker.rpc(Request("set_variable", "v", 7))
        call = asyncio.ensure_future(worker.run_method(spin))
        await busy(worker)
        worker._link.control.stream.abort()
        with pytest.raises(WorkerLost):
            await asyncio.wait_for(call, PATIENCE_S)
        await worker.reconnect(PATIENCE_S)
        assert await worker.rpc(Request("get_variable", "v")) == 7
        assert worker.epoch == 2


# -- requests that are repeated, or not ---------------------------------------------------------------------------------


async def test_idempotent_request_survives_crashes_and_counts_attempts(workers, tmp_path):
    _, port = workers.start()
    async with cluster_of(workers, port) as cluster:
        again = cluster.options(idempotent=True)
        path = tmp_path / "two"
        assert await again.run_method(note_and_die, path=str(path), times=2) == ["survived"]
        assert starts(path) == 3
        path = tmp_path / "always"
        with pytest.raises(ExecutorCrashed, match=rf"SIGKILL.*tried {MAX_ATTEMPTS} times") as caught:
            await again.run_method(note_and_die, path=str(path), times=99)
        assert caught.value.attempts == starts(path) == MAX_ATTEMPTS


async def test_a_request_that_is_not_marked_starts_at_most_once(workers, tmp_path):
    _, port = workers.start()
    async with cluster_of(workers, port) as cluster:
        with pytest.raises(ExecutorCrashed) as caught:
            await cluster.run_method(note_and_die, path=str(tmp_path / "ran"), times=99)
        assert (starts(tmp_path / "ran"), caught.value.attempts, caught.value.may_have_run) == (1, 1, True)


async def test_method_that_raises_code_missing_is_not_sent_again(workers, tmp_path):
    _, port = workers.start()

    def miss(path):
        from ddlf.rpc.code import CodeMissing

        note(path)
        raise CodeMissing("of another worker")

    async with cluster_of(workers, port) as cluster:
        with pytest.raises(RemoteError, match="of another worker"):
            await cluster.run_method(miss, path=str(tmp_path / "ran"))
        assert starts(tmp_path / "ran") == 1


async def test_an_idempotent_request_waits_for_a_restarted_daemon(workers):
    process, port = workers.start()
    async with cluster_of(workers, port) as cluster:
        call = asyncio.ensure_future(cluster.options(idempotent=True).run_method(slow_add, a=1, b=2))
        await busy(cluster.workers[0])
        process.kill()
        process.wait()
        await asyncio.to_thread(workers.start, port=port)
        assert await asyncio.wait_for(call, PATIENCE_S) == [3]
        assert cluster.workers[0].epoch == 2  # the epoch increases although the new daemon has no state


def slow_add(a, b):
    time.sleep(0.5)
    return a + b


@pytest.mark.slow
async def test_reconnect_gives_up_after_its_time_limit_and_names_the_last_failure(workers):
    process, port = workers.start()
    async with cluster_of(workers, port) as cluster:
        worker = cluster.workers[0]
        process.kill()
        with pytest.raises(WorkerLost, match="the connection was lost"):
            await worker.run_method(spin)
        with pytest.raises(ConnectError, match=r"was not reached again within 2 s, the last try: .*refused"):
            await worker.reconnect(2)
        with pytest.raises(WorkerLost, match="lost") as caught:
            await worker.rpc(Request("run_method", add, 1, 2), timeout_s=0.5, idempotent=True)
        assert not caught.value.may_have_run


async def test_connection_closed_during_a_reconnect_stays_closed(workers):
    process, port = workers.start()
    async with cluster_of(workers, port) as cluster:
        worker = cluster.workers[0]
        process.kill()
        with pytest.raises(WorkerLost):
            await worker.run_method(spin)
        trying = asyncio.ensure_future(worker.reconnect(PATIENCE_S))
        await asyncio.sleep(0.2)
        await worker.close()
        await asyncio.to_thread(workers.start, port=port)
        with pytest.raises(WorkerLost, match="closed on this side"):
            await trying
        assert not worker.connected


# -- a master that does not read ----------------------------------------------------------------------------------------


async def test_master_that_never_reads_costs_a_bounded_queue(workers):
    _, port = workers.start()
    async with cluster_of(workers, port) as cluster:
        worker = cluster.workers[0]
        size, count = 4_000_000, 100
        await worker.run_method(array_of_ones, size)
        executor = psutil.Process((await worker.status()).executor_pid)
        before = executor.memory_info().rss
        connection = worker._link.data.stream
        connection.pause_reading()
        calls = [asyncio.ensure_future(worker.run_method(array_of_ones, size)) for _ in range(count)]
        largest = 0
        for _ in range(30):
            await worker.ping()
            await asyncio.sleep(0.02)
            largest = max(largest, executor.memory_info().rss)
        assert largest - before < MAX_QUEUED_BYTES + 6 * size
        looker = ProxyWorker("127.0.0.1", port, workers.token, guest=True)
        await looker.connect()
        assert (
            await asyncio.wait_for(looker.run_method(add, 1, 2), PATIENCE_S) == 3
        )  # it runs before the remaining requests of the other master
        await looker.close()
        connection.resume_reading()
        results = await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)
        assert [result.size for result in results] == [size] * count


# -- the network --------------------------------------------------------------------------------------------------------


@pytest.fixture
def link():
    with Link() as link, inside(link.a):
        yield link


@pytest.mark.parametrize("ways", ["both ways", "to the worker", "to the master"])
async def test_a_silent_partition_is_noticed_by_both_sides(workers, link, ways):
    _, port = workers.start(host=link.address_b, namespace=link.b)
    async with Cluster([link.address_b], port, token_file=workers.token_file, dead_after_s=1) as cluster:
        worker = cluster.workers[0]
        call = asyncio.ensure_future(worker.run_method(spin))
        await busy(worker)
        begin = time.monotonic()
        link.cut(*{"both ways": (), "to the worker": (link.a,), "to the master": (link.b,)}[ways])
        with pytest.raises(WorkerLost, match="no heartbeat for ") as caught:
            await asyncio.wait_for(call, PATIENCE_S)
        assert time.monotonic() - begin > 0.8
        assert caught.value.may_have_run
        await asyncio.to_thread(take_when_free, link, port, workers.token)
        link.mend()


def take_when_free(link, port, token):
    """Try on the worker's machine until another master gets the lease, and use the worker."""

    async def ask():
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(LeaseError):
                    other = ProxyWorker(link.address_b, port, token)
                    await other.connect()
                    assert await other.run_method(add, 1, 2) == 3
                    await other.close()
                    return
                await asyncio.sleep(0.01)

    with inside(link.b):
        asyncio.run(ask())


@pytest.mark.slow
async def test_a_cable_that_is_out_for_less_than_dead_after_costs_nothing(workers, link, tmp_path):
    _, port = workers.start(host=link.address_b, namespace=link.b)
    async with Cluster([link.address_b], port, token_file=workers.token_file) as cluster:
        worker = cluster.workers[0]
        epoch = worker.epoch
        for round in range(2):
            states = set()
            link.down()
            calls = [asyncio.ensure_future(worker.run_method(note, str(tmp_path / str(round)))) for _ in range(20)]
            async with asyncio.timeout(PATIENCE_S):
                while worker.state == "alive":
                    states.add(worker.state)
                    await asyncio.sleep(0.02)
                states.add(worker.state)
                link.up()
                await asyncio.gather(*calls)
                assert starts(tmp_path / str(round)) == 20
                while worker.state != "alive":
                    states.add(worker.state)
                    await asyncio.sleep(0.02)
            assert states == {"alive", "suspect"}
        assert worker.epoch == epoch
