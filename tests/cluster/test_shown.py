"""Tests of the tables that a notebook shows for a cluster and its workers."""

import re
from types import SimpleNamespace

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.proxy import COLUMNS, table, workers_table
from ddlf.testing import in_process_cluster
from ddlf.worker.status import ExecutorInfo

EXECUTOR = ExecutorInfo(host="pc01", cores=8, threads=4, python="3.11.2")


def worker(**more):
    usual = dict(
        id=1,
        label="10.0.0.7:9000",
        connected=True,
        state="alive",
        executor=EXECUTOR,
        bytes_sent=2_000,
        bytes_received=5,
    )
    return SimpleNamespace(**usual | more)


def cells(html):
    return re.findall(r"<td[^>]*>(.*?)</td>", html)


def test_a_row_has_the_name_state_and_transferred_bytes_of_a_worker():
    html = workers_table([worker()])
    assert re.findall(r"<th [^>]*>(.*?)</th>", html) == list(COLUMNS)
    assert cells(html) == ["1", "10.0.0.7:9000", "alive", "pc01", "8", "4", "3.11.2", "2.00 kB", "5 B"]
    absent = worker(connected=False, state="dead", executor=ExecutorInfo())
    assert cells(workers_table([absent])) == ["1", "10.0.0.7:9000", "not connected", *[""] * 6]


def test_names_are_escaped_in_html():
    assert cells(workers_table([worker(label="<script>")]))[1] == "&lt;script&gt;"
    assert "<b>" not in table(["<b>"], [['"<b>"']])


async def test_a_cluster_shows_all_workers_and_a_view_shows_its_own():
    assert cells(Cluster(["127.0.0.1"] * 2, [9, 10], token_file=None)._repr_html_())[2] == "not connected"
    async with in_process_cluster(3) as cluster:
        assert cells(cluster._repr_html_())[2 :: len(COLUMNS)] == ["alive"] * 3
        assert cells(cluster.options(workers=[2])._repr_html_())[0] == "2"
        assert cells(cluster.workers[0]._repr_html_())[0] == "1"
    assert cells(cluster._repr_html_())[2] == "not connected"
