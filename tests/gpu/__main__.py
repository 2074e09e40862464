"""Run the tests with a real card, one backend after another: ``scripts/test --gpu [BACKEND...] [-- PYTEST...]``.

    python -m tests.gpu                 all backends
    python -m tests.gpu jax torch       two of them
    python -m tests.gpu jax -- -x       with arguments for pytest

Without a card, and without a framework that can compute on it, the command fails with one sentence.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddlf.worker.assignment import GROWING
from tests.gpu.needs import BACKENDS, NoCard, first_card, missing

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def main(arguments: Sequence[str]) -> int:
    """Run the tests with the named backends, or with all. Return 1 if one is missing or a test has failed."""
    words = list(arguments)
    names, rest = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    if unknown := [name for name in names if name not in BACKENDS]:
        print(f"Keras has no backend {unknown[0]} for cards; there are: {', '.join(BACKENDS)}", file=sys.stderr)
        return 2
    try:
        print(f"card {first_card()}", flush=True)
    except NoCard as error:
        print(error, file=sys.stderr)
        return 1
    results = {name: run(name, rest) for name in names or BACKENDS}
    print("\n".join(f"{name:<12}{result}" for name, result in results.items()), flush=True)
    return int(any(not result.startswith("passed") for result in results.values()))


def run(backend: str, options: Sequence[str]) -> str:
    """Run the tests with one backend, and return the result in words."""
    if reason := missing(backend):
        return f"missing: {reason}"
    begin = time.monotonic()
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:anyio", *options, str(HERE)],
        env={**GROWING, **os.environ, "PYTHONPATH": paths, "KERAS_BACKEND": backend, "DDLF_GPU": "1"},
        cwd=ROOT,
        check=False,
    )
    seconds = f"{time.monotonic() - begin:.0f} s"
    return f"failed, exit code {done.returncode}, {seconds}" if done.returncode else f"passed, {seconds}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
