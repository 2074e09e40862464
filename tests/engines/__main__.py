"""Run the tests with real engines, one engine after another: ``scripts/test --engines [ENGINE...] [-- PYTEST...]``.

    python -m tests.engines               all engines
    python -m tests.engines ray spark     two of them
    python -m tests.engines ray -- -x     with arguments for pytest

A missing engine counts as a failure, with a sentence that says how to install it. The Python packages of an engine may be
in another environment, which also needs DDLF's test packages: DDLF_RAY_PYTHON=/path/to/python, and so on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.engines.needs import NEEDS, PATH, Needs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def main(arguments: Sequence[str]) -> int:
    """Run the tests of the named engines, or of all. Return 1 if an engine is missing or a test has failed."""
    words = list(arguments)
    names, rest = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    if unknown := [name for name in names if name not in NEEDS]:
        print(f"there is no engine {unknown[0]}; there are: {', '.join(NEEDS)}", file=sys.stderr)
        return 2
    results = {name: run(NEEDS[name], rest) for name in names or NEEDS}
    print("\n".join(f"{name:<12}{result}" for name, result in results.items()), flush=True)
    return int(any(not result.startswith("passed") for result in results.values()))


def run(needs: Needs, options: Sequence[str]) -> str:
    """Run the tests of one engine, and return the result in words."""
    if missing := needs.missing():
        return f"missing: {missing}"
    start = time.monotonic()
    done = subprocess.run(
        [needs.python, "-m", "pytest", "-p", "no:anyio", *options, str(HERE / f"test_{needs.engine}.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": PATH, "DDLF_ENGINES": "1"},
        cwd=ROOT,
        check=False,
    )
    seconds = f"{time.monotonic() - start:.0f} s"
    return f"failed, exit code {done.returncode}, {seconds}" if done.returncode else f"passed, {seconds}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
