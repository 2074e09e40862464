"""Apps whose workers have private data."""

from __future__ import annotations

import ddlf
from ddlf import events
from tests.training.models import blobs, small_model

SIZES = {1: 40, 2: 100, 3: 23}
"""Samples of each worker."""
MARK = 0.7310585786300049
"""A value that begins each private sample. No other number of a run has the same digits."""


def private_samples(number, samples=None):
    """Inputs and labels of a worker. The first value of each sample is the mark."""
    x, y = blobs(samples or SIZES[number], seed=10 + number)
    x[:, 0] = MARK
    return x, y


class Private(ddlf.IApp):
    """Each worker has different blobs, also for validation and test."""

    private = True
    verbose = False
    advice = "off"
    master_epochs = 5
    batch_size = 16
    learning_rate = 0.05

    async def load_dataset(self):
        number = self.worker.id
        self.x_train, self.y_train = private_samples(number)
        self.x_val, self.y_val = blobs(SIZES[number] // 2, seed=20 + number)
        self.x_test, self.y_test = blobs(SIZES[number] // 3, seed=30 + number)

    async def create_model(self):
        self.model = small_model(self.learning_rate)


def kill_in_round(cluster, app, worker, round):
    """Kill a worker when its slot begins a round. Return the events."""
    received = []

    def kill_on_start(event):
        received.append(event)
        lost = any(isinstance(earlier, events.WorkerLost) for earlier in received)
        if isinstance(event, events.SlotStarted) and (event.worker, event.round) == (worker, round) and not lost:
            cluster.machine(worker).kill()

    app.subscribe(kill_on_start)
    return received
