"""For scripts and notebooks: run something that is awaited from code that is not. Runs on the master.

``main`` gives a script the command line of ``ddlf run``. ``run`` waits for a coroutine, also in a notebook whose cell already
runs inside an event loop: it uses one loop of its own on a background thread, so a cluster that one call opened can be used by the next one.
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
    """Wait for a coroutine from code that is not async, and return its result.

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
    """Run an app or a function as ``ddlf run`` would, with the same options from the command line, and exit with its code.

    In a notebook there is no command line: it runs with the defaults, and returns.

    Args:
        target: A subclass of ``IApp``, or an async function that takes a ``Cluster``.
        options: Options of its own, as ``argparse.ArgumentParser(add_help=False)``: each sets the attribute, or the parameter, of the same name.

    Raises:
        RuntimeError: Called inside an event loop that is no notebook's; the text says what to await there.

    Example::

        if __name__ == "__main__":
            ddlf.main(App)
    """
    from ddlf.cli.options import add_options
    from ddlf.cli.parsing import Parser, reader_may_leave
    from ddlf.cli.run import execute, run_target
    from ddlf.cli.stopping import StopRequest
    from ddlf.cli.target import Importing

    if Importing.now is not None:  # `ddlf run` looks what there is to run in this file
        Importing.now.named = target
        return
    own = [] if options is None else [options]
    about = (target.__doc__ or "").partition("\n")[0]
    parser = Parser(sys.argv[0], about, epilog=settable(target), parents=own)
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
        raise RuntimeError(
            f"ddlf.main runs an event loop of its own, and this code runs inside one; here write: {inside}"
        )
    with reader_may_leave():
        sys.exit(execute(lambda: target, as_parameters(parser.parse_args(), parser)))


def in_notebook() -> bool:
    """Whether this is a notebook's cell or an IPython prompt: the command line is then that of the kernel, not of a script."""
    import builtins

    program = Path(sys.argv[0])
    return hasattr(builtins, "get_ipython") and (
        program.suffix != ".py" or "kernel" in program.name + program.parent.name
    )


def settable(target: Any) -> str:
    """Return what ``-p`` can set, with the default values, for the end of the help; "" if there is nothing.

    Args:
        target: A subclass of ``IApp``, or a function that takes a cluster.
    """
    defaults = _attributes(target) if isinstance(target, type) else _parameters(target)
    rows = [f"  -p {name}={value}" for name, value in defaults.items()]
    what = "attributes of this app" if isinstance(target, type) else f"parameters of {target.__name__}"
    return "\n".join([f"{what}, with their default values:", *rows]) if rows else ""


def as_parameters(options: argparse.Namespace, parser: Parser) -> argparse.Namespace:
    """Let the author's own options set what ``-p`` would.

    Args:
        options: Parsed.
        parser: The parser, whose options of DDLF are not the author's.
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
