"""Runs coroutines and apps from scripts and notebooks without ``await``. Runs on the master.

``main`` gives a script the command line of ``ddlf run``. ``run`` waits for a coroutine, also in a notebook whose cell already
runs inside an event loop. It uses its own event loop on a background thread, so the next call can use a cluster of the
previous call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ddlf.cluster.background_loop import running_here, shared_loop, wait_on

if TYPE_CHECKING:
    import argparse

    from ddlf.cli.parsing import Parser

T = TypeVar("T")
PLAIN = (bool, int, float, str)
"""Types of values that can be given as text."""


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Wait for a coroutine from synchronous code, and return its result.

    All calls share one event loop, so this works across calls::

        cluster = ddlf.run(Cluster.local(2).connect())
        print(ddlf.run(cluster.run_method(calculate, a=1)))
        ddlf.run(cluster.close())

    Ctrl-C cancels the coroutine, waits until it has cleaned up and raises ``KeyboardInterrupt``.

    Raises:
        RuntimeError: Called from inside a coroutine that this function runs; use ``await`` there.
    """
    return wait_on(shared_loop(), coroutine)


def main(target: Any, options: argparse.ArgumentParser | None = None) -> None:
    """Run an app or a function like ``ddlf run``, with the same command-line options, and exit with the same exit code.

    A notebook has no command line, so the app runs there with the default options, and this function returns.

    Args:
        target: A subclass of ``IApp``, or an async function that takes a ``Cluster``.
        options: The script's own options, as an ``argparse.ArgumentParser(add_help=False)``. Each sets the attribute or
            the parameter with the same name.

    Raises:
        RuntimeError: Called inside an event loop outside of a notebook; the text says what to await instead.

    Example::

        if __name__ == "__main__":
            ddlf.main(App)
    """
    from ddlf.cli.options import add_options
    from ddlf.cli.parsing import Parser, reader_may_leave
    from ddlf.cli.run import execute, run_target
    from ddlf.cli.stopping import StopRequest
    from ddlf.cli.target import Importing

    if Importing.now is not None:  # `ddlf run` decides what to run in this file
        Importing.now.named = target
        return
    parents = [] if options is None else [options]
    about = (target.__doc__ or "").partition("\n")[0]
    parser = Parser(sys.argv[0], about, epilog=settable(target), parents=parents)
    add_options(parser)
    if in_notebook():
        if isinstance(target, type):
            name = target.__name__
            print(
                f"notebook  for another cluster, and to keep the app: app = {name}(Cluster.local(2)); await app.train_sync()"
            )
        run(run_target(target, parser.parse_args([]), StopRequest()))
        return
    if running_here() is not None:
        inside = (
            f"app = {target.__name__}(cluster), await app.train_model()"
            if isinstance(target, type)
            else f"await {target.__name__}(cluster)"
        )
        raise RuntimeError(f"ddlf.main runs its own event loop, and this code runs inside one; here write: {inside}")
    with reader_may_leave():
        sys.exit(execute(lambda: target, as_parameters(parser.parse_args(), parser)))


def in_notebook() -> bool:
    """Return whether this is a notebook's cell or an IPython prompt, whose command line belongs to the kernel."""
    import builtins

    program = Path(sys.argv[0])
    return hasattr(builtins, "get_ipython") and (
        program.suffix != ".py" or "kernel" in program.name + program.parent.name
    )


def settable(target: Any) -> str:
    """Return the names that ``-p`` can set, with default values, for the end of the help; "" if there are none.

    Args:
        target: A subclass of ``IApp``, or a function that takes a cluster.
    """
    defaults = _attributes(target) if isinstance(target, type) else _parameters(target)
    rows = [f"  -p {name}={value}" for name, value in defaults.items()]
    title = "attributes of this app" if isinstance(target, type) else f"parameters of {target.__name__}"
    return "\n".join([f"{title}, with their default values:", *rows]) if rows else ""


def as_parameters(options: argparse.Namespace, parser: Parser) -> argparse.Namespace:
    """Convert the values of the script's own options to parameters like ``-p NAME=VALUE``, which set attributes of the
    app.

    Args:
        options: The parsed options.
        parser: The parser with DDLF's options and the author's.
    """
    for name in vars(options).keys() - {option.dest for option in parser.options}:
        if (value := getattr(options, name)) is not None:
            options.parameters.append(f"{name}={value}")
    return options


def _attributes(target: type) -> dict[str, Any]:
    from ddlf.training.registry import SETTINGS

    classes = [cls for cls in reversed(target.__mro__) if not cls.__module__.startswith("ddlf.") and cls is not object]
    values = {name: value for cls in classes for name, value in vars(cls).items()}
    return {
        name: getattr(target, name)
        for name, value in values.items()
        if not name.startswith("_") and name not in SETTINGS and isinstance(value, PLAIN)
    }


def _parameters(target: Any) -> dict[str, Any]:
    parameters = list(inspect.signature(target).parameters.values())[1:]
    return {parameter.name: parameter.default for parameter in parameters if isinstance(parameter.default, PLAIN)}
