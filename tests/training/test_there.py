"""Weights that are on workers: who evaluates them. No process, no Keras."""

from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.data.parts import content_of
from ddlf.errors import AppError, WorkerLost
from ddlf.testing import FakeRun
from ddlf.training.exchanges.members import WeightsThere
from ddlf.training.opening import _check_models
from ddlf.training.rounds import Elsewhere

DATA = {"x_test": np.arange(6.0), "y_test": np.arange(6), "x_val": np.ones(3)}


def there_of(*proxies):
    crew = SimpleNamespace(member=lambda number: (proxies[number - 1], 0))
    cluster = SimpleNamespace(workers=[SimpleNamespace(id=number + 1) for number in range(len(proxies))])
    return WeightsThere("run", crew, cluster, [])


class Proxy:
    """A worker that says who it is, or is lost."""

    def __init__(self, answer, asked):
        self.answer, self.asked = answer, asked

    async def call(self, role, *arguments):
        self.asked.append(arguments)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_the_first_that_is_there_evaluates_with_the_masters_data_named_by_content():
    asked = []
    there = there_of(Proxy(WorkerLost("gone"), asked), Proxy({"loss": 2.0}, asked), Proxy({"loss": 3.0}, asked))
    app = SimpleNamespace(precision="float32", **DATA)
    assert await there.evaluated([(9, 0), (1, 0), (2, 0), (3, 0)], 7, app, "test", 64) == {"loss": 2.0}
    assert asked == [("evaluate", 7, "test", 64, content_of(app, "test"))] * 2
    assert asked[0][-1].keys() == {"x_test", "y_test"}


async def test_other_data_is_named_by_another_content():
    asked = []
    there = there_of(Proxy({"loss": 2.0}, asked))
    app = SimpleNamespace(precision="float32", **DATA)
    for data in (np.arange(6.0), np.arange(1.0, 7.0)):
        app.x_test = data
        await there.evaluated([(1, 0)], 7, app, "test")
    assert asked[0] != asked[1]


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
async def test_workers_that_compute_with_fewer_bits_are_not_asked(precision):
    asked = []
    app = SimpleNamespace(precision=precision, **DATA)
    assert await there_of(Proxy({"loss": 2.0}, asked)).evaluated([(1, 0)], 7, app, "val") is None
    assert asked == []


async def test_the_model_of_a_worker_that_comes_back_is_compared_while_the_weights_are_on_workers():
    run = FakeRun()
    facts = [(name, list(array.shape), str(array.dtype)) for name, array in run.start.items()]
    run._weights = Elsewhere(None, None)
    _check_models(run, {1: {"weights": facts}})
    with pytest.raises(AppError, match="create_model makes another model on worker 1"):
        _check_models(run, {1: {"weights": facts[:1]}})
    assert isinstance(run._weights, Elsewhere)


async def test_when_all_are_lost_nobody_has_evaluated_them():
    app = SimpleNamespace(precision="auto", **DATA)
    assert await there_of(Proxy(WorkerLost("gone"), [])).evaluated([(1, 0)], 7, app, "val") is None
