"""Check that stabilisers, operators of model texts and gradients of these operators work on JAX like on TensorFlow.

python -m tests.trials.on_jax
"""

from __future__ import annotations

import os
import subprocess
import sys

PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
OPERATORS = "from tests.extras.text.conversion.cases import main; main(every={})"


def run(*arguments: str) -> bool:
    """Run Python with Keras on JAX, and return whether it succeeded. XLA's optimizations take longer than they save."""
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment).returncode == 0


def stabilisers(some: str = "not run") -> bool:
    """Run tests of stabilisers that pytest's ``-k`` selects, and return whether they passed. By default, skip whole runs."""
    return run(*PYTEST, "tests/extras/stabilisers", "-k", some)


def operators(every: int = 1) -> bool:
    """Compare all operators with NumPy, and the gradient of each ``every``-th operator with central differences."""
    return run("-c", OPERATORS.format(every))


def main() -> int:
    return 0 if all([stabilisers(), operators()]) else 1


if __name__ == "__main__":
    sys.exit(main())
