"""A real Ray with several nodes on this machine."""

import contextlib
import time
from unittest import mock

from tests.patience import PATIENCE_S

STORE = {"object_store_memory": 80 << 20}
"""The smallest object store that Ray accepts."""


def patient():
    """Return a patch that lets Ray wait longer for a new node: a busy machine can need more than Ray's limit of 30 s."""
    from ray._private import services

    ask = services.get_node

    def get_node(*args):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            with contextlib.suppress(RuntimeError):
                return ask(*args)
            time.sleep(0.1)
        return ask(*args)

    return mock.patch.object(services, "get_node", get_node)


class Nodes:
    """A Ray with a head node without CPUs, and some nodes of one CPU each. Its processes inherit the environment.

    Args:
        count: Number of nodes besides the head node.
    """

    def __init__(self, count):
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, **STORE}
        with patient():
            self.ray = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.add() for _ in range(count)]

    def add(self):
        with patient():
            return self.ray.add_node(num_cpus=1, **STORE)

    def remove(self, node_id):
        """Kill the processes of a node after starting another node as its replacement."""
        index = next(index for index, node in enumerate(self.nodes) if node.node_id == node_id)
        self.nodes.append(self.add())
        self.ray.remove_node(self.nodes.pop(index), allow_graceful=False)

    def drain(self, node_id, for_s):
        """Let Ray drain a node that ends after some seconds."""
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        end_ms = int((time.time() + for_s) * 1000)
        accepted, _ = GcsClient(address=self.ray.gcs_address).drain_node(node_id, reason, "a test", end_ms)
        assert accepted
