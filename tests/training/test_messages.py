"""Tests of the values of Downpour and L-BFGS that travel: other workers accept them as data, and the master as results."""

import numpy as np
import pytest

from ddlf.algorithms.push_rules import Last
from ddlf.rpc.messages import dumps, loads
from ddlf.training.slot.pushes import RoundPushes
from ddlf.training.strategies.downpour.client import FetchedRange, PartEntry, ReplicaEntry, Resumed
from ddlf.training.strategies.downpour.state import (
    Counters,
    ServerProgress,
    ServerSettings,
    ServerState,
    StoredState,
    Summary,
)
from ddlf.training.strategies.lbfgs.shards import NotReached
from ddlf.training.strategies.lbfgs.state import ShardState, StoredShard
from ddlf.worker.peers import refuse_between_workers

ROW = np.arange(3, dtype="f4")
SETTINGS = ServerSettings(part=(4, 7), rule="adagrad", staleness="inverse", collects=2, every=9)
COUNTERS = Counters(version=5, received=8, count=1, factors=0.5, last={0: Last(1), 3: Last(2, 0, 6, 7, 1)})
MESSAGES = [
    COUNTERS,
    ServerState(settings=SETTINGS, counters=COUNTERS, weights=ROW, rest=ROW[:1], rule_rows=[ROW, 2 * ROW]),
    StoredState(settings=SETTINGS, counters=COUNTERS, rest=(0, 1), names=["a", "b"], rule_rows=2),
    ReplicaEntry(replicas=[0, 3], all=6, life=2, alone=4),
    PartEntry(id=0, life=2, all=1, numbers=[3, 3, 4], epochs=[1, 1, 2], shards=[1, 2]),
    Resumed(last=(6, 7, 1), rollbacks=[(2, 5)]),
    Resumed(last=None, rollbacks=[]),
    ShardState(first=4, version=0, weights=ROW, gradient=None, s=[], y=[], history=5),
    ShardState(first=4, version=2, weights=ROW, gradient=-ROW, s=[ROW], y=[2 * ROW], history=5),
    StoredShard(first=4, end=7, version=2, history=5, names=["a", "b"], pairs=1, dtype="float32"),
]
RESULTS = [
    RoundPushes(pushes=[[0, 0, 1, 2]], fetches=[[0, 1]], lost=[(1, 2)], refused=1, unreached=2, reason="it is lost"),
    ServerProgress(shard=1, version=5, reached={3: (0, 6)}),
    Summary(COUNTERS, 2),
    NotReached(2, "it is lost", True),
]


def sent(value, *dump_object):
    return loads([bytearray(buffer) for buffer in dumps(value, *dump_object)])


@pytest.mark.parametrize("value", MESSAGES, ids=lambda value: type(value).__name__)
def test_message_is_data_for_another_worker_and_gives_the_same_value(value):
    received = type(value).from_message(sent(value.to_message(), refuse_between_workers))
    assert repr(received) == repr(value)


def test_fetched_range_is_data_for_another_worker():
    fetched = FetchedRange(ROW, ROW[:1], version=5, received=8, round=0, number=6, epoch=1, safe=7)
    assert repr(FetchedRange(*sent(list(fetched), refuse_between_workers))) == repr(fetched)


@pytest.mark.parametrize("value", RESULTS, ids=lambda value: type(value).__name__)
def test_master_receives_an_answer_as_the_same_value(value):
    assert sent(value) == value


def test_counters_of_all_servers_are_read_from_the_arrays_of_a_checkpoint():
    counters = [COUNTERS, Counters(), Counters(version=1, received=2, last={1: Last(1, 0, 1, 1, 0)})]
    arrays = Counters.to_arrays(counters)
    assert [array.shape for array in arrays] == [(3, 3), (3,), (3, 7)]
    assert [Counters.from_arrays(arrays, shard) for shard in range(3)] == counters
