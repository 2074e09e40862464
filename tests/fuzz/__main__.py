"""Give a target the inputs of atheris, a fuzzer that is guided by coverage and uses libFuzzer. ``scripts/fuzz`` installs it.

    python -m tests.fuzz frames|handshake [--runs 1000000] [--keep]

It begins with the committed corpus. The exit code is 1 when an input breaks a promise, takes over 10 s or makes the process
grow beyond 2 GB. A file ``crash-...``, ``timeout-...`` or ``oom-...`` then has this input. A leak is a failure, too: the
command counts Python's blocks of memory and open descriptors after a tenth of the runs and at the end. With ``--keep`` it
replaces the corpus by the smallest set of inputs with the same coverage.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
"""The folder of the corpus. It has one file for each target, with each input as a line of hexadecimal digits."""
MAX_BYTES = 1024
ITSELF = "DDLF_FUZZ"
"""Environment variable with the path of a script that restarts libFuzzer, which needs it to merge inputs."""
LEAK_BLOCKS = 2000
"""Allowed growth in blocks of memory, because caches of the interpreter still grow after a tenth of the runs."""


def corpus(target: str) -> list[bytes]:
    """Return the committed inputs of a target."""
    return [bytes.fromhex(line) for line in (CORPUS / f"{target}.hex").read_text().splitlines()]


def fuzz(target: str, runs: int, arguments: list[str]) -> None:
    """Run libFuzzer. It ends the process."""
    import atheris

    with atheris.instrument_imports(include=["ddlf.rpc", "ddlf.errors"]):
        from tests.fuzz.targets import TARGETS
    count = blocks = descriptors = 0

    def run_input(data: bytes) -> None:
        nonlocal count, blocks, descriptors
        TARGETS[target](data)
        count += 1
        if count in (runs // 10, runs):
            gc.collect()
            grown, opened = sys.getallocatedblocks() - blocks, len(os.listdir("/proc/self/fd")) - descriptors
            blocks, descriptors = blocks + grown, descriptors + opened
            if count == runs:
                print(f"{count:,} inputs; since a tenth of them {grown:+,} blocks of memory, {opened:+} descriptors")
                assert grown < LEAK_BLOCKS, "memory leaks"
                assert opened <= 0, "descriptors leak"

    atheris.Setup([os.environ[ITSELF], f"-max_len={MAX_BYTES}", "-timeout=10", *arguments], run_input)
    atheris.Fuzz()


def main() -> int:
    """Run the fuzzer in a child process, because libFuzzer ends its process, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=sorted(path.stem for path in CORPUS.iterdir()))
    parser.add_argument("--runs", type=int, default=1_000_000)
    parser.add_argument("--keep", action="store_true", help="replace the corpus by the inputs of this run")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        fuzz(options.target, options.runs, options.child)
    with tempfile.TemporaryDirectory() as name:
        starting, merged, itself = Path(name, "found"), Path(name, "kept"), Path(name, "itself")
        for folder in (starting, merged):
            folder.mkdir()
        for number, data in enumerate(corpus(options.target)):
            (starting / str(number)).write_bytes(data)
        command = [sys.executable, "-m", "tests.fuzz", options.target, "--runs", str(options.runs), "--child"]
        itself.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        itself.chmod(0o700)
        environment = {**os.environ, ITSELF: str(itself)}
        code = subprocess.run([itself, f"-atheris_runs={options.runs}", starting], env=environment).returncode
        print(f"{options.target}: {'something' if code else 'nothing'} broke")
        if options.keep and not code:
            subprocess.run([itself, "-merge=1", merged, starting], env=environment, check=True)
            inputs = sorted((path.read_bytes() for path in merged.iterdir()), key=lambda data: (len(data), data))
            (CORPUS / f"{options.target}.hex").write_text("".join(f"{data.hex()}\n" for data in inputs))
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main())
