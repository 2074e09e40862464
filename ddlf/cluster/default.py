"""The cluster of an app that does not name one. Runs on the master."""

from __future__ import annotations

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.config.addresses import find_config


def default_cluster() -> Cluster:
    """Return the cluster of the configuration file if one exists, else two workers on this machine."""
    path = find_config()
    return Cluster.from_config(path) if path is not None else Cluster.local(2)
