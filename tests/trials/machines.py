"""Simulate two machines and a cable with network namespaces on one computer. This needs Linux and root.

It does not change the computer's own network.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def ip(*arguments: str) -> None:
    """Run ``ip``.

    Raises:
        RuntimeError: The command failed. The message has its output.
    """
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Link:
    """Two namespaces, ``a`` and ``b``, with a cable between them. Use as a context manager.

    Attributes:
        a: Name of the first namespace; its address is ``address_a``.
        b: Name of the second namespace; its address is ``address_b``.
    """

    address_a = "10.213.0.1"
    address_b = "10.213.0.2"

    def __init__(self) -> None:
        self.a, self.b = (f"ddlf-{os.getpid()}-{end}" for end in "ab")
        self._cut: set[str] = set()

    def __enter__(self) -> Link:
        try:
            for name in (self.a, self.b):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", self.a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", self.b)
            for name, address in ((self.a, self.address_a), (self.b, self.address_b)):
                ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for name in (self.a, self.b):
            with contextlib.suppress(RuntimeError):
                ip("netns", "delete", name)

    def _peer(self, end: str) -> str:
        return self.address_b if end == self.a else self.address_a

    def cut(self, *ends: str) -> None:
        """Drop all packets from these ends silently; from both ends if none is named."""
        for end in ends or (self.a, self.b):
            ip("-n", end, "route", "add", "blackhole", f"{self._peer(end)}/32")
            self._cut.add(end)

    def mend(self) -> None:
        """Undo ``cut``."""
        for end in self._cut:
            ip("-n", end, "route", "delete", "blackhole", f"{self._peer(end)}/32")
        self._cut.clear()

    def down(self) -> None:
        """Unplug the cable at ``b``."""
        ip("-n", self.b, "link", "set", "cable", "down")

    def up(self) -> None:
        """Plug the cable in again."""
        ip("-n", self.b, "link", "set", "cable", "up")


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Let this thread and its child processes open sockets in a namespace. Open sockets stay in their old namespace."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        target = os.open(Path("/run/netns") / namespace, os.O_RDONLY)
        try:
            _enter(target)
        finally:
            os.close(target)
        try:
            yield
        finally:
            _enter(before)
    finally:
        os.close(before)


def _enter(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")
