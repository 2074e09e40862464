"""Tests of the inbox of a part: which tensors it accepts."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.errors import BadUpdate, ProtocolError
from ddlf.training.exchanges.split.inbox import ACTIVATION, Inbox, Key, Stopped
from ddlf.training.exchanges.split.program import Value
from ddlf.training.exchanges.split.stage import expected
from tests.patience import PATIENCE_S

VALUE = np.ones((2, 3), "f4")
WORKERS = (5, 6, 7)
"""The worker of each part."""
SENDER = WORKERS[0]
KEY = Key(ACTIVATION, 0, 0, 7, 0)


def inbox(attempt=1):
    new_inbox = Inbox()
    new_inbox.begin(attempt, lambda key: key.number == 7 and key.micro_batch < 4, WORKERS)
    return new_inbox


def take(received, key=KEY):
    return received.take(key, (2, None), "float32", "dense")


def test_a_tensor_can_be_taken_once():
    tensors = inbox()
    tensors.put(1, KEY, VALUE, SENDER)
    assert take(tensors) is VALUE
    with pytest.raises(ProtocolError, match="came twice"):
        tensors.put(1, KEY, VALUE, SENDER)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        (KEY._replace(step=2), VALUE, "came in step 1"),
        (KEY._replace(number=8), VALUE, "does not receive"),
        (KEY._replace(micro_batch=4), VALUE, "does not receive"),
        (KEY, [1.0], "is not an array"),
    ],
)
def test_a_tensor_with_a_wrong_key_or_type_is_refused(key, value, sentence):
    with pytest.raises(ProtocolError, match=sentence):
        inbox().put(1, key, value, SENDER)


@pytest.mark.parametrize(
    "fields",
    [["activation"], ["activation", "x", 0, 7, 0], ["activation", 0, 0, 7, 0, 0], [1, 0, 0, 7, 0], "key", None],
)
def test_fields_that_form_no_key_are_refused(fields):
    with pytest.raises(ProtocolError, match="another worker sent an array under"):
        Key.read(fields)
    assert Key.read(list(KEY)) == KEY


@pytest.mark.parametrize("value", [np.ones((2, 3), "f8"), np.ones((3, 3), "f4"), np.ones(2, "f4")])
def test_another_shape_or_type_is_refused(value):
    tensors = inbox()
    tensors.put(1, KEY, value, SENDER)
    with pytest.raises(ProtocolError, match=r"instead of float32 of shape \(2, None\)"):
        take(tensors)


def test_nan_names_the_layer():
    tensors = inbox()
    tensors.put(1, KEY, VALUE * np.nan, SENDER)
    with pytest.raises(BadUpdate, match="outputs of the layer 'dense' contain NaN in micro-batch 1"):
        take(tensors)


def test_tensors_of_earlier_attempts_are_dropped_and_of_later_ones_kept_until_they_begin():
    tensors = inbox(attempt=2)
    tensors.put(1, KEY, VALUE, SENDER)
    tensors.put(3, KEY, VALUE, SENDER)
    tensors.begin(3, lambda key: True, WORKERS)
    assert take(tensors) is VALUE


@pytest.mark.parametrize(("worker", "name"), [(6, "worker 6"), (9, "worker 9"), (None, "this machine")])
def test_only_the_worker_of_the_sending_part_sends_its_tensors(worker, name):
    tensors = inbox()
    with pytest.raises(ProtocolError, match=f"came from {name}, but worker 5 has that part"):
        tensors.put(1, KEY, VALUE, worker)
    tensors.put(2, KEY, VALUE * 2, worker)  # the inbox does not know the workers of this attempt yet
    tensors.put(2, KEY, VALUE, SENDER)
    tensors.begin(2, lambda key: True, WORKERS)
    assert take(tensors) is VALUE


def test_tensors_of_the_next_step_may_arrive_early():
    tensors = inbox()
    tensors.put(1, KEY._replace(step=1), VALUE, SENDER)
    tensors.stepped()
    assert take(tensors, KEY._replace(step=1)) is VALUE
    with pytest.raises(ProtocolError, match="came in step 2"):
        tensors.put(1, KEY, VALUE, SENDER)


def test_a_waiting_thread_is_released_when_the_round_stops():
    tensors, ended = inbox(), threading.Event()

    def wait():
        with pytest.raises(Stopped):
            take(tensors)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    tensors.stop()
    assert ended.wait(PATIENCE_S)


@pytest.mark.parametrize(
    "key",
    [Key(ACTIVATION, 0, 0, 1, 2), Key(ACTIVATION, 0, 0, 1, 7), Key(ACTIVATION, 0, 4, 1, 0), Key("unknown", 0, 0, 1, 0)],
    ids=["of another part", "from outside the group", "of another micro-batch", "of an unknown kind"],
)
def test_a_tensor_that_no_part_of_the_group_sends_is_refused(key):
    me, value = SimpleNamespace(borrows=(), lends=()), Value((3,), "float32", "dense", 0, (1,), True)
    of_replica = dict(replica=lambda number: 0, parts_of_replica=3)
    program = SimpleNamespace(values=(None, value))
    plan = SimpleNamespace(parts=(None, me, None), micro_batches=4, program=program, **of_replica)
    tensors = Inbox()
    tensors.begin(1, expected(plan, 1), WORKERS)
    tensors.put(1, Key(ACTIVATION, 0, 0, 1, 0), VALUE, SENDER)
    with pytest.raises(ProtocolError, match="this part does not receive the"):
        tensors.put(1, key, VALUE, SENDER)
