"""Ends a process that a launcher has started: a command of an engine, ssh, or a worker. Runs on the master."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

STOP_S = 5.0
"""How long to wait for the end of a process, before it gets a stronger signal."""
LOOK_S = 0.2
STRONGER = (None, signal.SIGTERM, signal.SIGKILL)
"""First wait without a signal, because the process may end by itself."""


async def exit_code(process: asyncio.subprocess.Process) -> int:
    """Wait until a process ends. ``Process.wait`` also waits for others that have its output open, such as a jump host's."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None:
            await asyncio.wait({waiting}, timeout=LOOK_S)
        return process.returncode
    finally:
        waiting.cancel()


async def end(process: asyncio.subprocess.Process, *signals: signal.Signals | None, group: bool = False) -> None:
    """Wait until a process ends, and send it one stronger signal after the other.

    Args:
        process: The process.
        signals: The signals; None waits without one. By default ``STRONGER``.
        group: Whether all processes of its group get the signals, too.
    """
    for number in signals or STRONGER:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                if number is not None and group:
                    os.killpg(process.pid, number)
                elif number is not None:
                    process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await exit_code(process)
