"""Network namespaces that act as machines at one switch, each with a limited link. Linux, root.

They do not touch the computer's own network.

Every machine has one cable to the switch. The kernel's ``tbf`` limits both directions. Headers of frames count, so
programs can send at most 191 of 200 Mbit/s. The kernel counts the bytes of the cables.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

BURST = "80kb"
"""Bytes that may pass at once. This is the size of the kernel's largest pieces, so links need not divide them."""
LATENCY = "100ms"
"""Time that packets may wait at the switch's end of a link before it drops some: 2.5 MB at 200 Mbit/s, like in a switch."""
OWN_LATENCY = "1s"
"""The same at a machine's end. A real machine does not drop its own packets: its connections wait for the network card."""


def ip(*arguments: str) -> None:
    """Run ``ip``.

    Raises:
        RuntimeError: The command failed. The message is its output.
    """
    run("ip", *arguments)


def run(*command: str) -> None:
    """Run a command.

    Raises:
        RuntimeError: The command failed. The message is its output.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


def available() -> bool:
    """Return whether this user may make namespaces here, with bridges and limited links."""
    try:
        with Network(1, "1gbit"):
            return True
    except (OSError, RuntimeError):
        return False


class Network:
    """Some machines at a switch. Use as a context manager.

    Args:
        machines: Number of machines.
        rate: Speed of each link in each direction, in the notation of ``tc``, such as ``"200mbit"``.

    Attributes:
        addresses: One address for each machine.
    """

    def __init__(self, machines: int, rate: str) -> None:
        self._names = [f"ddlf-{os.getpid()}-{number}" for number in range(machines)]
        self._switch = f"ddlf-{os.getpid()}-switch"
        self._rate = rate
        self.addresses = [f"10.214.0.{number + 1}" for number in range(machines)]

    def __enter__(self) -> Network:
        try:
            ip("netns", "add", self._switch)
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._switch, "link", "set", "bridge", "up")
            for number, name in enumerate(self._names):
                self._plug_in(number, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for name in (*self._names, self._switch):
            with contextlib.suppress(RuntimeError):
                ip("netns", "delete", name)

    def _plug_in(self, number: int, name: str) -> None:
        port = f"port{number}"
        ip("netns", "add", name)
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "add", "cable", "type", "veth", "peer", "name", port, "netns", self._switch)
        ip("-n", name, "address", "add", f"{self.addresses[number]}/24", "dev", "cable")
        ip("-n", name, "link", "set", "cable", "up")
        ip("-n", self._switch, "link", "set", port, "master", "bridge")
        ip("-n", self._switch, "link", "set", port, "up")
        self._shape("add", number, self._rate)

    def limit(self, machine: int, rate: str) -> None:
        """Give the link of a machine, counted from 0, another rate in both directions."""
        self._shape("change", machine, rate)

    def _shape(self, how: str, machine: int, rate: str) -> None:
        ends = (self._names[machine], "cable", OWN_LATENCY), (self._switch, f"port{machine}", LATENCY)
        for namespace, device, latency in ends:
            shape = ("root", "tbf", "rate", rate, "burst", BURST, "latency", latency)
            run("tc", "-n", namespace, "qdisc", how, "dev", device, *shape)

    def on(self, machine: int, *command: str) -> list[str]:
        """Return the command line that runs a command on a machine, counted from 0."""
        return ["ip", "netns", "exec", self._names[machine], *command]


def counted(processes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the bytes that each machine has sent and received so far.

    Args:
        processes: Number of a process that runs on each.
    """
    counts = []
    for process in processes:
        lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
        (cable,) = (line.partition(":")[2].split() for line in lines if line.strip().startswith("cable:"))
        counts.append((int(cable[8]), int(cable[0])))
    return counts


def computed_s(processes: Sequence[int]) -> float:
    """Return the processor seconds of processes and their descendants so far.

    Args:
        processes: Their numbers.
    """
    used = 0
    for child in with_children(processes):
        with contextlib.suppress(OSError):  # it has ended
            used += sum(map(int, Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return used / os.sysconf("SC_CLK_TCK")


def resident(process: int) -> tuple[int, int]:
    """Return the current bytes in memory of a process, or of its largest descendant, and the peak."""
    sizes = []
    for child in with_children([process]):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{child}/status").read_text().splitlines())
            sizes.append(tuple(1024 * int(lines.get(name, "0 kB").split()[0]) for name in ("VmRSS", "VmHWM")))
    return max(now for now, _ in sizes), max(most for _, most in sizes)


def with_children(processes: Sequence[int]) -> list[int]:
    """Return the ids of processes and their descendants."""
    family, waiting = [], list(processes)
    while waiting:
        family.append(pid := waiting.pop())
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
    return family
