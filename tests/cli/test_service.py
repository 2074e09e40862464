"""Tests of a worker as a service of systemd: the worker notifies systemd of its start, and then regularly."""

import asyncio
import socket

import pytest

from ddlf.cli.worker import feed_watchdog, notify
from tests.cli.test_worker import start
from tests.patience import PATIENCE_S


@pytest.fixture
def systemd(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(PATIENCE_S)
        yield sock


def test_worker_notifies_systemd_of_start_and_life(systemd, tmp_path):
    process, _ = start(tmp_path, NOTIFY_SOCKET=systemd.getsockname(), WATCHDOG_USEC="200000")
    try:
        assert [systemd.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    finally:
        process.terminate()
        process.communicate()


async def test_unread_systemd_socket_blocks_nothing(systemd, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.getsockname())
    monkeypatch.setenv("WATCHDOG_USEC", "2")
    feeding = asyncio.create_task(feed_watchdog())
    for _ in range(1000):  # the socket holds about ten messages
        await asyncio.sleep(0)
        await asyncio.sleep(1e-6)
    feeding.cancel()
    assert systemd.recv(100) == b"WATCHDOG=1"


def test_abstract_socket_name_is_understood(monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0ddlf-notify-test")
        sock.settimeout(PATIENCE_S)
        monkeypatch.setenv("NOTIFY_SOCKET", "@ddlf-notify-test")
        notify("READY=1")
        assert sock.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["", "/no/such/socket", "vsock:2:1"])
def test_worker_without_systemd_sends_no_notification(monkeypatch, address):
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify("READY=1")
