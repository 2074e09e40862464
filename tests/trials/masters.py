"""Start the masters of a trial as forks of one process that has imported Keras, like executors are forks of a template.

Importing Keras takes seconds of processor time, and a trial that kills its master needs several masters.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Coroutine
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.trials.warm"])

Main = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]
"""The function of a master, in a module that its process can import. Its argument has the facts of the run."""


def start_master(main: Main, facts: dict[str, Any], output: Path) -> ForkServerProcess:
    """Start a process that runs a function with facts, in the environment of this process. It ends with this process.

    Args:
        main: The function.
        facts: Its argument.
        output: The file for the standard output of the process.
    """
    process = CONTEXT.Process(target=_run, args=(main, facts, dict(os.environ), output), daemon=True)
    process.start()
    return process


def end_master(process: ForkServerProcess) -> None:
    """Kill a master, and wait until it has ended."""
    process.kill()
    process.join()


def _run(main: Main, facts: dict[str, Any], environment: dict[str, str], output: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    np.random.seed()  # all masters would begin with the numbers of the process that they are forks of
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
    asyncio.run(main(facts))
