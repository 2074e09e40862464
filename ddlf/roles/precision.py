"""Numbers of fewer bits in a model's computation. Runs on workers; weights stay float32 everywhere.

``mixed_bfloat16`` and ``mixed_float16`` are Keras's own dtype policies, set before the user's ``create_model`` runs. ``auto`` stays with float32 and
measures what bfloat16 would gain on this processor: many have matrix units for it.
"""

from __future__ import annotations

import time

PROBE_SIZE = 512
PROBE_S = 0.25
WORTH_SAYING = 1.3


def set_precision(name: str) -> None:
    """Set Keras's dtype policy for the layers made from now on, on this thread."""
    import keras

    keras.config.set_dtype_policy("float32" if name == "auto" else name)


def gain_of_bfloat16() -> float:
    """How much faster matrix products are in bfloat16 than in float32 here, from a probe of about half a second.

    A whole model gains less, since not all of it is matrix products.
    """
    return _shortest("float32") / _shortest("bfloat16")


def _shortest(dtype: str) -> float:
    """Seconds of the quickest matrix product: what the processor can do, whatever else it did meanwhile."""
    import keras

    x = keras.ops.ones((PROBE_SIZE, PROBE_SIZE), dtype)
    shortest, end = float("inf"), time.perf_counter() + PROBE_S
    while time.perf_counter() < end or shortest == float("inf"):
        begin = time.perf_counter()
        # One number is read back, so that a backend which works in the background has done the work.
        keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.matmul(x, x)[0, 0], "float32"))
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest
