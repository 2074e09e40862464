"""Describes a machine: its hardware, memory, addresses and installed packages. Runs on both sides; imports neither
NumPy nor Keras.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import json
import os
import platform
import shutil
import socket
import struct
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from ddlf.errors import ConfigError
from ddlf.worker.cards import MASK, facts_of_cards
from ddlf.worker.source import source
from ddlf.worker.status import Footprint

TENSORFLOWS = (
    *("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu", "intel-tensorflow", "tensorflow-rocm"),
)
"""Distributions that install the same package ``tensorflow``. If two are installed, one overwrites files of the other.
"""
PACKAGES = (*TENSORFLOWS, "keras", "jax", "torch", "numpy", "cloudpickle", "msgpack", "cryptography")
LARGE = ("tensorflow", "keras", "jax", "torch", "numpy")
"""Large packages. Without bytecode files, their import takes seconds longer."""


def machine_facts(folders: Iterable[Path] = (), needs: Iterable[str] = ()) -> dict[str, Any]:
    """Return a description of this machine as data.

    Args:
        folders: Folders whose disks to describe.
        needs: Requirements in addition to DDLF's own, in the form of a pyproject.toml.

    Returns:
        ``ddlf`` and ``python``, versions; ``source``, the digest of DDLF's source files; ``platform`` and ``host``, for
        people; ``libraries``, the folder of installed packages.

        ``packages``, a version for each installed package of ``PACKAGES``; ``unmet``, requirements that are missing or
        too old; ``keras_backend`` and ``has_backend``; ``without_bytecode``, packages that are compiled again at every
        import, and ``may_write_bytecode``.

        ``gpus``, the facts of ``facts_of_cards``; ``cores``, the cores that this process may use; ``memory`` and
        ``memory_free``, in bytes, None if unknown; ``disks``, a map with folder, size and free bytes for each disk.
    """
    return {
        "ddlf": source().version,
        "source": source().digest,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "libraries": sysconfig.get_path("purelib"),
        "packages": packages(),
        "unmet": unmet(needs),
        "keras_backend": (backend := keras_backend()),
        "has_backend": has_module(backend),
        "without_bytecode": [name for name in LARGE if lacks_bytecode(name)],
        "may_write_bytecode": not os.environ.get("PYTHONDONTWRITEBYTECODE"),
        "gpus": facts_of_cards(backend, os.environ.get(MASK)),
        "cores": cores(),
        "memory": memory()[0],
        "memory_free": memory()[1],
        "disks": disks(folders),
    }


def packages(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the version of each of these Python distributions that is installed, by name."""
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def unmet(needs: Iterable[str] = ()) -> list[str]:
    """Return the requirements of DDLF and of ``needs`` that are missing or too old, as ``"numpy>=1.26 (1.24.0
    is installed)"``.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    missing = []
    for text in (*(metadata.requires("ddlf") or ()), *needs):
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = packages([requirement.name]).get(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(
                f"{requirement.name}{requirement.specifier} ({f'{version} is' if version else 'not'} installed)"
            )
    return missing


def keras_backend() -> str:
    """Return the name of the backend that Keras would use, by Keras's own rules."""
    if backend := os.environ.get("KERAS_BACKEND"):
        return backend
    folder = Path(os.environ.get("KERAS_HOME") or "~/.keras")
    try:
        return str(json.loads((folder.expanduser() / "keras.json").read_text())["backend"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return "tensorflow"


def has_module(name: str) -> bool:
    """Return whether a module of this name exists. The module is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def lacks_bytecode(package: str) -> bool:
    """Return whether an installed package has no bytecode. Its first file represents all, since an import writes
    bytecode for all files or for none.
    """
    with contextlib.suppress(ImportError, ValueError, NotImplementedError):
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            return not os.path.exists(importlib.util.cache_from_source(spec.origin))
    return False


CORES_VARIABLE = "DDLF_CORES"
"""Environment variable with the number of CPUs that an engine has given this worker, if nothing else enforces it."""
THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC")
"""Environment variables that set the number of threads of numeric libraries. ``NPROC`` is JAX's."""


def cores() -> int:
    """Return the number of whole CPUs that this process may use, by its affinity, by the CPU quota of its control
    group, and by ``DDLF_CORES``.

    A quota is rounded down, but to 1 at least: 1.5 CPUs give 1. A second computing thread would be stopped in each
    period of the quota, and the first would wait for it. The remaining half CPU serves the worker's other threads.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *(int(quota) for quota in _cpu_quotas()), *cores_of_engine()]))


def cores_of_engine() -> list[int]:
    """Return the number of CPUs that an engine has given to this worker alone; empty without one."""
    with contextlib.suppress(KeyError, ValueError):
        return [int(os.environ[CORES_VARIABLE])]
    return []


def memory() -> tuple[int | None, int | None]:
    """Return the total and the free memory, in bytes. In a container with a memory limit, these are the values of the
    container."""
    total = free = None
    with contextlib.suppress(OSError, ValueError, AttributeError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for limit, used in _memory_limits():
        if total is None or limit < total:
            total, free = limit, min(max(limit - used, 0), limit if free is None else free)
    return total, free


class SwapMeter:
    """Counts the bytes that this machine reads from swap while this process waits for pages from a disk. Linux only.

    The counter of the machine takes 70 us to read, so it is read only if this process has had such a wait.
    """

    def __init__(self) -> None:
        self._waits, self._bytes = _page_waits(), _swapped_in()

    def swapped_bytes(self) -> int:
        """Return the bytes since the last call; 0 if this process has not waited for a page, or the system has no such
        counter."""
        if (waits := _page_waits()) == self._waits:
            return 0
        former, self._waits, self._bytes = self._bytes, waits, _swapped_in()
        return self._bytes - former


def _page_waits() -> int:
    with contextlib.suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return 0


def _swapped_in() -> int:
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("pswpin ")) * os.sysconf("SC_PAGE_SIZE")
    return 0


GROUPS = Path("/sys/fs/cgroup")
OF_VERSION = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Files of Linux's control groups, for version 2 and version 1: the limit, the used memory, and the used memory that
can be reclaimed.
"""


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield the limit and the use, in bytes, of each control group of this process that has a limit."""
    for version, (most, current, inactive) in OF_VERSION.items():
        for folder in _group_folders(version):
            with contextlib.suppress(OSError, ValueError, StopIteration):  # "max" is not a number: no limit
                limit, used = (int((folder / name).read_text()) for name in (most, current))
                stat = (folder / "memory.stat").read_text().splitlines()
                yield limit, used - next(int(line.split()[1]) for line in stat if line.split()[0] == inactive)


def _cpu_quotas() -> Iterator[float]:
    """Yield the CPUs of each control group of this process that has a quota."""
    for folder in _group_folders(""):
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number: no quota
            quota, period = map(int, (folder / "cpu.max").read_text().split())
            yield quota / period
    for folder in _group_folders("cpu"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:  # -1: no quota
                yield quota / period


def _group_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and of all enclosing groups, the innermost first.

    Args:
        controller: ``"cpu"`` or ``"memory"`` of version 1; empty for version 2, which has one group for all
            controllers.
    """
    lines = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controller in controllers.split(","):
            # Two controllers may share a hierarchy, "cpu,cpuacct". Not every system has links for the single names.
            root = GROUPS / controllers if (GROUPS / controllers).is_dir() else GROUPS / controller
            group = root / path.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def cpu_group() -> str:
    """Return a text that is equal for workers of one machine that may use the same CPUs, so that they share them.

    Workers that have another affinity, or their own CPU quota, have other texts.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    quotas = [str(folder) for folder in (*_group_folders(""), *_group_folders("cpu"))] if any(_cpu_quotas()) else []
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/cgroup") if quotas else ""
    alone = os.getpid() if cores_of_engine() else 0  # an engine has given these CPUs to this worker only
    return json.dumps([same_machine(), cpus, quotas, namespace, alone])


def disks(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Describe each disk of the given folders once: its first folder, its size and the free bytes for this user."""
    by_device: dict[int, dict[str, Any]] = {}
    for folder in folders:
        existing = next((parent for parent in (folder, *folder.parents) if parent.is_dir()), None)
        with contextlib.suppress(OSError):
            if existing is not None and (disk := existing.stat().st_dev) not in by_device:
                usage = shutil.disk_usage(existing)
                by_device[disk] = {"folder": str(existing), "size": usage.total, "free": usage.free}
    return list(by_device.values())


def footprint(*pids: int | None) -> Footprint:
    """Return the memory of some processes and of the machine."""
    total, free = memory()
    return Footprint(sum(map(_resident, pids)) or None, total, free)


def _resident(pid: int | None) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):  # the process has just ended, or this is not Linux
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


ANY = ("0.0.0.0", "::")
_SIOCGIFADDR = 0x8915  # Linux: returns the IPv4 address of an interface
_GLOBAL = "00"  # the scope of an IPv6 address that is valid in the whole network


def addresses_of(host: str) -> list[str]:
    """Return the addresses where others can reach a socket that listens on ``host``.

    Args:
        host: One address, or the wildcard address of a family.

    Returns:
        Addresses, loopback first.
    """
    if host not in ANY:
        return [host]
    loopback = ["127.0.0.1"] if host == ANY[0] else ["::1", "127.0.0.1"]
    addresses = [*_ipv4(), *(_ipv6() if host == ANY[1] else ())]
    return [
        *loopback,
        *(address for address in dict.fromkeys(addresses) if not ipaddress.ip_address(address).is_loopback),
    ]


def addresses_in(network: str) -> list[str]:
    """Return the addresses of this machine in a network.

    Args:
        network: An interface such as ``"ib0"``, or a network such as ``"10.1.0.0/16"``.

    Raises:
        ConfigError: There is none.
    """
    if "/" in network:
        addresses = [address for address in addresses_of("::") if ipaddress.ip_address(address) in _network(network)]
    else:
        addresses = [address for name, address in _ipv4_by_interface() if name == network]
    if not addresses:
        existing = ", ".join(f"{address} ({name})" for name, address in _ipv4_by_interface())
        raise ConfigError(
            f"this machine has no address in {network}", hint=f"it has: {existing or 'none that is known'}"
        )
    return addresses


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text, strict=False)


def same_machine() -> str:
    """Return a text that identifies this machine, so that processes can see whether they run on the same one. It
    changes when the machine restarts.
    """
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _ipv4_by_interface() -> list[tuple[str, str]]:
    """Return the name of each network interface with an IPv4 address, and the address; empty where that is unknown."""
    addresses = []
    if sys.platform.startswith("linux"):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # no IPv4 address
                    answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    addresses.append((name, socket.inet_ntoa(answer[20:24])))
    return addresses


def _ipv4() -> list[str]:
    addresses = [address for _, address in _ipv4_by_interface()]
    with contextlib.suppress(OSError):  # the host name cannot be resolved
        addresses += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return addresses


def _ipv6() -> list[str]:
    """Return the global IPv6 addresses from the file in which Linux lists them; none on other systems."""
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return [str(ipaddress.ip_address(bytes.fromhex(row[0]))) for row in rows if row[3] == _GLOBAL]
    return []
