"""Tests of the check of senders: only workers of the group may send tensors to a part."""

import asyncio

import numpy as np
import pytest

from ddlf.cluster.introduce import introduce
from ddlf.errors import RemoteError
from ddlf.testing.in_process import in_process_cluster
from ddlf.training.exchanges.split.inbox import ACTIVATION, Inbox, Key
from ddlf.training.exchanges.split.replica import SplitReplica
from tests.patience import PATIENCE_S

RUN = "a-run"
KEY = Key(ACTIVATION, 0, 0, 7, 0)


class Part:
    """A role that receives like a part of a model. Worker 2 has part 1, and worker 1 has part 2."""

    receive = SplitReplica.receive

    def __init__(self, worker):
        self.worker = worker
        self._inbox = Inbox()
        self._inbox.begin(1, lambda key: True, [2, 1])

    async def send(self, peer, value):
        await self.worker.peers[peer].call((RUN, "part"), "receive", 1, list(KEY), value)

    async def take(self):
        return self._inbox.take(KEY, (2,), "float32", "dense")

    async def close(self):
        pass


async def test_a_worker_outside_the_group_cannot_send_a_tensor_of_a_part():
    part = RUN, "part"
    async with asyncio.timeout(PATIENCE_S), in_process_cluster(3) as cluster:
        first, second, third = cluster.workers
        await asyncio.gather(*(worker.call(part, "open", Part) for worker in cluster.workers))
        await introduce(cluster.workers, RUN)
        with pytest.raises(RemoteError, match="came from worker 3, but worker 2 has that part"):
            await third.call(part, "send", 1, np.zeros(2, "f4"))
        await second.call(part, "send", 1, np.ones(2, "f4"))
        assert (await first.call(part, "take")).tolist() == [1, 1]
