"""Tests of several copies of a model in parts: they take the steps of one process with all samples."""

import pytest

from ddlf.errors import ConfigError
from ddlf.training.exchanges.split.settings import check_workers
from tests.training.models import blobs, distance
from tests.training.split.test_layer_plan import dense, plan_of
from tests.training.split.test_parts import DIGITS, IMAGES, batches_of, convolutions, layered
from tests.training.split.together import Parts, trained_replicas


def test_parts_of_later_replicas_own_nothing():
    model = dense(6, 4)
    plan = plan_of(model, "stages:2", replicas=2)
    assert [part.weights for part in plan.parts] == [(0, 1), (2, 3), (), ()]
    assert [part.borrows for part in plan.parts] == [(), (), ((0, 0), (1, 0)), ((2, 1), (3, 1))]
    assert plan.parts[1].lends == ((2, (3,)), (3, (3,)))
    assert [plan.stage(part) for part in range(4)] == [0, 1, 0, 1]
    assert plan.ends == [1, 2]
    assert plan.describe().startswith("2 replicas of 2 parts, 1 micro-batch")
    of_slot = plan_of(model, "stages:2")  # a plan for slots that do not wait for each other
    assert of_slot.describe(3).startswith("3 replicas of 2 parts, 1 micro-batch")
    with pytest.raises(ConfigError, match="makes 4 parts of this model in 2 slots, and there are 3 workers"):
        check_workers("stages:2", plan, 3)


def test_the_number_of_steps_comes_from_the_first_part_that_steps():
    import keras

    layers = [keras.Input((8,)), keras.layers.Flatten(), keras.layers.Dense(4, name="d0"), keras.layers.Dense(4)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    plan = plan_of(model, "layers:d0", replicas=2)
    steps = [plan.optimizer.weight_of.index(None) in plan.writes(part) for part in plan.parts]
    assert steps == [False, True, False, False]


def test_parts_of_two_replicas_call_only_parts_that_they_exchange_arrays_with():
    plan = plan_of(dense(6, 4), "stages:2", replicas=2)
    pairs = {frozenset(pair) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))}
    assert plan.links() == pairs
    assert [plan.following(part) for part in range(4)] == [1, 0, 3, 2]
    clipped = dense(6, 4)
    clipped.optimizer.global_clipnorm = 1.0
    assert plan_of(clipped, "stages:2", replicas=2).links() == pairs
    assert plan_of(dense(6, 4), "stages:1", replicas=3).following(2) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "batches", "split", "tolerance"),
    [
        (layered, batches_of(*blobs(44), 16), "stages:2", 1e-6),
        (convolutions, batches_of(IMAGES, DIGITS, 16), "within:2", 1e-4),
    ],
    ids=["stages", "within"],
)
def test_two_replicas_take_the_steps_of_one_process_with_the_samples_of_both(build, batches, split, tolerance):
    parts = Parts(build, split, 16, 2, replicas=2)
    steps = []
    for number in range(2):
        # The second replica begins without samples.
        first, second = batches[number], tuple(a[: 5 * number] for a in batches[2])
        steps.append(([first, second], [(0, number), (0, number, 1)]))
        parts.train_replicas(*steps[-1])
    assert distance(parts.weights(), trained_replicas(build, steps, 2)) < tolerance
