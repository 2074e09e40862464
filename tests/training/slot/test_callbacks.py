"""Tests of the state of callbacks, which travels as data. Callbacks here are objects with attributes, without Keras."""

import pickle
import threading

import numpy as np
import pytest

from ddlf.errors import AppError
from ddlf.training.callbacks.states import CallbackStates, check_of_workers


class Counts:
    def __init__(self, **attributes):
        self.model, self.params = object(), {"epochs": 3}
        self.best, self.entries, self.at, self.schedule = None, set(), {}, len
        vars(self).update(attributes)


class Other(Counts):
    pass


def moved(state):
    """Return the value as it arrives on another machine."""
    return pickle.loads(pickle.dumps(state))


def test_changed_state_is_restored_in_equal_callbacks_with_its_types():
    first, second = [Counts(), Other(), Counts()], [Counts(), Other(), Counts()]
    source, target = CallbackStates(first), CallbackStates(second)
    first[0].best, first[0].weights = 1.5, [np.arange(3000, dtype=np.float32), np.float64(2)]
    first[2].entries |= {1, (2, "x")}
    first[2].at["a"] = np.int64(3)
    assert target.write(moved(source.read())) == []
    assert second[0].best == 1.5
    assert second[0].weights[0].dtype == np.float32
    assert np.array_equal(second[0].weights[0], first[0].weights[0])
    second[0].weights[0] += 1  # the array is writable, and is not shared with the state
    assert first[0].weights[0][0] == 0
    assert (second[2].entries, second[2].at) == ({1, (2, "x")}, {"a": 3})
    assert second[1].best is None
    assert target.write(moved(source.read())) == []


def test_unchanged_state_does_not_travel_and_reset_restores_it():
    callback = Counts(large=np.zeros(10**6))
    states = CallbackStates([callback])
    assert sum(part.nbytes for part in states.read()) < 100
    callback.large[5] = 1
    callback.more = [1]
    saved = states.read()
    assert sum(part.nbytes for part in saved) > 8 * 10**6
    states.reset()
    assert callback.large[5] == 0
    assert not hasattr(callback, "more")
    states.write(saved)
    assert callback.large[5] == 1
    assert callback.more == [1]


def test_the_direction_of_a_monitored_value_is_determined_again():
    callback, restored = (Counts(monitor_op=None, min_delta=0.1) for _ in range(2))
    states, other_states = CallbackStates([callback]), CallbackStates([restored])
    callback.monitor_op, callback.min_delta, callback.best = min, -0.1, 3.0
    other_states.write(moved(states.read()))
    assert (restored.monitor_op, restored.min_delta, restored.best) == (None, 0.1, 3.0)


def test_state_of_a_missing_callback_is_refused_by_name():
    assert CallbackStates([Counts()]).write(CallbackStates([Other()]).read()) == ["Other"]


def test_state_that_cannot_move_with_a_slot_is_refused_by_name():
    with pytest.raises(
        AppError, match="Counts in worker_callbacks keeps a lock in 'best', which cannot move with a slot"
    ):
        CallbackStates([Counts(best=threading.Lock())]).checked()
    CallbackStates([Counts(what=len, module=pickle, kind=Counts)]).checked()


def test_an_object_that_fit_cannot_call_is_refused_by_name():
    class Called(Counts):
        def set_model(self, model):
            pass

    check_of_workers([Called()])
    for callbacks, sentence in (
        ([object()], "worker_callbacks has a object, which is not a Keras callback"),
        ([Called(), Called], r"worker_callbacks has the class Called; write Called\(\)"),
    ):
        with pytest.raises(AppError, match=sentence):
            check_of_workers(callbacks)
