"""The cluster of an app that names none. Runs on the master."""

from __future__ import annotations

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.config.addresses import find_config


def default_cluster() -> Cluster:
    """The cluster of the configuration if there is one, else two workers on this machine."""
    path = find_config()
    return Cluster.from_config(path) if path is not None else Cluster.local(2)
