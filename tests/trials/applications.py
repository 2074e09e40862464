"""Convert thirteen models of ``keras.applications`` to text and back: configs and bits of weights must be the same.

python -m tests.trials.applications [NAME ...]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path


def main(names: list[str]) -> int:
    from tests.extras.text.conversion import zoo
    from tests.extras.text.conversion.test_describe import comes_back

    for name in names or zoo.APPLICATIONS:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            text = comes_back(name, Path(folder))
        print(f"{name:<18}{text.count(chr(10)):>6} lines {time.perf_counter() - began:>6.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
