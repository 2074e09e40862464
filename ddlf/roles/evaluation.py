"""The app's model, evaluated on its test or validation data. Runs where a model is: on the master, and on workers that have the weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ddlf.algorithms.reading import Portion
from ddlf.data.parts import batches, place_of
from ddlf.data.trees import first_array
from ddlf.roles.feed import Feed, make_feed
from ddlf.roles.file_feed import FileFeed
from ddlf.roles.metrics import scalars

EVALUATION_BATCH = 512
MOVED_EVERY_S = 0.5
"""How often it is told how far an evaluation is."""

Moved = Callable[[int], object]
"""Takes how many samples are evaluated."""


def evaluate(
    app: Any,
    weights: list[Any] | None,
    part: str = "test",
    batch_size: int = EVALUATION_BATCH,
    *,
    moved: Moved | None = None,
    callbacks: Any = None,
) -> dict[str, float]:
    """Evaluate the app's model on its test data, with the given weights or those that it has.

    Args:
        app: The user's ``IApp``.
        weights: One array for each of ``model.weights``, or None.
        part: ``"test"`` or ``"val"``.
        batch_size: Samples in a batch.
        moved: Told a few times a second, on any thread.
        callbacks: Keras's ``CallbackList`` of ``fit``, which is told instead, if there is one.
    """
    if weights is not None:
        app.model.set_weights(weights)
    feed = _feed(app, part, batch_size)
    telling = [] if moved is None else [_telling(moved, batch_size)]
    try:
        return scalars(app.model.evaluate(feed.dataset, verbose=0, return_dict=True, callbacks=callbacks or telling))
    except Exception:
        if isinstance(feed, FileFeed) and feed.error is not None:
            raise feed.error.with_traceback(None) from None
        raise
    finally:
        end_reading(app)


def end_reading(app: Any) -> None:
    """Have an evaluation read no more of partition files, if it does. Any thread may."""
    for *_, feed in app._feeds.values():
        if isinstance(feed, FileFeed):
            feed.end()


def _telling(moved: Moved, batch_size: int) -> Any:
    """A Keras callback that tells how far an evaluation is."""
    import keras

    class Telling(keras.callbacks.Callback):  # type: ignore[misc]
        async_safe = True  # the evaluation does not wait for it

        def __init__(self) -> None:
            super().__init__()
            self.told = time.monotonic()

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            if (now := time.monotonic()) - self.told >= MOVED_EVERY_S:
                self.told = now
                moved((batch + 1) * batch_size)

    return Telling()


def _feed(app: Any, part: str, batch_size: int) -> Feed | FileFeed:
    """One for each part is kept, as long as the data is the same: a new one costs memory that TensorFlow does not give back."""
    place = place_of(app, part)
    data = batches(app, part) if place is None else (place,)
    kept = app._feeds.get(part)
    if kept is None or kept[0] != batch_size or [id(item) for item in kept[1]] != [id(item) for item in data]:
        feed: Any = make_feed(data, batch_size) if place is None else FileFeed(app, part, batch_size)
        if place is None:
            feed.set_order(np.arange(len(first_array(data))))
        kept = batch_size, data, feed
        app._feeds = {**app._feeds, part: kept}
    if place is not None:
        kept[2].set_order(Portion(shuffle="none", seed=0, epoch=0, slots=1, start=0, stop=place.manifest.samples))
    return kept[2]  # type: ignore[no-any-return]
