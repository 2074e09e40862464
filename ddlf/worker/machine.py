"""Describes a machine and its installed packages, for people and for comparison. Runs on both sides; imports neither
NumPy nor Keras.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from ddlf.version import __version__

TENSORFLOWS = (
    *("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu", "intel-tensorflow", "tensorflow-rocm"),
)
"""Distributions that install the same package ``tensorflow``. If two are installed, one overwrites files of the other.
"""
PACKAGES = (*TENSORFLOWS, "keras", "jax", "torch", "numpy", "cloudpickle", "msgpack", "cryptography")
LARGE = ("tensorflow", "keras", "jax", "torch", "numpy")
"""Packages whose import takes seconds longer without bytecode."""


def about(folders: Iterable[Path] = (), needs: Iterable[str] = ()) -> dict[str, Any]:
    """Return a description of this machine as data.

    Args:
        folders: Folders whose disks to describe.
        needs: Requirements in addition to DDLF's own, in the form of a pyproject.toml.

    Returns:
        ``ddlf`` and ``python``, versions; ``platform`` and ``host``, for people; ``libraries``, the folder of installed
        packages.

        ``packages``, a version for each installed package of ``PACKAGES``; ``unmet``, requirements that are missing or
        too old; ``keras_backend`` and ``has_backend``; ``without_bytecode``, packages that are compiled again at every
        import, and ``may_write_bytecode``.

        ``cores``, the cores that this process may use; ``memory`` and ``memory_free``, in bytes, None if unknown;
        ``disks``, a map with folder, size and free bytes for each disk.
    """
    return {
        "ddlf": __version__,
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
        "cores": cores(),
        "memory": memory()[0],
        "memory_free": memory()[1],
        "disks": disks(folders),
    }


def packages(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of the installed distributions."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def unmet(needs: Iterable[str] = ()) -> list[str]:
    """Return the requirements of DDLF and of ``needs`` that are missing or too old, as ``"numpy>=1.26 (1.24.0
    is installed)"``.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    for text in (*(metadata.requires("ddlf") or ()), *needs):
        try:
            wanted = Requirement(text)
        except InvalidRequirement:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        there = packages([wanted.name]).get(wanted.name)
        if there is None or not wanted.specifier.contains(there, prereleases=True):
            found.append(f"{wanted.name}{wanted.specifier} ({f'{there} is' if there else 'not'} installed)")
    return found


def keras_backend() -> str:
    """Return the name of the backend that Keras would use, by Keras's own rules."""
    if named := os.environ.get("KERAS_BACKEND"):
        return named
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


def cores() -> int:
    """Return the number of whole CPUs that this process may use, by its affinity and by the CPU quota of its control
    group.

    A quota is rounded down, but to 1 at least: 1.5 CPUs give 1. A second computing thread would be stopped in each
    period of the quota, and the first would wait for it. The remaining half CPU serves the worker's other threads.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([count, *(int(quota) for quota in _cpu_quotas())]))


def memory() -> tuple[int | None, int | None]:
    """Return all memory and the free memory, in bytes. In a container with a limit, these are the container's."""
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


def disks(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """Describe each disk of the given folders once: its first folder, its size and the free bytes for this user."""
    found: dict[int, dict[str, Any]] = {}
    for folder in folders:
        existing = next((place for place in (folder, *folder.parents) if place.is_dir()), None)
        with contextlib.suppress(OSError):
            if existing is not None and (disk := existing.stat().st_dev) not in found:
                usage = shutil.disk_usage(existing)
                found[disk] = {"folder": str(existing), "size": usage.total, "free": usage.free}
    return list(found.values())
