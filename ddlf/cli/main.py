"""``ddlf``: the master's commands. Each imports what it needs when it runs; ``ddlf --help`` imports nothing of weight."""

from __future__ import annotations

from ddlf.cli import interrupts  # isort: skip - before what takes time

import argparse
import asyncio
import difflib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddlf.cli.options import add_options, named_cluster
from ddlf.cli.parsing import Parser, addresses, number, reader_may_leave
from ddlf.errors import DDLFError
from ddlf.version import __version__

if TYPE_CHECKING:
    from ddlf.cluster.proxy import ProxyWorker

interrupts.imported()


def parser() -> Parser:
    """All commands and their options."""
    result = Parser(
        prog="ddlf",
        description="Train unchanged Keras models on the machines you have.",
        epilog="first steps:\n"
        "  ddlf run apps/digits_cnn.py --local 2      two workers on this machine\n"
        "  ddlf-worker --port 9000                    a worker, on each machine\n"
        "  ddlf run apps/mnist_cnn.py -c cluster.yaml",
    )
    result.add_argument("--version", action="version", version=f"ddlf {__version__}")
    result.add_argument("--schema", action="store_true", help="print the JSON Schema of cluster.yaml, for editors")
    commands = result.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    run = commands.add_parser("run", help="run an app on a cluster", description="Run an app on a cluster.")
    run.add_argument(
        "app", type=Path, help="Python file with a subclass of ddlf.IApp, or an async function main(cluster)"
    )
    run.add_argument("--target", metavar="NAME", help="the class or function that is meant, when the file has several")
    add_options(run)

    config = commands.add_parser("config", help="show the settings of a run", description="The settings of a run.")
    shows = config.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser, required=True)
    show = shows.add_parser(
        "show", help="each setting and its value", description="Each setting and its value, as ddlf run would have it."
    )
    show.add_argument("app", type=Path, nargs="?", help="Python file with a subclass of ddlf.IApp")
    show.add_argument("--target", metavar="NAME", help="the class that is meant, when the file has several")
    show.add_argument("--origin", action="store_true", help="say where each value comes from")
    add_options(show)

    status = commands.add_parser("status", help="show what the workers do", description="Show what the workers do.")
    _add_cluster(status)
    status.add_argument("--json", action="store_true", help="print JSON")

    bench = commands.add_parser(
        "bench",
        help="measure the way to each worker",
        description="Measure latency and speed of the way to each worker.",
    )
    _add_cluster(bench)
    bench.add_argument(
        "--megabytes", type=number("megabytes", 1, 1000), default=32, metavar="N", help="of a transfer (default: 32)"
    )
    bench.add_argument(
        "--limit", type=number("limit", 1), default=60, metavar="S", help="seconds for one worker (default: 60)"
    )
    bench.add_argument("--json", action="store_true", help="print JSON")

    stop = commands.add_parser(
        "stop", help="end workers, or what they run", description="End the workers of a cluster."
    )
    _add_cluster(stop)
    stop.add_argument("--restart", action="store_true", help="only end what they run: start their executors anew")
    stop.add_argument("--force", action="store_true", help="also while somebody's run uses them, which fails then")

    clean = commands.add_parser(
        "clean",
        help="free what earlier runs left on the workers",
        description="Free data, models and variables that earlier runs left on the workers.",
    )
    _add_cluster(clean)
    clean.add_argument("--methods", action="store_true", help="forget hosted methods, too")

    token = commands.add_parser(
        "token", help="make or show the token", description="The secret that master and workers share."
    )
    actions = token.add_subparsers(dest="action", metavar="ACTION", parser_class=Parser, required=True)
    new = actions.add_parser("new", help="write a new token", description="Write a new token for this user.")
    new.add_argument("--token-file", type=Path, help="where to (default: this user's configuration folder)")
    paste = actions.add_parser(
        "paste",
        help="write the token of another machine",
        description="Write the token of another machine to its place on this one. It is read from the terminal, without "
        "showing it, or from standard input.",
    )
    paste.add_argument("--token-file", type=Path, help="where to (default: this user's configuration folder)")
    show = actions.add_parser(
        "show", help="show the token to copy it", description="Show where the token is, and the token itself."
    )
    show.add_argument("--token-file", type=Path, help="where it is")
    return result


def _add_cluster(parser: Parser) -> None:
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "-c", "--config", type=Path, metavar="PATH", help="cluster file (default: $DDLF_CONFIG, ./cluster.yaml)"
    )
    one.add_argument("--hosts", type=addresses, metavar="A:9000,B:9000", help="addresses of workers")
    parser.add_argument("--token-file", type=Path, metavar="PATH", help="file with the workers' token")
    parser.add_argument("--insecure-plaintext", action="store_true", help="with --hosts: do not encrypt")
    parser.add_argument(
        "--timeout", type=number("timeout", 1), default=5, metavar="S", help="seconds to wait (default: 5)"
    )
    parser.add_argument(
        "-v", "--verbose", "--debug", dest="debug", action="store_true", help="show the traceback of an error"
    )


def command() -> None:
    """The entry point of the command."""
    with interrupts.quiet():
        main()


def main(argv: list[str] | None = None) -> None:
    """Run a command; ends with ``SystemExit``."""
    with reader_may_leave():
        _main(sys.argv[1:] if argv is None else argv)


def _main(argv: list[str]) -> NoReturn:
    top = parser()
    names = ("run", "status", "bench", "stop", "clean", "token", "config")
    while argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if argv and argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version", "--schema"):
        later = next((word for word in argv if word in names), None)
        if later is not None:
            top.error(f"{argv[0]} stands before the command; write: ddlf {later} {argv[0]} ...")
    if argv and not argv[0].startswith("-") and argv[0] not in names:
        near = difflib.get_close_matches(argv[0], (*names, "worker"), 1)
        if near == ["worker"]:
            top.error(f"unknown command {argv[0]!r}, did you mean 'ddlf-worker'? It is a command of its own")
        top.error(
            f"unknown command {argv[0]!r}"
            + (f", did you mean {near[0]!r}?" if near else f"; there are: {', '.join(names)}")
        )
    options = top.parse_args(argv)
    if options.schema:
        print((Path(__file__).parents[1] / "cluster.schema.json").read_text(encoding="utf-8"), end="")
        sys.exit(0)
    if options.command is None:
        top.print_help()
        sys.exit(2)
    if options.command == "run":
        from ddlf.cli.run import run_file

        sys.exit(run_file(options.app, options))
    try:
        commands = {"status": _status, "bench": _bench, "stop": _stop, "clean": _clean}
        if options.command == "config":
            from ddlf.cli.show import show

            sys.exit(show(options))
        code = _token(options) if options.command == "token" else asyncio.run(commands[options.command](options))
    except DDLFError as error:
        if getattr(options, "debug", False):
            raise
        print(f"error  {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code)


def _token(options: argparse.Namespace) -> int:
    from ddlf import tokens
    from ddlf.errors import AuthError

    if options.action == "new":
        path = tokens.write_token(options.token_file)
        folder, there = tokens.shell_path(path.parent), tokens.shell_path(path)
        print(f"A new token is in {path}. Whoever has it can run code on your workers.")
        print("Copy it to each of the other machines. This line does it, with HOST replaced:")
        print(f"  ssh HOST 'umask 077; mkdir -p {folder}; cat > {there}' < {there}")
        print(
            "Without ssh: 'ddlf token show' here, 'ddlf token paste' there. Then start the workers: ddlf-worker --port 9000"
        )
        return 0
    if options.action == "paste":
        print(f"The token is in {tokens.write_token(options.token_file, _read_secret())}.")
        return 0
    found = tokens.find_tokens(options.token_file)
    if found is None:
        raise AuthError("there is no token", hint="make one with: ddlf token new")
    print(f"# {found.source}, fingerprint {found.fingerprint}", file=sys.stderr)
    for secret in found.all:
        print(secret.decode())
    return 0


def _read_secret() -> str:
    """A token from the terminal, where it does not show, or all of standard input. Never from an argument, which others can see."""
    if not sys.stdin.isatty():
        return sys.stdin.read(4096)
    import getpass

    return getpass.getpass("token (it does not show): ")


async def _status(options: argparse.Namespace) -> int:
    """Ask each daemon; a worker whose executor is busy answers too."""
    workers = named_cluster(options, guest=True).workers
    answers = await asyncio.gather(*(_ask(worker, "status", options.timeout) for worker in workers))
    if options.json:
        print(
            json.dumps(
                [
                    {
                        "address": f"{worker.host}:{worker.port}",
                        **(answer if isinstance(answer, dict) else {"error": str(answer)}),
                    }
                    for worker, answer in zip(workers, answers, strict=True)
                ]
            )
        )
    else:
        for worker, answer in zip(workers, answers, strict=True):
            print(f"{worker.id:>3}  {worker.label:<21}  {_describe(answer)}")
    return max((getattr(answer, "exit_code", 0) for answer in answers), default=0)


def _describe(answer: Any) -> str:
    if isinstance(answer, DDLFError):
        answer.worker = ""
        return f"unreachable: {answer}"
    busy = answer["busy"]
    doing = f"busy with {busy['method']!r} since {busy['seconds']:.1f} s" if busy else "idle"
    state = doing if answer["executor"] == "ready" else f"executor {answer['executor']}"
    restarts = f", restarts {answer['restarts']}" if answer["restarts"] else ""
    lease = answer["lease"]
    restarts += f", leased by {lease['holder']} since {lease['since']}" if lease else ""
    from ddlf.cli.clean import held

    methods = answer.get("methods") or []
    holds = [*held(answer), *([f"{len(methods)} method{'s' * (len(methods) > 1)}"] if methods else [])]
    restarts += f", holds {' and '.join(holds)}" if holds else ""
    plain = ", INSECURE PLAINTEXT" if answer["insecure_plaintext"] else ""
    return f"{state}; {answer['host']}, up {answer['uptime_s']:.0f} s, Python {answer['python']}{restarts}{plain}"


async def _bench(options: argparse.Namespace) -> int:
    from ddlf.cli.bench import bench

    return await bench(named_cluster(options, guest=True), options)


async def _stop(options: argparse.Namespace) -> int:
    """End workers, or what they run: all of them, or none while one is in use."""
    from ddlf.cluster.claim import master_name
    from ddlf.errors import LeaseError

    workers = named_cluster(options, guest=True).workers
    used = {} if options.force else await _used(workers, options.timeout)
    for worker, who in used.items():
        print(f"{worker.id:>3}  {worker.label:<21}  in use by {who}")
    if used:
        done = "restarted" if options.restart else "stopped"
        raise LeaseError(
            f"{len(used)} of {len(workers)} workers are in use, so none was {done}", hint="--force ends those runs"
        )
    command = "restart" if options.restart else "shutdown"
    who = f"{master_name().partition(' pid ')[0]} (ddlf stop{' --restart' * options.restart})"
    answers = await asyncio.gather(
        *(_ask(worker, command, options.timeout, who=who, force=options.force) for worker in workers)
    )
    for worker, answer in zip(workers, answers, strict=True):
        done = "restarted" if options.restart else "stopped"
        print(f"{worker.id:>3}  {worker.label:<21}  {answer if isinstance(answer, DDLFError) else done}")
    return max((getattr(answer, "exit_code", 0) for answer in answers), default=0)


async def _clean(options: argparse.Namespace) -> int:
    from ddlf.cli.clean import clean

    return await clean(named_cluster(options).workers, options)  # what is freed must be nobody else's


async def _used(workers: list[ProxyWorker], timeout_s: float) -> dict[ProxyWorker, str]:
    """Those that a living master has, and who it is since when."""
    answers = await asyncio.gather(*(_ask(worker, "status", timeout_s) for worker in workers))
    leases = [None if isinstance(answer, DDLFError) else answer["lease"] for answer in answers]
    return {
        worker: f"{lease['holder']} since {lease['since']}"
        for worker, lease in zip(workers, leases, strict=True)
        if lease and lease["state"] != "dead"
    }


async def _ask(worker: ProxyWorker, command: str, timeout_s: float, **arguments: Any) -> Any:
    try:
        await worker.connect_control(timeout_s=timeout_s)
        return await worker.ask(command, timeout_s=timeout_s, **arguments)
    except DDLFError as error:
        return error
    finally:
        await worker.close()


if __name__ == "__main__":
    command()
