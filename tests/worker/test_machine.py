"""Tests of the facts about a machine that its daemon and ``ddlf doctor`` report."""

import importlib.util
import os
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from ddlf.data.array_cache import ArrayCache
from ddlf.worker import machine
from ddlf.worker.calls import Methods
from ddlf.worker.worker import Worker, set_threads


def test_facts_are_plain_data_about_this_machine(tmp_path):
    facts = machine.machine_facts([tmp_path, tmp_path / "not there", tmp_path.parent])
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["packages"]["numpy"] == metadata.version("numpy")
    assert 0 < facts["memory_free"] <= facts["memory"]
    assert facts["cores"] >= 1
    (disk,) = facts["disks"]
    assert disk["folder"] == str(tmp_path)
    assert 0 < disk["free"] <= disk["size"]


def test_missing_bytecode_of_a_package_is_noticed(tmp_path, monkeypatch):
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert machine.lacks_bytecode("large")
    subprocess.run([sys.executable, "-m", "compileall", "-q", tmp_path], check=True)
    assert not machine.lacks_bytecode("large")
    assert not machine.lacks_bytecode("not_installed")


def test_missing_and_outdated_packages_are_named(monkeypatch):
    requirements = ["numpy>=999", "no_such_package>=1", "cloudpickle", "no_such_extra>=1; extra == 'gpu'"]
    monkeypatch.setattr(metadata, "requires", lambda name: requirements)
    version = metadata.version("numpy")
    assert machine.unmet() == [f"numpy>=999 ({version} is installed)", "no_such_package>=1 (not installed)"]
    assert machine.unmet(["numpy>=1", "cloudpickle>999", "no requirement"])[2:] == [
        f"cloudpickle>999 ({metadata.version('cloudpickle')} is installed)"
    ]


def test_the_backend_is_the_one_that_keras_chooses(tmp_path, monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    assert machine.keras_backend() == "tensorflow"
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    assert machine.keras_backend() == "torch"
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert machine.keras_backend() == "jax"
    assert not machine.has_module("no_such_backend")


@pytest.mark.parametrize("text", ["max\n", "", None])
def test_memory_without_a_limit_is_the_memory_of_the_machine(monkeypatch, text):
    def read_text(self, *arguments):
        if self.name == "memory.max" and text is None:
            raise FileNotFoundError
        return text if self.name == "memory.max" else usual(self, *arguments)

    usual, before = machine.Path.read_text, machine.memory()[0]
    monkeypatch.setattr(machine.Path, "read_text", read_text)
    assert machine.memory()[0] == before


def test_memory_of_a_container_is_its_limit(monkeypatch):
    cgroup = {"memory.max": "1000000\n", "memory.current": "900000\n", "memory.stat": "anon 1\ninactive_file 300000\n"}
    usual = machine.Path.read_text
    monkeypatch.setattr(machine.Path, "read_text", lambda self, *a: cgroup.get(self.name) or usual(self, *a))
    assert machine.memory() == (1_000_000, 400_000)


@pytest.mark.parametrize(
    ("line", "folder", "names"),
    [
        ("0::/slurm/job_7/step_0", "slurm/job_7", ("memory.max", "memory.current", "inactive_file")),
        (
            "4:memory:/box/inner",
            "memory/box",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_memory_limit_of_an_outer_group_counts(monkeypatch, tmp_path, line, folder, names):
    group, usual = tmp_path / folder, machine.Path.read_text
    group.mkdir(parents=True)
    for name, text in zip((*names[:2], "memory.stat"), ("1000000\n", "900000\n", f"{names[2]} 300000\n"), strict=True):
        (group / name).write_text(text)
    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(
        machine.Path,
        "read_text",
        lambda self, *a: f"5:cpu:/\n{line}\n" if str(self) == "/proc/self/cgroup" else usual(self, *a),
    )
    assert machine.memory() == (1_000_000, 400_000)


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """Return a function that creates control groups; the affinity of the process has eight CPUs.

    Example: ``groups("0::/box", {"box/cpu.max": "150000 100000"})``.
    """
    usual = machine.Path.read_text

    def make(lines, files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")
        monkeypatch.setattr(
            machine.Path,
            "read_text",
            lambda self, *a: f"{lines}\n" if str(self) == "/proc/self/cgroup" else usual(self, *a),
        )

    monkeypatch.setattr(machine, "GROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return make


@pytest.mark.parametrize(
    ("lines", "files", "count"),
    [
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "150000 100000"}, 1),
        ("0::/", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "1600000 100000"}, 8),
        ("0::/", {"cpu.max": "unreadable"}, 8),
        ("0::/pod/box", {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "200000 100000"}, 2),
        ("0::/pod/box", {"pod/box/cpu.max": "300000 100000", "pod/cpu.max": "600000 100000"}, 3),
        ("4:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 8),
        ("4:cpu,cpuacct:/", {"cpu,cpuacct/cpu.cfs_quota_us": "290000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 2),
        ("5:memory:/\n4:cpuacct,cpu:/box", {"cpu/cpu.cfs_quota_us": "30000", "cpu/cpu.cfs_period_us": "10000"}, 3),
        ("4:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "200000", "cpu/box/cpu.cfs_period_us": "100000"}, 2),
    ],
)
def test_cores_follow_the_quota_of_control_groups_rounded_down(groups, lines, files, count):
    groups(lines, files)
    assert machine.cores() == count


def test_cores_follow_the_affinity(monkeypatch, groups):
    groups("0::/", {"cpu.max": "400000 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5}, raising=False)
    assert machine.cores() == 2


async def test_worker_reports_the_cores_of_its_quota(groups, tmp_path):
    groups("0::/", {"cpu.max": "150000 100000"})
    worker = Worker(Methods(tmp_path, tmp_path), ArrayCache())
    assert (await worker.connect(guest=True)).cores == 1


@pytest.mark.parametrize(
    ("quota", "affinity", "engine", "count"),
    [
        ("150000", 8, "4", 1),  # a quota of 1.5
        ("max", 2, "4", 2),
        ("max", 8, "3", 3),  # like SLURM_CPUS_PER_TASK, num_cpus of Ray, or nthreads of Dask
        ("600000", 8, "many", 6),
        ("max", 2, None, 2),
    ],
)
def test_cores_are_the_least_of_quota_affinity_and_the_engines_number(
    monkeypatch, groups, quota, affinity, engine, count
):
    groups("0::/", {"cpu.max": f"{quota} 100000"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    monkeypatch.delenv("DDLF_CORES", raising=False)
    if engine is not None:
        monkeypatch.setenv("DDLF_CORES", engine)
    assert machine.cores() == count


def test_pytorch_of_a_template_gets_the_number_of_threads(monkeypatch):
    counts = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=counts.append))
    for name in machine.THREADS:
        monkeypatch.setenv(name, "7")
    assert set_threads(3) == 3
    assert counts == [3]
    assert {os.environ[name] for name in machine.THREADS} == {"3"}


def test_bytes_from_swap_are_counted_if_the_process_has_waited_for_pages(monkeypatch):
    waits, swapped = 5, 4096
    monkeypatch.setattr(machine, "_page_waits", lambda: waits)
    monkeypatch.setattr(machine, "_swapped_in", lambda: swapped)
    meter = machine.SwapMeter()
    swapped = 3 * 4096
    assert meter.swapped_bytes() == 0  # another program has read these pages
    waits = 6
    assert meter.swapped_bytes() == 2 * 4096
    assert meter.swapped_bytes() == 0


def test_the_counters_of_swap_are_numbers_on_every_system():
    assert machine._page_waits() >= 0
    assert machine._swapped_in() >= 0
