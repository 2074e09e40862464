"""Tests of ``ddlf clean``: which data it frees, and when it refuses."""

import argparse
import asyncio

import pytest

from ddlf.cli.workers import clean, describe
from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import LeaseError
from ddlf.rpc.messages import Request
from ddlf.worker.status import DataSets
from tests.cluster.test_membership import Machines
from tests.daemons import TOKEN
from tests.processes import command

pytestmark = pytest.mark.asyncio(loop_scope="function")


@pytest.fixture
async def machines():
    both = Machines(2)
    for ready in both.ready:
        await ready.wait()
    yield both
    for number in (1, 2):
        await both.end(number)


def proxies(machines, **options):
    return [
        ProxyWorker("127.0.0.1", port, TOKEN, id=number, **options) for number, port in enumerate(machines.ports, 1)
    ]


def options(**changes):
    return argparse.Namespace(**({"timeout": 30, "methods": False} | changes))


async def leave_things(worker):
    await worker.connect()
    await worker.run_code("import numpy\nself.datasets['mnist'] = numpy.zeros(1_000_000)\nself.data['x'] = 1")
    await worker.rpc(Request("set_variable", "v", 1))
    await worker.add_method(lambda: 1, name="hosted")


async def status(machines):
    workers = proxies(machines, guest=True)
    for worker in workers:
        await worker.connect_control()
    answers = [await worker.status() for worker in workers]
    for worker in workers:
        await worker.close()
    return answers


async def test_clean_frees_data_of_earlier_runs_and_methods_only_on_request(machines, capsys):
    first, _ = proxies(machines)
    await leave_things(first)
    await first.close()
    shown = [describe(answer, "") for answer in await status(machines)]
    assert "holds 1 data set of 8.0 MB and 1 method" in shown[0]
    assert "holds" not in shown[1]
    assert await clean(proxies(machines), options()) == 0
    first_line, second_line = capsys.readouterr().out.splitlines()
    assert first_line.endswith("freed: 1 data set of 8.0 MB; variables v")
    assert second_line.endswith("nothing to free")
    assert [answer.methods for answer in await status(machines)] == [["hosted"], []]
    assert await clean(proxies(machines), options(methods=True)) == 0
    assert "freed: methods hosted" in capsys.readouterr().out
    answer = (await status(machines))[0]
    assert (answer.methods, answer.datasets) == ([], DataSets(0, 0))
    await first.connect()
    assert await first.run_code("len(self.data)") == 0
    await first.close()


async def test_clean_frees_nothing_while_a_worker_is_in_use(machines, capsys):
    first, second = proxies(machines)
    await leave_things(first)
    await leave_things(second)
    await first.close()
    with pytest.raises(LeaseError, match="1 of 2 workers are in use, so none was cleaned; wait for the runs"):
        await clean(proxies(machines), options(methods=True))
    assert "leased by" in capsys.readouterr().out
    assert [answer.datasets.count for answer in await status(machines)] == [1, 1]
    assert await second.run("hosted") == 1
    await second.close()
    assert await clean(proxies(machines), options()) == 0


async def test_clean_reports_unreachable_worker_and_cleans_the_rest(machines, capsys):
    first, _ = proxies(machines)
    await leave_things(first)
    await first.close()
    await machines.end(2)
    assert await clean(proxies(machines), options()) == 3
    first_line, second_line = capsys.readouterr().out.splitlines()
    assert "freed: 1 data set" in first_line
    assert "connection refused" in second_line


async def test_clean_command_cleans_the_named_workers(start_worker):
    worker = start_worker()
    where = ["--hosts", f"127.0.0.1:{worker.port}", "--token-file", str(worker.token_file)]
    ended = await asyncio.to_thread(command, "ddlf.cli.main", "clean", *where)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("nothing to free\n")
