"""Check that stabilisers and the operators of model texts, with their gradients, work on JAX as on TensorFlow.

python -m tests.trials.on_jax
"""

from __future__ import annotations

import os
import subprocess
import sys

PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
OPERATORS = "from tests.extras.text.conversion.cases import main; main(every={})"


def run(*arguments: str) -> bool:
    """Run Python with Keras on JAX; returns whether it went well. What XLA makes faster takes it longer than the tests."""
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.run([sys.executable, *arguments], env=environment).returncode == 0


def stabilisers(some: str = "not run") -> bool:
    """Run tests of stabilisers, some of them as pytest's ``-k`` has it; by default all but those of whole runs that are cut."""
    return run(*PYTEST, "tests/extras/stabilisers", "-k", some)


def operators(every: int = 1) -> bool:
    """Hold all operators against NumPy, and of every so many the gradient against central differences."""
    return run("-c", OPERATORS.format(every))


def main() -> int:
    return 0 if all([stabilisers(), operators()]) else 1


if __name__ == "__main__":
    sys.exit(main())
