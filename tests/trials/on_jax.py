"""Check that stabilisers, operators of model texts and gradients of these operators work on JAX like on TensorFlow.

python -m tests.trials.on_jax
"""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import sys
import pytest
from tests.extras.text.conversion.cases import main

main(every={every})
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "tests/extras/stabilisers", "-k", {some!r}]))
"""


def checked(some: str = "not run", every: int = 1) -> bool:
    """Return whether operators and stabilisers passed their tests in one process with Keras on JAX.

    The process compares all operators with NumPy, and the gradient of each ``every``-th operator with central differences.

    Args:
        some: Selects tests of stabilisers, like pytest's ``-k``. By default, it skips whole runs.
        every: See above.
    """
    # XLA's optimizations take longer than they save.
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "-c", PROGRAM.format(some=some, every=every)]
    return subprocess.run(command, env=environment, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(0 if checked() else 1)
