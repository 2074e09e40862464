"""Tools for testing your apps and rules: faulty clusters, planned faults, a bad network, and runs without Keras.

A name is imported when it is first used. ``docs/howto/testing.md`` has examples.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddlf.testing.cluster import FaultyCluster as FaultyCluster
    from ddlf.testing.cluster import Machine as Machine
    from ddlf.testing.fake_run import FakeCluster as FakeCluster
    from ddlf.testing.fake_run import FakeRun as FakeRun
    from ddlf.testing.fake_run import FakeWorker as FakeWorker
    from ddlf.testing.in_process import in_process_cluster as in_process_cluster
    from ddlf.testing.local import local_cluster as local_cluster
    from ddlf.testing.network import Fault as Fault
    from ddlf.testing.network import FaultProxy as FaultProxy
    from ddlf.testing.plan import FaultPlan as FaultPlan
    from ddlf.testing.plan import Injection as Injection
    from ddlf.testing.store import FaultyStore as FaultyStore

_HOME = {
    "FakeCluster": "fake_run",
    "FakeRun": "fake_run",
    "FakeWorker": "fake_run",
    "Fault": "network",
    "FaultPlan": "plan",
    "FaultProxy": "network",
    "FaultyCluster": "cluster",
    "FaultyStore": "store",
    "Injection": "plan",
    "Machine": "cluster",
    "in_process_cluster": "in_process",
    "local_cluster": "local",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'ddlf.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ddlf.testing.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
