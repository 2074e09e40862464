"""What systemd wants to know from a service: that it is ready, and that it still lives. Runs in the daemon; does nothing elsewhere.

The protocol is that of sd_notify(3): one datagram of text to the socket named in the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket


def notify(state: str, flags: int = 0) -> None:
    """Send a state, as ``"READY=1"``, with flags of ``socket.send``."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        sock.send(state.encode(), flags)


async def feed_watchdog() -> None:
    """Say that the event loop still turns, twice in the time after which systemd would start the worker anew: once it is ready, not before.

    Where systemd has not read what was said, nothing is added: the event loop would wait for it.
    """
    try:
        period_s = int(os.environ["WATCHDOG_USEC"]) / 2e6
    except (KeyError, ValueError):
        return
    while True:
        notify("WATCHDOG=1", socket.MSG_DONTWAIT)
        await asyncio.sleep(period_s)
