"""``ddlf-worker``: run one worker on this machine, until Ctrl-C, SIGTERM or ``ddlf stop``."""

from __future__ import annotations

from ddlf.cli import interrupts  # isort: skip - before what takes time

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddlf.cli.parsing import Parser, cards, memory, number, reader_may_leave
from ddlf.errors import AuthError, ConfigError, DDLFError
from ddlf.worker.grace import SAME_SIGNAL_S, hand_over_s

if TYPE_CHECKING:
    from ddlf.worker.daemon import Daemon
    from ddlf.worker.joining import Join
    from ddlf.worker.options import Options

interrupts.imported()

LOOPBACK = "127.0.0.1"
ANY = "0.0.0.0"
STOPPING = (signal.SIGINT, signal.SIGTERM)


def parser() -> Parser:
    """Return the parser of the options of ``ddlf-worker``."""
    result = Parser(
        "ddlf-worker",
        "Run one DDLF worker on this machine. Masters connect to its port.",
        epilog="Without a token it listens on this machine only. To use it from other machines, encrypted:\n"
        "  ddlf token new           once; it prints how to copy the token to another machine\n"
        "  ddlf-worker --port 9000  on each machine",
    )
    result.add("--port", type=number(0, 65535), help="port to listen on; 0 for any free one (default: 9000)")
    result.add("--host", help=f"address to listen on (default: all addresses with a token, {LOOPBACK} without one)")
    result.add(
        "--advertise", metavar="HOST[:PORT]", help="address at which other workers reach this one (default: detected)"
    )
    result.add(
        "--join",
        type=gates,
        metavar="HOST:PORT,...",
        help="connect to a master that waits for workers at this address; the worker itself then listens nowhere",
    )
    result.add(
        "--place", type=number(0, 1023), metavar="N", help="with --join: place of this worker, from 0 (default: any)"
    )
    result.add(
        "--join-for",
        type=number(1, 10**6),
        metavar="SECONDS",
        help="with --join: end after this time without a master (default: 600)",
    )
    result.add(
        "--gpus",
        type=cards,
        metavar="0,1",
        help="cards to compute on, by their numbers in nvidia-smi, or none (default: the first that has no worker)",
    )
    result.add(
        "--gpu-memory",
        type=memory,
        metavar="SIZE",
        help="limit of its memory on each card, such as 8GiB; workers with a limit may share a card",
    )
    result.add("--token-file", type=Path, metavar="PATH", help="file with the token that masters must have")
    result.add(
        "--insecure-plaintext", action="store_true", help="do not encrypt, even for other machines: private links only"
    )
    result.add("--tls-ca", type=Path, metavar="PEM", help="masters must show a certificate signed by this one")
    result.add("--tls-cert", type=Path, metavar="PEM", help="own certificate (default: created at the first start)")
    result.add("--tls-key", type=Path, metavar="PEM", help="its private key")
    result.add("--state-dir", type=Path, metavar="DIR", help="folder for persistent methods and the executor's log")
    result.add("-q", "--quiet", action="store_true", help="print errors only")
    result.add(
        "--exit-with-parent",
        action="store_true",
        help="read the token from stdin, and end when stdin ends",
        group="launchers",
        common=False,
    )
    result.add(
        *("--ready-fd",),
        type=int,
        metavar="FD",
        help="descriptor that gets one line of JSON when the worker is ready",
        group="launchers",
        common=False,
    )
    result.add(
        *("--template-fd",),
        type=int,
        metavar="FD",
        help="socket of the process to fork executors from",
        group="launchers",
        common=False,
    )
    return result


def command() -> None:
    """Run the command ``ddlf-worker``, as its entry point in the installed package."""
    with interrupts.quiet():
        main()


def main(argv: list[str] | None = None) -> None:
    """Run a worker until it is stopped, and end with ``SystemExit``."""
    with reader_may_leave():
        _main(argv)


def _main(argv: list[str] | None) -> NoReturn:
    options = parser().parse_args(argv)
    try:
        sys.exit(_run(options))
    except DDLFError as error:
        if options.exit_with_parent and isinstance(error, ConfigError):
            # The parent's terminal may not show standard error.
            _report(options, {"refused": error.message, "hint": error.hint})
        else:
            print(f"ddlf-worker: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _run(options: argparse.Namespace) -> int:
    from ddlf.rpc.tls import Security
    from ddlf.rpc.tokens import Tokens, find_tokens, loopback_tokens
    from ddlf.worker.assignment import CardWish, unused_cards
    from ddlf.worker.options import Options

    def say(line: str) -> None:
        if not options.quiet:
            with contextlib.suppress(BrokenPipeError):  # the output has no reader, but masters still use this worker
                print(line, flush=True)

    by_parent = options.exit_with_parent
    tokens = Tokens((_token_from_stdin(),), source="stdin") if by_parent else find_tokens(options.token_file)
    join = _join(options)
    if join is not None and tokens is None and any(not _is_here(host) for host, _ in join.addresses):
        raise AuthError(
            f"refusing to join {join} without a token",
            hint="run 'ddlf token new' on the master's machine and copy the file to this one",
        )
    port = 9000 if options.port is None and join is None else options.port
    # A token for workers on the program's own machine opens nothing else.
    host = options.host or (ANY if tokens and not by_parent else LOOPBACK)
    beyond = port is not None and not _is_here(host)
    if beyond and tokens is None:
        raise AuthError(
            f"refusing to listen on {host} without a token",
            hint="run 'ddlf token new' and copy the file to the other machines",
        )
    security = Security(options.tls_ca, options.tls_cert, options.tls_key, options.insecure_plaintext)
    plaintext = beyond and security.insecure_plaintext
    encrypted = beyond or join is not None or security.tls_ca or security.tls_cert
    is_placed = join is not None and options.quiet  # an engine has started it, and the master gets all output
    # A random port or place changes with each start, so its state would never be found again.
    state_dir = options.state_dir or (_state_dir() if port or options.place is not None else None)
    settings = Options(
        host=host,
        port=port,
        tokens=(tokens or loopback_tokens()).all,
        state_dir=state_dir,
        security=security if encrypted else None,
        shows_prints=not (by_parent or is_placed),
        shows_native=not is_placed,
        advertise=_advertised(options.advertise),
        template_fd=options.template_fd,
        join=join,
        gpus=CardWish(options.gpus, options.gpu_memory),
    )

    def ready(daemon: Daemon) -> None:
        if not daemon.failure:
            notify("READY=1")
            security_text = (
                "with TLS" if daemon.encrypts else "INSECURE PLAINTEXT" if plaintext else "this machine only"
            )
            if port is not None:
                say(f"ready on {daemon.host}:{daemon.port}, {security_text} (pid {os.getpid()})")
            if join is not None:
                say(f"joining   {join} (pid {os.getpid()})")
            if daemon.assignment.cards:
                say(f"card      {', '.join(daemon.assignment.described())}")
            elif options.gpus is None:
                for reason in unused_cards():
                    say(f"card      none is used: {reason}")
            if os.geteuid() == 0 and not (by_parent or options.quiet):
                print(
                    "ddlf-worker: WARNING: running as root, so anybody who holds the token is root here; use a separate account",
                    file=sys.stderr,
                    flush=True,
                )
        _report(options, {"host": daemon.host, "port": daemon.port, "pid": os.getpid(), "failure": daemon.failure})

    _no_core_dumps()
    # Block signals while the event loop is created, because an incomplete loop cannot end cleanly.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    if plaintext:
        print(
            f"ddlf-worker: WARNING: {host} is reachable from other machines and nothing is encrypted (--insecure-plaintext)",
            file=sys.stderr,
            flush=True,
        )
    elif tokens is None:
        say(
            "No token: only masters on this machine can connect. For others: 'ddlf token new' on one machine, copy the "
            "token as it says, start again"
        )
    return asyncio.run(_serve(settings, ready, say, options.exit_with_parent))


def _report(options: argparse.Namespace, facts: dict[str, Any]) -> None:
    """Write facts about this worker to the process that waits for them, if there is one."""
    if options.ready_fd is None:
        return
    is_own = options.ready_fd > 2  # standard output stays open for the executor
    with contextlib.suppress(BrokenPipeError), open(options.ready_fd, "w", closefd=is_own) as pipe:
        print(json.dumps(facts), file=pipe)


async def _serve(
    settings: Options, ready: Callable[[Daemon], None], say: Callable[[str], None], exit_with_parent: bool
) -> int:
    from ddlf.worker.daemon import Daemon

    loop = asyncio.get_running_loop()
    code, grace = 0, hand_over_s()

    def end_at_once_at_the_next_signal() -> None:
        for stopping in STOPPING:
            loop.remove_signal_handler(stopping)

    def stop(number: int) -> None:
        nonlocal code
        by = f"{signal.Signals(number).name} on its machine"
        if number == signal.SIGINT:
            code = 130
            end_at_once_at_the_next_signal()
            daemon.stop(by)
        elif not daemon.is_leaving:
            # A worker of a run that is ended early has not done its work, so its engine must start another.
            code = 0 if settings.join is None else 143
            daemon.leave(by, grace)
            loop.call_later(SAME_SIGNAL_S, end_at_once_at_the_next_signal)

    # Handle signals first: from here on every end is clean, and leaves no folder behind.
    for number_ in STOPPING:
        loop.add_signal_handler(number_, stop, number_)
    daemon = Daemon(settings, log=lambda line: print(f"ddlf-worker: {line}", file=sys.stderr, flush=True), say=say)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    if exit_with_parent:
        # A thread, because stdin may be a file or a terminal, which the event loop cannot watch everywhere. It reads the bare
        # descriptor: a buffered one is locked while a read waits, and Python would wait for that lock at its end.
        def watch() -> None:
            stays = False
            with contextlib.suppress(RuntimeError):  # the loop has ended already
                while lines := os.read(0, 4096):
                    for word, number in re.findall(rb"^(leave|stay) ([0-9.]{1,10})$", lines, re.MULTILINE):
                        if word == b"stay":
                            stays = number == b"1"
                        else:
                            loop.call_soon_threadsafe(daemon.leave, "a notice of its engine", float(number))
                if not stays:
                    loop.call_soon_threadsafe(daemon.stop)

        threading.Thread(target=watch, daemon=True).start()
    tasks = []

    def now_ready() -> None:
        ready(daemon)
        tasks.append(asyncio.create_task(feed_watchdog()))

    try:
        await daemon.run(now_ready)
    finally:
        for task in tasks:
            task.cancel()
    if daemon.end_error is not None:
        raise daemon.end_error
    return code


def notify(state: str, flags: int = 0) -> None:
    """Tell systemd a state such as ``"READY=1"``, by the protocol of sd_notify(3); does nothing elsewhere.

    Args:
        state: One datagram of text.
        flags: Flags of ``socket.send``.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(address.replace("@", "\0", 1) if address.startswith("@") else address)
        sock.send(state.encode(), flags)


async def feed_watchdog() -> None:
    """Tell systemd that the event loop is alive, twice per watchdog period. Starts when the worker is ready.

    Nothing is sent while systemd has not read the previous message, because the event loop would wait.
    """
    try:
        period_s = int(os.environ["WATCHDOG_USEC"]) / 2e6
    except (KeyError, ValueError):
        return
    while True:
        notify("WATCHDOG=1", socket.MSG_DONTWAIT)
        await asyncio.sleep(period_s)


def _no_core_dumps() -> None:
    """Disable core dumps of this process and its executor, because their memory contains the token."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _token_from_stdin() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise AuthError("no token came on stdin", hint="--exit-with-parent is for programs that start workers")
        line += byte
    return line.strip()


def gates(text: str) -> tuple[tuple[str, int], ...]:
    """Parse the addresses of the gates where a worker joins its master, such as ``"10.0.0.1:9100,lab.example:9100"``.
    Return each one once.
    """
    from ddlf.cluster.config.addresses import parse_address

    try:
        return tuple(dict.fromkeys(parse_address(part.strip()) for part in text.split(",")))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _is_here(host: str) -> bool:
    """Return whether a host is this machine, under an address that no other machine can use."""
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _join(options: argparse.Namespace) -> Join | None:
    from ddlf.rpc.join import ANY_PLACE
    from ddlf.worker.joining import JOIN_FOR_S, Join

    if options.join is None:
        for name in ("place", "join_for"):
            if getattr(options, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} has no effect without --join", hint="add --join HOST:PORT"
                )
        return None
    if options.port is None:
        for name in ("host", "advertise"):
            if getattr(options, name) is not None:
                raise ConfigError(
                    f"--{name} has no effect: a worker that joins listens nowhere", hint="add --port to listen, too"
                )
    return Join(
        options.join,
        ANY_PLACE if options.place is None else options.place,
        for_s=JOIN_FOR_S if options.join_for is None else options.join_for,
    )


def _advertised(text: str | None) -> tuple[str, int] | None:
    from ddlf.cluster.config.addresses import parse_advertised

    if text is None:
        return None
    try:
        return parse_advertised(text)
    except ConfigError as error:
        error.message = f"--advertise: {error.message}"
        raise


def _state_dir() -> Path:
    from ddlf.rpc.tokens import state_folder

    try:
        return state_folder()
    except AuthError:
        raise ConfigError(
            "this user has no home folder for the state of the worker",
            hint="set HOME, or name a folder: --state-dir DIR",
        ) from None


if __name__ == "__main__":
    command()
