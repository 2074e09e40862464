"""Machines behind a NAT, with network namespaces and the kernel's address translation. This needs Linux, root and ``nft``.

Three namespaces stand for the machines inside, the router, and the machine outside. The router only passes connections that
begin inside, and forgets idle ones. The computer's own network does not change.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

from tests.trials.machines import ip

RULES = """
table ip nat {
  chain post {
    type nat hook postrouting priority 100;
    oifname "out" masquerade
  }
}
table ip filter {
  chain forward {
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname "in" ct state new tcp flags & (fin|syn|rst|ack) == syn accept
  }
}
"""


class Nat:
    """A router between two namespaces. Use as a context manager.

    Args:
        forgets_after_s: The router forgets a connection after this many seconds without a packet. None routes all packets
            without translation, like between two machines that can reach each other.
        number: A number that distinguishes several routers of one process.

    Attributes:
        inside: Name of the namespace behind the router; its address is ``address_inside``.
        outside: Name of the namespace beyond the router; its address is ``address_outside``.
    """

    def __init__(self, forgets_after_s: int | None, number: int = 0) -> None:
        self._forgets_after_s = forgets_after_s
        self.inside, self._router, self.outside = (f"ddlf-{os.getpid()}-{number}{end}" for end in ("in", "nat", "out"))
        self.address_inside, self.address_outside = f"10.215.{number}.2", f"10.216.{number}.2"
        self._ends = (
            (self.inside, "in", self.address_inside, f"10.215.{number}.1"),
            (self.outside, "out", self.address_outside, f"10.216.{number}.1"),
        )

    def __enter__(self) -> Nat:
        try:
            for name in (self.inside, self._router, self.outside):
                ip("netns", "add", name)
                ip("-n", name, "link", "set", "lo", "up")
            for name, port, address, gateway in self._ends:
                ip("-n", name, "link", "add", "cable", "type", "veth", "peer", "name", port, "netns", self._router)
                ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                ip("-n", name, "link", "set", "cable", "up")
                ip("-n", self._router, "address", "add", f"{gateway}/24", "dev", port)
                ip("-n", self._router, "link", "set", port, "up")
                ip("-n", name, "route", "add", "default", "via", gateway)
            self._on_router("sysctl", "-qw", "net.ipv4.ip_forward=1")
            if self._forgets_after_s is not None:
                self._on_router("nft", "-f", "-", text=RULES)
                for setting in (f"timeout_established={self._forgets_after_s}", "loose=0"):
                    self._on_router("sysctl", "-qw", f"net.netfilter.nf_conntrack_tcp_{setting}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for name in (self.inside, self._router, self.outside):
            with contextlib.suppress(RuntimeError):
                ip("netns", "delete", name)

    def _on_router(self, *command: str, text: str = "") -> None:
        done = subprocess.run(
            ["ip", "netns", "exec", self._router, *command], input=text, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def on(namespace: str, *command: str) -> list[str]:
    """Return the words that run a command in a namespace."""
    return ["ip", "netns", "exec", namespace, *command]
