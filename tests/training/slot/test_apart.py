"""Tests of weights that each slot keeps for itself: local weights, global weights, and warnings about batch normalization."""

import numpy as np
import pytest

from ddlf.errors import ConfigError
from ddlf.events import Warned
from ddlf.testing import FakeCluster, FakeRun
from ddlf.training.slot.batchnorm import batch_norms

NORMS = frozenset(["layer/1"])


async def trained(workers=3, **settings):
    run = FakeRun(FakeCluster(workers), **{"norms": NORMS, "batchnorm": "local", "slots": 3, **settings})
    run.event_log = []
    run.subscribe(run.event_log.append)
    await run.train_model()
    return run


def tasks_of(run, number):
    tasks = [facts[0] for worker in run.cluster.workers for verb, *facts in worker.asked if verb == "train"]
    return {task.slot: task for task in tasks if task.round == number}


async def test_global_weights_are_the_mean_by_samples_of_local_ones():
    run = await trained(partition="power:1", master_epochs=3)
    counts = [len(task.indices) for _, task in sorted(tasks_of(run, 0).items())]
    local = [state["apart"][1] for state in run.run_context.progress.states]
    mean = sum(n * np.asarray(bias, "f8") for n, bias in zip(counts, local, strict=True)) / sum(counts)
    assert np.allclose(run.model.get_weights()[1], mean, rtol=0, atol=1e-6)  # updates travel as differences of float32
    assert not np.allclose(local[0], local[1], atol=1e-3)
    assert all(state["apart"][0] is None for state in run.run_context.progress.states)


async def test_outer_momentum_does_not_move_local_weights():
    plain, moved = await trained(learning_rate=0.01), await trained(learning_rate=0.01, outer="nesterov")
    local = [state["apart"][1] for state in moved.run_context.progress.states]
    assert np.allclose(moved.model.get_weights()[1], np.mean(local, axis=0), rtol=0, atol=1e-3)
    assert not np.array_equal(plain.model.get_weights()[0], moved.model.get_weights()[0])


async def test_keeping_weights_apart_changes_nothing_with_one_slot():
    local, averaged = await trained(slots=1), await trained(slots=1, batchnorm="averaged")
    for a, b in zip(local.model.get_weights(), averaged.model.get_weights(), strict=True):
        assert np.allclose(a, b, rtol=0, atol=1e-6)


async def test_a_model_without_batch_normalization_refuses_to_keep_it_apart():
    with pytest.raises(ConfigError, match="batchnorm='local' has no effect: the model has no layer that normalizes"):
        await trained(norms=frozenset())


LABELS = np.arange(203) % 7


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (dict(batch_size=16), ""),
        (dict(batch_size=15), "a slot's have 15 samples: statistics of fewer than 16 are noise"),
        (dict(batch_size=32, slots=13), "a slot's have 15 samples"),
        (dict(batch_size=32, partition="power:3"), "a slot's have 6 samples"),
        (dict(partition="dirichlet:1", y_train=LABELS), "batchnorm='local' keeps them apart"),
        (dict(partition="dirichlet:1", y_train=LABELS, batchnorm="local"), ""),
        (dict(batch_size=2, norms=frozenset()), ""),
    ],
    ids=str,
)
async def test_run_warns_of_batch_norm_with_small_batches_or_uneven_labels(settings, warning):
    run = await trained(**{"batchnorm": "averaged", "master_epochs": 1, **settings})
    reasons = [event.why for event in run.event_log if isinstance(event, Warned) and event.about == "model"]
    assert len(reasons) == bool(warning)
    assert warning in "".join(reasons)


def test_weights_of_a_layer_are_found_by_class_name_or_subclass():
    class BatchNormalization:
        def __init__(self, *weights):
            self.weights = weights

    class Own(BatchNormalization):
        pass

    class Model:
        weights = (a, b, c, d) = tuple(object() for _ in range(4))

        def _flatten_layers(self):
            return [Own(self.d, self.b), object()]

    assert batch_norms(Model()) == (1, 3)
