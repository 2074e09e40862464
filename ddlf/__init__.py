"""Train unchanged Keras 3 models on the machines you already have, and run any Python code on them.

Importing this package is cheap: it loads each name, and the modules behind it, at the first use of the name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddlf.version import __version__ as __version__

if TYPE_CHECKING:
    from ddlf.app import IApp as IApp
    from ddlf.cli.script import main as main
    from ddlf.cli.script import run as run
    from ddlf.cluster.cluster import Cluster as Cluster
    from ddlf.cluster.config.cluster_file import read_config as read_config
    from ddlf.cluster.pool.executor import Pool as Pool
    from ddlf.cluster.proxy import ProxyWorker as ProxyWorker
    from ddlf.data.datasets import load_cifar10 as load_cifar10
    from ddlf.data.datasets import load_digits as load_digits
    from ddlf.data.datasets import load_mnist as load_mnist
    from ddlf.errors import DDLFError as DDLFError
    from ddlf.errors import ExecutorCrashed as ExecutorCrashed
    from ddlf.errors import LeaseError as LeaseError
    from ddlf.errors import RemoteError as RemoteError
    from ddlf.errors import RequestTimeout as RequestTimeout
    from ddlf.errors import WorkerLost as WorkerLost
    from ddlf.extras.text.training.notation import load_notation as load_notation
    from ddlf.rpc.iworker import IWorker as IWorker
    from ddlf.rpc.messages import Request as Request
    from ddlf.rpc.messages import Response as Response
    from ddlf.training.exchanges.gradient.settings import Gradient as Gradient
    from ddlf.training.exchanges.sharded.auto import Auto as Auto
    from ddlf.training.exchanges.sharded.settings import Sharded as Sharded
    from ddlf.training.exchanges.split.settings import Split as Split
    from ddlf.training.exchanges.star import Star as Star
    from ddlf.training.spec import Checkpoint as Checkpoint
    from ddlf.training.spec import Data as Data
    from ddlf.training.spec import Evaluation as Evaluation
    from ddlf.training.spec import Local as Local
    from ddlf.training.spec import Output as Output
    from ddlf.training.strategies.asynchronous.settings import Async as Async
    from ddlf.training.strategies.downpour.strategy import Downpour as Downpour
    from ddlf.training.strategies.lbfgs.settings import LBFGS as LBFGS
    from ddlf.training.strategies.sync.settings import Sync as Sync
    from ddlf.training.strategy import Exchange as Exchange
    from ddlf.worker.calls import concurrent as concurrent
    from ddlf.worker.worker import Worker as Worker

_HOMES = {
    "ddlf.app": ("IApp",),
    "ddlf.cluster.cluster": ("Cluster",),
    "ddlf.cluster.proxy": ("ProxyWorker",),
    "ddlf.cluster.config.cluster_file": ("read_config",),
    "ddlf.errors": ("DDLFError", "ExecutorCrashed", "LeaseError", "RemoteError", "RequestTimeout", "WorkerLost"),
    "ddlf.rpc.iworker": ("IWorker",),
    "ddlf.cluster.pool.executor": ("Pool",),
    "ddlf.cli.script": ("main", "run"),
    "ddlf.extras.text.training.notation": ("load_notation",),
    "ddlf.rpc.messages": ("Request", "Response"),
    "ddlf.data.datasets": ("load_cifar10", "load_digits", "load_mnist"),
    "ddlf.training.exchanges.gradient.settings": ("Gradient",),
    "ddlf.training.exchanges.sharded.auto": ("Auto",),
    "ddlf.training.exchanges.sharded.settings": ("Sharded",),
    "ddlf.training.exchanges.split.settings": ("Split",),
    "ddlf.training.exchanges.star": ("Star",),
    "ddlf.training.spec": ("Checkpoint", "Data", "Evaluation", "Local", "Output"),
    "ddlf.training.strategies.asynchronous.settings": ("Async",),
    "ddlf.training.strategies.downpour.strategy": ("Downpour",),
    "ddlf.training.strategies.lbfgs.settings": ("LBFGS",),
    "ddlf.training.strategies.sync.settings": ("Sync",),
    "ddlf.training.strategy": ("Exchange",),
    "ddlf.worker.calls": ("concurrent",),
    "ddlf.worker.worker": ("Worker",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'ddlf' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("ddlf.extras."):
            raise
        raise AttributeError(f"module 'ddlf' has no attribute {name!r}: {error.name} is not installed") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
