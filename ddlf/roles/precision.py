"""Numbers of fewer bits in a model's computation. Runs on workers; weights stay float32 everywhere.

``mixed_bfloat16`` and ``mixed_float16`` are Keras's own dtype policies, set before the user's ``create_model`` runs. ``auto`` stays with float32 and
measures what bfloat16 would gain on this processor: many have matrix units for it.
"""

from __future__ import annotations

import time

from ddlf.roles import import_keras

PROBE_SIZE = 512
PROBE_S = 0.1


def set_precision(name: str) -> None:
    """Set Keras's dtype policy for the layers made from now on, on this thread."""
    import_keras()
    import keras

    keras.config.set_dtype_policy("float32" if name == "auto" else name)


def gain_of_bfloat16() -> float:
    """How much faster matrix products are in bfloat16 than in float32 here, from a probe of about a tenth of a second.

    A whole model gains less, since not all of it is matrix products.
    """
    import keras

    matrices = {dtype: keras.ops.ones((PROBE_SIZE, PROBE_SIZE), dtype) for dtype in ("float32", "bfloat16")}
    # The quickest product is what the processor can do, whatever else it did meanwhile; in turns, so that this slows both.
    shortest = dict.fromkeys(matrices, float("inf"))
    end = time.perf_counter() + PROBE_S
    while time.perf_counter() < end or float("inf") in shortest.values():
        for dtype, x in matrices.items():
            begin = time.perf_counter()
            # One number is read back, so that a backend which works in the background has done the work.
            keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.matmul(x, x)[0, 0], "float32"))
            shortest[dtype] = min(shortest[dtype], time.perf_counter() - begin)
    return shortest["float32"] / shortest["bfloat16"]
