"""Tests of Downpour in which each replica is a group of workers, and each worker has a part of the model."""

from itertools import pairwise

import pytest

from ddlf import Cluster
from ddlf.algorithms.flat_weights import Rows
from ddlf.errors import ConfigError
from ddlf.events import Committed, PartTrained, WorkerLost
from ddlf.training.strategies.downpour.groups import check_plan, joined, shards_of
from tests.training.models import app, distance
from tests.training.split.test_layer_plan import dense, plan_of
from tests.training.split.test_parts import attention
from tests.training.split.test_split import Cut
from tests.training.split.together import build_model
from tests.training.test_failures import kill_executor
from tests.training.test_resume import Interrupted, stop_after

pytestmark = pytest.mark.asyncio(loop_scope="session")

PUSHES = dict(mode="downpour", push_rule="sgd:0.05", micro_batches=1)


class Plain(Cut):
    """Steps of SGD without momentum, so that a shard takes the steps of ``fit``."""

    async def create_model(self):
        self.model = dense_model()


def dense_model():
    import keras

    layers = keras.layers
    hidden = [layers.Dense(16, activation="tanh"), layers.BatchNormalization(), layers.Dense(8, activation="tanh")]
    model = keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(4, activation="softmax")])
    model.compile(keras.optimizers.SGD(0.05), "categorical_crossentropy", metrics=["accuracy"])
    return model


def rows_of(model):
    return Rows.of(model.get_weights(), [True] * len(model.weights))


async def test_no_server_has_layers_of_two_parts():
    model = dense(6, 60, 6)
    plan, rows = plan_of(model, "layers:d2"), rows_of(model)
    ends = [(8 + 1) * 6 + (6 + 1) * 60, rows.sizes[0]]
    (first,), (second,) = shards_of(rows, plan, 2, None)
    assert [first[0], second[0]] == [(0, ends[0]), (ends[0], ends[1])]
    parts = shards_of(rows, plan, 4, None)
    assert [len(part) for part in parts] == [2, 2]
    flat = [part for parts in parts for part, _ in parts]
    assert flat[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(flat))
    layers = [first.path.rpartition("/")[0] for first in model.weights]
    assert [first for (first, _) in shards_of(rows, plan, 3, layers)[0]] == [(0, 54), (54, ends[0])]
    with pytest.raises(ConfigError, match="shards=1 are fewer than the 2 parts"):
        shards_of(rows, plan, 1, None)


async def test_facts_of_parts_are_joined_to_facts_of_all_servers():
    assert joined([[3, 0, 11, 12, 21, 22], [3, 0, 13, 23]], 2) == [3, 0, 11, 12, 13, 21, 22, 23]
    assert joined([[3, 5, 6], [3, 7]], 1) == [3, 5, 6, 7]


async def test_cuts_that_share_weights_are_refused():
    with pytest.raises(ConfigError, match="is used in two parts, and mode='downpour' pushes each weight once"):
        check_plan(plan_of(build_model(attention), "stages:3"))
    check_plan(plan_of(dense(6, 4), "stages:2"))


@pytest.mark.slow
async def test_one_group_takes_the_steps_of_one_replica(two_workers):
    options = dict(PUSHES, master_epochs=2, slots=1, n_fetch=1, n_push=1)
    replica, group = (app(two_workers, Plain, **{**options, "split": split}) for split in (None, "stages:2"))
    replica.micro_batches = None
    await replica.train_model()
    await group.train_model()
    assert distance(group.model.get_weights(), replica.model.get_weights()) < 1e-6
    assert group.history[-1].metrics["loss"] == pytest.approx(replica.history[-1].metrics["loss"], rel=1e-5)
    assert [len(record.pushes) for record in group.history] == [7, 7]
    assert group.ledger.is_exact(2)


@pytest.mark.slow
async def test_a_lost_worker_costs_no_push_and_a_run_resumes(two_workers, tmp_path):
    options = dict(PUSHES, split="stages:2", master_epochs=4, n_push=2, n_fetch=2)
    lost = app(two_workers, Plain, checkpoint=tmp_path, **options)
    faults = {Committed: kill_executor(two_workers, 2)}
    lost.subscribe(lambda event: faults.pop(type(event), lambda: None)())
    with pytest.raises(Interrupted):
        await stop_after(lost, 2).train_model()
    assert not faults
    resumed = app(two_workers, Plain, checkpoint=tmp_path, resume="auto", **options)
    await resumed.train_model()
    assert [push[1] for record in resumed.history for push in record.pushes] == [0, 1, 2, 3] * 4
    assert resumed.ledger.is_exact(4)


@pytest.mark.slow
async def test_a_worker_lost_while_two_groups_train_costs_no_push(one_template):
    """A part of the second group is killed after the first of its six rounds. The first group may be in any round."""
    async with Cluster.local(4) as cluster:
        trained = app(cluster, Plain, **PUSHES, split="stages:2", slots=2, master_epochs=6, n_push=2, n_fetch=2)
        parts, received, killed = {}, [], []
        trained.subscribe(received.append)

        def lose(event):
            if type(event) is PartTrained:
                parts[event.slot] = event.worker
            if type(event) is Committed and event.record.slot == 2 and not killed:
                killed.append(parts[4])
                kill_executor(cluster, parts[4])()

        trained.subscribe(lose)
        await trained.train_model()
    assert any(type(event) is WorkerLost and event.worker in killed for event in received)
    assert trained.ledger.is_exact(6)
    for slot in (1, 2):
        records = [record for record in trained.history if record.slot == slot]
        pushes = [push[:2] for record in records for push in record.pushes]
        assert [number for _, number in pushes] == list(range(2)) * 6
    assert trained.history[-1].loss < trained.history[0].loss


class Looking(Plain):
    """Asks each worker for its connections after its group's first round."""

    async def on_round(self, record):
        role = self.run_context.name, "replica"
        self.connections = {worker.id: set(await worker.call(role, "connections")) for worker in self.cluster.workers}


@pytest.mark.slow
async def test_parts_connect_to_the_servers_of_their_layers_only(one_template):
    async with Cluster.local(4) as cluster:
        trained, parts = app(cluster, Looking, **PUSHES, split="stages:2", slots=2, shards=2, copies=0), {}
        trained.master_epochs = 2
        trained.subscribe(
            lambda event: parts.update({event.slot: event.worker}) if type(event) is PartTrained else None
        )
        await trained.train_model()
    workers = [parts[slot] for slot in (1, 2, 3, 4)]
    owners = {0: 1, 1: 2}  # the first two workers have the shards
    planned = {frozenset(workers[:2]), frozenset(workers[2:])}
    planned |= {frozenset((worker, owners[number % 2])) for number, worker in enumerate(workers)}
    connected = {frozenset((worker, peer)) for worker, peers in trained.connections.items() for peer in peers}
    assert connected == {pair for pair in planned if len(pair) == 2}
    assert trained.ledger.is_exact(2)


@pytest.mark.slow
async def test_settings_without_effect_are_refused(two_workers):
    for options, message in (
        ({"split": "within:2"}, "a server has whole layers of a part"),
        ({"split": "stages:1", "slots": 1, "replicas": 3}, "a slot is a group of workers that carries one replica"),
    ):
        with pytest.raises(ConfigError, match=message):
            await app(two_workers, Plain, mode="downpour", **options).train_model()
