"""For scripts and notebooks: run something that is awaited from code that is not. Runs on the master.

``main`` gives a script the command line of ``ddlf run``. ``run`` waits for a coroutine, also in a notebook whose cell already
runs inside an event loop: it uses one loop of its own on a background thread, so a cluster that one call opened can be used by the next one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Wait for a coroutine from code that is not async, and return its result.

    All calls share one event loop, so this works across calls::

        cluster = ddlf.run(Cluster.local(2).connect())
        print(ddlf.run(cluster.run_method(calculate, a=1)))
        ddlf.run(cluster.close())

    Ctrl-C cancels the coroutine, waits until it has cleaned up and raises ``KeyboardInterrupt``.

    Raises:
        RuntimeError: Called from inside a coroutine that this function runs; use ``await`` there.
    """
    loop = _shared_loop()
    if _running_here() is loop:
        coroutine.close()
        raise RuntimeError("ddlf.run is for code that is not async; inside a coroutine use await")
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        # The cancelled coroutine still closes its connections.
        asyncio.run_coroutine_threadsafe(_settle(), loop).result()
        raise


def main(target: Any) -> None:
    """Run an app or a function as ``ddlf run`` would, with the same options from the command line, and exit with its code.

    Args:
        target: A subclass of ``IApp``, or an async function that takes a ``Cluster``.

    Example::

        if __name__ == "__main__":
            ddlf.main(App)
    """
    import sys

    from ddlf.cli.parsing import Parser, reader_may_leave
    from ddlf.cli.run import add_options, execute

    parser = Parser(prog=sys.argv[0], description=(target.__doc__ or "").partition("\n")[0])
    add_options(parser)
    with reader_may_leave():
        sys.exit(execute(lambda: target, parser.parse_args()))


def _shared_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="ddlf", daemon=True).start()
    return _loop


def _running_here() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def _settle() -> None:
    """Let every cancelled task of this loop end."""
    mine = asyncio.current_task()
    await asyncio.gather(
        *(task for task in asyncio.all_tasks() if task is not mine and task.cancelling()), return_exceptions=True
    )
