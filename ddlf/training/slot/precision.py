"""Precision of a model's computation. Runs on workers. Weights stay float32 everywhere.

``mixed_bfloat16`` and ``mixed_float16`` are Keras's dtype policies, set before the user's ``create_model`` runs.
``auto`` keeps float32, and measures how much faster bfloat16 would be: many processors have matrix units for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddlf.training.roles import import_keras

PROBE_SIZE = 512
PROBE_S = 0.1
LEAST_TURNS = 4
"""Minimum number of counted turns for each type, however long they take."""
MOST = 32.0
"""Largest credible ratio. Matrix units have 16 times the products of vector units (AMX beside AVX-512, tensor cores
beside CUDA's). A ratio above twice that is a measurement error."""


def set_precision(name: str) -> None:
    """Set Keras's dtype policy for later layers, on this thread."""
    import_keras()
    import keras

    keras.config.set_dtype_policy("float32" if name == "auto" else name)


def gain_of_bfloat16() -> float:
    """Return how many times faster matrix products are in bfloat16 than in float32; 0 if this cannot be measured.

    The probe takes about a tenth of a second. A whole model gains less, because it computes more than matrix products.
    """
    import keras

    def product(dtype: str) -> Callable[[], object]:
        x = keras.ops.ones((PROBE_SIZE, PROBE_SIZE), dtype)
        # Read one number, so that a backend which computes in the background has to finish.
        return lambda: keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.matmul(x, x)[0, 0], "float32"))

    return times_as_fast(product("bfloat16"), product("float32"))


def times_as_fast(
    one: Callable[[], object], other: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return how many times faster one piece of work is than another, by their quickest turns; 0 if it is unclear.

    The quickest turn shows the ability of the processor, in spite of its other work. Turns alternate, so that other
    work slows both. The first turns do not count, because kernels are chosen and threads start in them. On a busy
    machine the ratio would measure the other work. So the result is 0 if the second quickest turn is more than twice
    the quickest, or if the ratio exceeds any processor's.

    Args:
        one: The work.
        other: The work to compare with.
        clock: Returns seconds.
    """
    took: tuple[list[float], list[float]] = [], []
    end = clock() + PROBE_S
    while clock() < end or len(took[0]) <= LEAST_TURNS:
        for work, times in zip((one, other), took, strict=True):
            begin = clock()
            work()
            times.append(clock() - begin)
    quickest = [sorted(times[1:])[:2] for times in took]
    if any(second > 2 * first for first, second in quickest):
        return 0.0
    ratio = quickest[1][0] / max(quickest[0][0], 1e-9)
    return ratio if ratio <= MOST else 0.0
