"""Replicas of the small apps, and tasks for them."""

from pkgutil import resolve_name

import numpy as np

from ddlf.algorithms.codec import CODEC
from ddlf.algorithms.encoding import decode_update, encode_update
from ddlf.data.array_cache import ArrayCache
from ddlf.errors import AppMissing
from ddlf.testing import FakeWorker
from ddlf.training.registry import EXCHANGE
from ddlf.training.slot.task import Task
from tests.training.models import Blobs, app


def replica_of(app_class=Blobs, **attributes):
    """The replica of a new app with these attributes, ready for tasks."""
    new_app = app(None, app_class, **attributes)
    replica = resolve_name(EXCHANGE.kind(new_app.exchange).role)(FakeWorker(2), new_app)
    replica.begin()
    replica.load_data({}, ArrayCache())
    replica.build()
    return replica


def task(replica, *, weights=None, indices=None, epochs=1, round=0, slot=0):
    """Return a task with the samples ``indices``, by default all."""
    weights = replica.app.model.get_weights() if weights is None else weights
    encoded, _ = encode_update(CODEC.read("float32"), weights, [False] * len(weights))
    return Task(
        slot=slot,
        round=round,
        slots=1,
        version=0,
        first_epoch=round * epochs,
        epochs=epochs,
        batch_size=16,
        seed=5,
        indices=np.arange(203, dtype=np.uint8) if indices is None else indices,
        weights={"delta": False, "encoded": encoded},
        codec="float32",
        keep=("optimizer",),
        back=("optimizer",),
        state=None if _has_state(replica, slot, round - 1) else {},
    )


def _has_state(replica, slot, round):
    try:
        return bool(replica.slots.state_after(slot, round))
    except AppMissing:
        return False


def arrays(reply, like):
    """Return the decoded update of a reply."""
    return decode_update(reply.update, like)


def traces(model) -> int:
    """How often TensorFlow has traced the model's compiled training step."""
    (function,) = [
        cell.cell_contents
        for cell in model.train_function.__closure__
        if hasattr(cell.cell_contents, "experimental_get_tracing_count")
    ]
    return function.experimental_get_tracing_count()
