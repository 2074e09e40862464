"""Tests of the memory page that a worker's daemon and executor share."""

import os
import subprocess
import sys

import pytest

from ddlf.worker.activity import Activity, HeldPart, Shard


@pytest.fixture
def page():
    """Return the file descriptor of an empty page."""
    fd = Activity.create()
    yield fd
    os.close(fd)


def test_a_new_page_says_that_nothing_runs(page):
    assert Activity(page).running() is None


def test_the_daemon_sees_which_method_the_executor_runs_and_since_when(page):
    daemon, executor = Activity(page), Activity(page)
    executor.begin(7, "train")
    running = daemon.running()
    assert (running.id, running.name) == (7, "train")
    assert 0 <= running.seconds < 1
    executor.end()
    assert daemon.running() is None
    assert daemon.begun == 7


def test_the_daemon_sees_the_last_request_also_after_its_end(page):
    daemon, executor = Activity(page), Activity(page)
    assert daemon.begun == 0
    executor.begin(2**62, "first")
    assert daemon.begun == 2**62
    executor.end()
    executor.end()
    shown = executor.shown()
    executor.begin(2**62 + 1, "concurrent")
    executor.show(shown)
    assert (daemon.running(), daemon.begun) == (None, 2**62)
    executor.begin(3, "second")
    assert (daemon.running().id, daemon.begun) == (3, 3)
    daemon.clear()
    assert daemon.begun == 0


def test_the_daemon_sees_the_kept_slice_of_weights_until_a_new_executor_starts(page):
    daemon, executor = Activity(page), Activity(page)
    assert daemon.shard is None
    executor.show_shard(Shard(5, 2**40, 2**41, 7, "3f2a9b", shards=2, copies=3))
    assert daemon.shard == Shard(5, 2**40, 2**41, 7, "3f2a9b", 2, 3)
    executor.show_shard(None)
    assert daemon.shard is None
    executor.show_shard(Shard(0, 1, 1, 0, "run"))
    daemon.clear()
    assert daemon.shard is None


def test_the_daemon_sees_the_workers_part_of_a_model_until_a_new_executor_starts(page):
    daemon, executor = Activity(page), Activity(page)
    assert daemon.part is None
    executor.show_shard(Shard(1, 2**63, 2**63, 2**63, "s" * 32, shards=2**63, copies=2**63))
    assert daemon.part is None
    executor.show_part(HeldPart(2, 3, 2**41, 7, 1, "3f2a9b"))
    executor.grant(b"l" * 24)
    assert daemon.part == HeldPart(2, 3, 2**41, 7, 1, "3f2a9b")
    assert daemon.shard.run == "s" * 32
    executor.show_part(None)
    assert daemon.part is None
    executor.show_part(HeldPart(0, 0, 0, 7, 1, "3f2a9b"))
    daemon.clear()
    assert daemon.part is None


def test_another_process_reads_the_same_page(page):
    Activity(page).begin(9, "loops")
    code = f"from ddlf.worker.activity import Activity; print(Activity({page}).running()[:2])"
    completed = subprocess.run(
        [sys.executable, "-c", code], pass_fds=[page], capture_output=True, text=True, check=True
    )
    assert completed.stdout == "(9, 'loops')\n"


def test_a_long_or_non_ascii_name_is_cut_without_an_error(page):
    activity = Activity(page)
    activity.begin(1, "é" * 200)
    assert activity.running().name.startswith("é" * 60)


def test_clearing_the_page_removes_the_running_method(page):
    activity = Activity(page)
    activity.begin(1, "f")
    activity.clear()
    assert activity.running() is None


def test_the_page_has_no_name_in_the_file_system(page, own_folders):
    assert os.fstat(page).st_nlink == 0


def test_the_executor_sees_the_last_64_requests_to_cancel(page):
    daemon, executor = Activity(page), Activity(page)
    for id in range(1, 101):
        daemon.ask_end(id)
    assert [id for id in range(1, 200) if executor.is_to_end(id)] == list(range(37, 101))
    daemon.clear()
    assert not executor.is_to_end(100)


def test_the_page_shows_the_first_method_again_after_a_concurrent_one(page):
    executor = Activity(page)
    executor.begin(1, "train")
    shown = executor.shown()
    executor.begin(2, "look")
    executor.show(shown)
    assert executor.running()[:2] == (1, "train")
