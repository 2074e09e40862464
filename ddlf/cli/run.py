"""``ddlf run`` and ``python app.py``: take an app, a cluster and the options, and run one on the other."""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import difflib
import importlib.util
import inspect
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.cli.parsing import Parser, number
from ddlf.errors import AppError, ConfigError, DDLFError

if TYPE_CHECKING:
    from ddlf.app import IApp
    from ddlf.cluster.cluster import Cluster

SETTINGS = (
    "mode",
    "master_epochs",
    "worker_epochs",
    "batch_size",
    "seed",
    "precision",
    "balance",
    "codec",
    "weights_codec",
    "merge",
    "update_policy",
    "checkpoint",
    "checkpoint_every",
    "resume",
)


def add_options(parser: Parser) -> None:
    """The options that ``ddlf run`` and an app's own script share."""
    where = parser.add_argument_group("cluster (default: $DDLF_CONFIG, ./cluster.yaml, else 2 workers on this machine)")
    one = where.add_mutually_exclusive_group()
    one.add_argument("-c", "--config", type=Path, metavar="PATH", help="cluster file")
    one.add_argument("--local", type=number("local", 1, 1024), metavar="N", help="start N workers on this machine")
    one.add_argument("--hosts", metavar="A:9000,B:9000", help="addresses of workers")
    where.add_argument("--token-file", type=Path, metavar="PATH", help="file with the workers' token")
    where.add_argument("--insecure-plaintext", action="store_true", help="with --hosts: do not encrypt")
    where.add_argument("--takeover", action="store_true", help="take workers and checkpoints from another master")
    train = parser.add_argument_group("training (defaults are attributes of the app)")
    train.add_argument("--mode", choices=("sync", "async"))
    train.add_argument("--master-epochs", type=number("epochs", 1), metavar="N", help="local epochs of the whole run")
    train.add_argument("--worker-epochs", type=number("epochs", 1), metavar="N", help="local epochs in a round")
    train.add_argument(
        "--batch-size", type=number("batch size", 1), metavar="N", help="samples in a batch, of each worker"
    )
    train.add_argument("--seed", type=number("seed", 0, 2**32 - 1), metavar="N")
    train.add_argument("--precision", choices=("auto", "float32", "mixed_bfloat16", "mixed_float16"))
    train.add_argument("--balance", choices=("equal", "speed"), help="parts of the data equal, or as workers are fast")
    train.add_argument(
        "--codec", metavar="NAME", help="of updates: float32, float16, bfloat16, int8, int8-block, topk:0.01"
    )
    train.add_argument("--weights-codec", metavar="NAME", help="of weights: float32, float16, bfloat16, delta:CODEC")
    train.add_argument("--merge", metavar="RULE", help="of updates: mean, median, trimmed:0.2")
    train.add_argument("--update-policy", choices=("stop", "reject", "clip"), help="for an update that looks wrong")
    train.add_argument("--checkpoint", type=Path, metavar="DIR", help="write a checkpoint there after every round")
    train.add_argument(
        "--checkpoint-every", type=number("rounds", 1), metavar="N", help="only after every N rounds, and at the end"
    )
    train.add_argument(
        "--resume",
        metavar="auto|DIR",
        help="go on from the newest checkpoint: in --checkpoint, if there is one, or in DIR",
    )
    train.add_argument("--save", type=Path, metavar="PATH", help="save the trained model as a .keras file")
    parser.add_argument(
        "-p",
        dest="parameters",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set an attribute of the app; may be repeated",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print the results only")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run_file(path: Path, options: argparse.Namespace) -> int:
    """Run the app in a file; return the exit code."""
    return execute(lambda: find_target(path), options)


def execute(find: Callable[[], Any], options: argparse.Namespace) -> int:
    """Run a target; return the exit code. Every error is printed as one sentence.

    Args:
        find: Returns the ``IApp`` subclass or the async function that takes a cluster.
        options: As parsed.
    """
    with native_output_to_log(), swallowed_quietly():
        try:
            target = interruptible(find)
            return run_until_signal(_run(target, options))
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
            return 130
        except DDLFError as error:
            if options.debug:
                traceback.print_exc()
            print(f"error  {error}", file=sys.stderr, flush=True)
            return error.exit_code
        except BrokenPipeError:
            raise  # nobody reads the output any more
        except Exception:
            # The user's own code raised on the master: its traceback is what helps.
            traceback.print_exc()
            return 1


def interruptible(find: Callable[[], Any]) -> Any:
    """Call what imports the user's file and all it needs, and raise ``KeyboardInterrupt`` whenever SIGINT came meanwhile.

    Left alone, one can be lost in an import: a callback swallows it, or native code makes an ImportError of it.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return find()
    came = False

    def interrupt(*_: Any) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        return find()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


async def _run(target: Any, options: argparse.Namespace) -> int:
    say: Callable[[str], None] = (lambda line: None) if options.quiet else (lambda line: print(line, flush=True))
    cluster, described = resolve_cluster(options)
    is_app = inspect.isclass(target)
    if is_app:
        app = prepare_app(target, cluster, options)
    else:
        arguments = function_arguments(target, options)
    say(f"cluster   {described}")
    async with cluster:
        if not is_app:
            await target(cluster, **arguments)
            return 0
        say(
            f"training  {type(app).__name__}: {app.mode}, {app.master_epochs} epochs in rounds of {app.worker_epochs}, "
            f"batch {app.batch_size} per worker x {cluster.N} workers, seed {app.seed}"
        )
        await app.train_model()
        if hasattr(app, "x_test"):
            app.verbose = True
            await app.evaluate_model()
        if options.save:
            await app.save_model(options.save)
    return 0


def resolve_cluster(options: argparse.Namespace) -> tuple[Cluster, str]:
    """The cluster that the options name, and how to describe it."""
    from ddlf.cluster.cluster import Cluster

    if options.hosts:
        from ddlf.config import parse_address

        addresses = [parse_address(part) for part in options.hosts.split(",") if part]
        cluster = Cluster(
            [a for a, _ in addresses],
            [p for _, p in addresses],
            token_file=options.token_file,
            insecure_plaintext=options.insecure_plaintext,
            takeover=options.takeover,
        )
        return cluster, f"--hosts ({_workers(cluster.N)})"
    if not options.local:
        from ddlf.config import find_config

        path = find_config(options.config)
        if path is not None:
            cluster = Cluster.from_config(path, token_file=options.token_file, takeover=options.takeover)
            return cluster, f"{path} ({_workers(cluster.N)})"
    count = options.local or 2
    why = "" if options.local else "no cluster file: "
    return Cluster.local(count), f"{why}{_workers(count)} on this machine"


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def prepare_app(target: type[IApp], cluster: Cluster, options: argparse.Namespace) -> IApp:
    """Make the app and set on it what the options and the cluster file say."""
    app = target(cluster)
    file_settings: dict[str, Any] = {}
    if not (options.local or options.hosts):
        from ddlf.config import find_config, load_config

        path = find_config(options.config)
        file_settings = load_config(path).run.model_dump() if path is not None else {}
    for name in SETTINGS:
        value = getattr(options, name)
        value = file_settings.get(name) if value is None else value
        if value is not None:
            setattr(app, name, value)
    app.verbose = app.verbose and not options.quiet
    app.takeover = app.takeover or options.takeover
    for key, text in _parameters(options):
        if key.startswith("_") or callable(getattr(app, key, None)) or not hasattr(target, key):
            known = [name for name in dir(target) if not name.startswith("_") and not callable(getattr(target, name))]
            raise ConfigError(f"-p {key}: {target.__name__} has no attribute {key!r}{_guess(key, known)}")
        setattr(app, key, _value(key, text, getattr(target, key)))
    return app


def function_arguments(target: Callable[..., Any], options: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments for a function that is run on a cluster."""
    parameters = list(inspect.signature(target).parameters.values())[1:]
    known = {parameter.name: parameter.default for parameter in parameters}
    arguments = {}
    for key, text in _parameters(options):
        if key not in known:
            raise ConfigError(f"-p {key}: {target.__name__} has no parameter {key!r}{_guess(key, list(known))}")
        arguments[key] = _value(key, text, known[key])
    return arguments


def _parameters(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    for pair in options.parameters:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise ConfigError(f"-p takes KEY=VALUE, got {pair!r}")
        yield key, text


def _guess(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, 1)
    return f", did you mean {near[0]!r}?" if near else f"; there are: {', '.join(known) or 'none'}"


def _value(key: str, text: str, default: Any) -> Any:
    """Read a value as the type of what it replaces."""
    if isinstance(default, str):
        return text
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if default is not None and default is not inspect.Parameter.empty and type(value) is not type(default):
        raise ConfigError(f"-p {key}={text}: expected a {type(default).__name__}")
    return value


def find_target(path: Path) -> Any:
    """Load a file and find what to run in it: its one ``IApp`` subclass, or its async function ``main(cluster)``.

    Raises:
        ConfigError: There is no such file, or it is no Python file.
        AppError: There is nothing to run in it, or more than one thing.
    """
    from ddlf.app import IApp

    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r}" + (" (it is a folder)" if path.is_dir() else ""))
    if path.suffix != ".py":
        raise ConfigError(f"{str(path)!r} is no Python file", hint="give the .py file of an app")
    # As `python file.py` does: modules beside it are importable.
    sys.path.insert(0, str(path.parent.resolve()))
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"app_{abs(hash(str(path))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    apps = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, IApp) and value.__module__ == name
    ]
    # A subclass of another app in the file is the one that is meant.
    apps = [app for app in apps if not any(app is not other and issubclass(other, app) for other in apps)]
    if len(apps) > 1:
        raise AppError(f"{path} has several apps: {', '.join(app.__name__ for app in apps)}", hint="keep one in a file")
    if apps:
        return apps[0]
    main = getattr(module, "main", None)
    if not inspect.iscoroutinefunction(main):
        raise AppError(
            f"{path} has nothing to run", hint="write a subclass of ddlf.IApp, or an async function main(cluster)"
        )
    return main


@contextlib.contextmanager
def swallowed_quietly() -> Iterator[None]:
    """Do not print the traceback of an interrupt that came while Python called a finalizer or a callback, where it cannot be raised."""
    usual = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            usual(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


BLOCKED_S = 2.0
"""How long code may hold up the event loop after Ctrl-C before it is ended: shorter than a person waits before pressing again."""


@contextlib.contextmanager
def ending_what_blocks() -> Iterator[None]:
    """Let SIGINT also end code that holds up the event loop: an import, a download, a computation on the master.

    asyncio only cancels its task, which such code does not notice. When the loop does not run soon, the signal is sent again, as a person would,
    until it does: each raises ``KeyboardInterrupt``, which an import may swallow.
    """
    loop = asyncio.get_running_loop()
    usual = signal.getsignal(signal.SIGINT)
    if not callable(usual) or usual is signal.default_int_handler:
        yield
        return
    noticed = threading.Event()
    insisting = threading.Thread(target=_insist, args=(noticed,), daemon=True)

    def interrupt(number: int, frame: Any) -> None:
        if not insisting.ident:
            loop.call_soon_threadsafe(noticed.set)
            insisting.start()
        usual(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        noticed.set()
        signal.signal(signal.SIGINT, usual)


def _insist(noticed: threading.Event) -> None:
    main = threading.main_thread().ident
    assert main is not None
    while not noticed.wait(BLOCKED_S):
        signal.pthread_kill(main, signal.SIGINT)


def run_until_signal(coroutine: Any) -> int:
    """``asyncio.run``, which ends tidily on SIGTERM too, and on SIGINT also when the event loop is held up."""

    async def supervised() -> int:
        task = asyncio.current_task()
        assert task is not None
        terminated = False

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        try:
            with ending_what_blocks():
                result: int = await coroutine
                return result
        except asyncio.CancelledError:
            if terminated:
                return 143
            raise

    return asyncio.run(supervised())


@contextlib.contextmanager
def native_output_to_log() -> Iterator[None]:
    """Send what native code writes to standard error into a log file; Python's own errors still reach the terminal.

    TensorFlow writes lines about processors and drivers that no setting silences; they would bury the one line that matters.
    """
    import platformdirs

    try:
        folder = Path(platformdirs.user_log_dir("ddlf"))
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = open(folder / "master.log", "wb")  # noqa: SIM115
        sys.stderr.flush()
        terminal = os.dup(2)
    except OSError:
        yield
        return
    before, sys.stderr = sys.stderr, os.fdopen(terminal, "w", buffering=1, errors="backslashreplace")
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        sys.stderr.close()
        sys.stderr = before
        log.close()
