"""Numbers of fewer bits in a model's computation. Runs on workers; weights stay float32 everywhere.

``mixed_bfloat16`` and ``mixed_float16`` are Keras's own dtype policies, set before the user's ``create_model`` runs. ``auto`` stays with float32 and
measures what bfloat16 would gain on this processor: many have matrix units for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ddlf.training.roles import import_keras

PROBE_SIZE = 512
PROBE_S = 0.1
LEAST_TURNS = 4
"""Of each type that count, however long they take."""
MOST = 32.0
"""Matrix units have 16 times the products of vector units (AMX beside AVX-512, tensor cores beside CUDA's); what is beyond twice that is no speed."""


def set_precision(name: str) -> None:
    """Set Keras's dtype policy for the layers made from now on, on this thread."""
    import_keras()
    import keras

    keras.config.set_dtype_policy("float32" if name == "auto" else name)


def gain_of_bfloat16() -> float:
    """How much faster matrix products are in bfloat16 than in float32 here, from a probe of about a tenth of a second; 0 if that cannot be measured.

    A whole model gains less, since not all of it is matrix products.
    """
    import keras

    def product(dtype: str) -> Callable[[], object]:
        x = keras.ops.ones((PROBE_SIZE, PROBE_SIZE), dtype)
        # One number is read back, so that a backend which works in the background has done the work.
        return lambda: keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.matmul(x, x)[0, 0], "float32"))

    return times_as_fast(product("bfloat16"), product("float32"))


def times_as_fast(
    one: Callable[[], object], other: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """How many times as fast one piece of work is as another, from their quickest turns; 0 where that is no answer.

    The quickest turn is what the processor can do, whatever else it did meanwhile; they alternate, so that this slows both. The first ones, in which
    kernels are chosen and threads begin, count for nothing. On a machine that has no time for one of the two, the ratio would say that, and not what
    the processor can do: if the second quickest turn is far from the quickest, or the ratio more than any processor's, nothing is said.

    Args:
        one: The work.
        other: What it is compared with.
        clock: In seconds.
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
