"""``ddlf up``, ``ddlf down`` and ``ddlf runcmd``: start and end lasting workers on the machines of cluster.yaml, and run a
command there, by the system's ``ssh``. Runs on the master.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import hashlib
import importlib.metadata
import io
import shlex
import sys
import zipfile
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ddlf.cli.options import add_verbose
from ddlf.cli.parsing import Command, Parser, number
from ddlf.errors import AuthError, ConfigError, DDLFError, LeaseError

if TYPE_CHECKING:
    from ddlf.cluster.config.cluster_file import ClusterConfig, WorkerAddress

FAILED = 3
"""Exit code if a machine has failed."""
BEGUN = "ddlf-runcmd-begins"
"""Each login shell prints this line before the command of ``ddlf runcmd``. It ends the login."""
EXTRAS = ("tensorflow", "tensorflow-gpu", "jax-gpu", "torch", "parquet", "tfrecord")
"""Extras that a worker may need. ``--install`` installs each extra that this machine has."""


def _options(parser: Parser) -> None:
    parser.add(
        *("-c", "--config"),
        type=Path,
        metavar="PATH",
        help="cluster file that lists the workers (default: $DDLF_CONFIG, ./cluster.yaml)",
    )
    add_verbose(parser)


def _token_option(parser: Parser) -> None:
    parser.add("--token-file", type=Path, metavar="PATH", help="file with the workers' token")


def _listed(options: argparse.Namespace) -> ClusterConfig:
    """Return the cluster file.

    Raises:
        ConfigError: It lists no workers.
    """
    from ddlf.cluster.config.cluster_file import load_config

    config = load_config(options.config)
    if config.launcher_name is not None:
        raise ConfigError(
            f"the cluster file lists no workers: each run starts them with launcher {config.launcher_name!r}",
            hint="list them under 'workers'",
        )
    return config


async def _for_each_worker(workers: Sequence[WorkerAddress], act: Callable[[WorkerAddress], Awaitable[str]]) -> int:
    """Do something for all workers at once, and print a line for each as soon as it is done. Return the exit code."""
    code = 0

    async def act_on(index: int, worker: WorkerAddress) -> None:
        nonlocal code
        try:
            text = await act(worker)
        except DDLFError as error:
            code, text = FAILED, f"failed: {error}"
        print(f"{index:>3}  {worker.name or str(worker):<21}  {text}", flush=True)

    async with asyncio.TaskGroup() as group:
        for index, worker in enumerate(workers, 1):
            group.create_task(act_on(index, worker))
    return code


# -- up ---------------------------------------------------------------------------------------------------------------


def _up_options(parser: Parser) -> None:
    _options(parser)
    _token_option(parser)
    parser.add("--install", action="store_true", help="first install this DDLF there, in a virtual environment")
    parser.add("--systemd", action="store_true", help="start them as services, which also start with the machine")


async def up(options: argparse.Namespace) -> int:
    """Run ``ddlf up``: start the workers of the cluster file that do not run."""
    from ddlf.cluster.launch.remote import CONNECTING, call
    from ddlf.rpc.tokens import find_tokens

    config = _listed(options)
    security = config.security
    if security.tls_ca or security.tls_cert:
        raise ConfigError(
            "ddlf up does not copy certificates, and the cluster file names some",
            hint="start these workers yourself: ddlf-worker --tls-cert PEM --tls-key PEM",
        )
    tokens = find_tokens(options.token_file or security.token_file)
    if tokens is None:
        raise AuthError("there is no token for the workers", hint="create one with: ddlf token new")
    token = "\n".join(secret.decode() for secret in tokens.all)
    connecting = asyncio.Semaphore(CONNECTING)
    installing: dict[str, asyncio.Task[Any]] = {}
    if options.install:
        name, content = wheel()
        request = {"name": name, "wheel": base64.b64encode(content).decode(), "extras": _extras()}
        for worker in config.workers:
            if worker.host not in installing:
                ports = [neighbour.port for neighbour in config.workers if neighbour.host == worker.host]
                installing[worker.host] = asyncio.ensure_future(
                    call(worker.host, "install", {**request, "ports": ports}, worker.python, connecting, timeout_s=None)
                )
        print(f"installing {name}{request['extras']}, which may take minutes", flush=True)

    async def start(worker: WorkerAddress) -> str:
        await _check_resolves(worker.host)
        if options.install:
            await asyncio.shield(installing[worker.host])
        arguments = ["--advertise", worker.advertise] if worker.advertise else []
        arguments += worker.wish.arguments()
        arguments += ["--insecure-plaintext"] if security.insecure_plaintext else []
        request = {"port": worker.port, "token": token, "arguments": arguments, "systemd": options.systemd}
        answer = await call(worker.host, "up", request, worker.python, connecting)
        warning = answer.get("warning")
        return f"{answer['did']} (pid {answer['pid']}){f'; {warning}' if warning else ''}"

    try:
        return await _for_each_worker(config.workers, start)
    finally:
        for task in installing.values():
            task.cancel()
        await asyncio.gather(*installing.values(), return_exceptions=True)


async def _check_resolves(host: str) -> None:
    """Check that a name is not one that only ssh knows, since runs dial the worker without ssh.

    Raises:
        ConfigError: Only ssh knows it.
    """
    try:
        await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError:
        from ddlf.cluster.launch.remote import hostname_of

        if address := await hostname_of(host):  # otherwise ssh itself will say that the name is unknown
            raise ConfigError(
                f"only ssh knows the name {host!r}, and runs connect without ssh", hint=f"write host: {address}"
            ) from None


def wheel() -> tuple[str, bytes]:
    """Return the name and the content of a wheel of this DDLF, made of its installed files.

    Raises:
        ConfigError: DDLF is not installed here.
    """
    import ddlf

    try:
        distribution = importlib.metadata.distribution("ddlf")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("DDLF is not installed here, so it cannot be copied", hint="install it with pip") from None
    package = Path(ddlf.__file__).parent
    files = {
        f"ddlf/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    info = f"ddlf-{distribution.version}.dist-info"
    for name in ("METADATA", "entry_points.txt"):
        files[f"{info}/{name}"] = (distribution.read_text(name) or "").encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: ddlf\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    rows = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return f"ddlf-{distribution.version}-py3-none-any.whl", archive.getvalue()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def _extras() -> str:
    """Return the extras of workers whose packages are all installed here, as pip takes them, such as ``[parquet]``."""
    from packaging.requirements import Requirement

    required = [Requirement(text) for text in importlib.metadata.requires("ddlf") or ()]
    extras = []
    for extra in EXTRAS:
        names = [
            requirement.name for requirement in required if requirement.marker and _is_for(requirement.marker, extra)
        ]
        if names and all(map(_is_installed, names)):
            extras.append(extra)
    return f"[{','.join(extras)}]" if extras else ""


def _is_for(marker: Any, extra: str) -> bool:
    return bool(marker.evaluate({"extra": extra})) and not marker.evaluate({"extra": ""})


def _is_installed(name: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(name))
    return False


UP = Command(
    description="Start the workers of the cluster file on their machines, by ssh. They stay until ddlf down. ssh reads its usual "
    "configuration, with names, users and jump hosts. It must need no password.",
    examples=(
        "ddlf up -c cluster.yaml",
        "ddlf up --install             # first install this DDLF there",
        "ddlf up --systemd             # they also start with the machine",
    ),
    options=_up_options,
    run=up,
)


# -- down -------------------------------------------------------------------------------------------------------------


def _down_options(parser: Parser) -> None:
    _options(parser)
    _token_option(parser)
    parser.add("--force", action="store_true", help="also while a run uses the workers; that run then fails")
    parser.add("--timeout", type=number(1), default=5, metavar="S", help="seconds to wait for an answer (default: 5)")


async def down(options: argparse.Namespace) -> int:
    """Run ``ddlf down``: end the workers that ``ddlf up`` has started. If one is in use, end none of them."""
    from ddlf.cluster.launch.remote import CONNECTING, call

    config = _listed(options)
    if not options.force:
        await _check_unused(options)
    connecting = asyncio.Semaphore(CONNECTING)

    async def end(worker: WorkerAddress) -> str:
        answer = await call(worker.host, "down", {"port": worker.port}, worker.python, connecting)
        return "does not run" if answer["pid"] is None else f"ended (pid {answer['pid']})"

    return await _for_each_worker(config.workers, end)


async def _check_unused(options: argparse.Namespace) -> None:
    """Refuse to end workers that a run uses.

    Raises:
        LeaseError: A run uses some of them.
    """
    from ddlf.cli.workers import in_use
    from ddlf.cluster.cluster import Cluster

    workers = Cluster.from_config(options.config, token_file=options.token_file, guest=True).workers
    used = await in_use(workers, options.timeout)
    for worker, holder in used.items():
        print(f"{worker.id:>3}  {worker.label:<21}  in use by {holder}")
    if used:
        raise LeaseError(
            f"{len(used)} of {len(workers)} workers are in use, so none was ended", hint="--force ends those runs"
        )


DOWN = Command(
    description="End the workers that ddlf up has started. It refuses while a run uses them.",
    examples=("ddlf down -c cluster.yaml", "ddlf down --force    # even if it is somebody else's run"),
    options=_down_options,
    run=down,
)


# -- runcmd -----------------------------------------------------------------------------------------------------------


def _runcmd_options(parser: Parser) -> None:
    _options(parser)
    parser.add("words", nargs="+", metavar="-- COMMAND", help="the command; a single word may be a line for the shell")


async def runcmd(options: argparse.Namespace) -> int:
    """Run ``ddlf runcmd``: run a command on all machines of the cluster file, and print its output line by line."""
    from ddlf.cluster.launch.remote import CONNECTING

    connecting = asyncio.Semaphore(CONNECTING)
    labels: dict[str, list[str]] = {}
    for worker in _listed(options).workers:
        labels.setdefault(worker.host, []).append(worker.name or worker.host)
    # Some workers may share a machine. Then its address says more than one of their names.
    hosts = {host: names[0] if len(names) == 1 else host for host, names in labels.items()}
    words: list[str] = options.words
    command = words[0] if len(words) == 1 else shlex.join(words)
    width = max(map(len, hosts.values()))
    codes = await asyncio.gather(
        *(_run_on(host, command, f"{label:<{width}}  ", connecting) for host, label in hosts.items())
    )
    return FAILED if any(codes) else 0


async def _run_on(host: str, command: str, prefix: str, connecting: asyncio.Semaphore) -> int:
    from ddlf.cluster.launch.processes import end, exit_code
    from ddlf.cluster.launch.remote import NOISE, SSH_FAILED, explain, lines_of, start_ssh

    last: deque[str] = deque(maxlen=40)
    login = contextlib.AsyncExitStack()

    async def show(stream: asyncio.StreamReader, to: TextIO) -> None:
        async for line in lines_of(stream):
            if to is sys.stdout and line.endswith(BEGUN):
                await login.aclose()
                line = line.removesuffix(BEGUN)  # what login scripts have printed before it
                if not line:
                    continue
            last.append(line)
            if not (to is sys.stderr and NOISE.match(line)):
                print(f"{prefix}{line}", file=to, flush=True)

    async with login:
        await login.enter_async_context(connecting)
        process = await start_ssh(host, f"echo {BEGUN}; {command}", stdin=asyncio.subprocess.DEVNULL)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            await asyncio.gather(show(process.stdout, sys.stdout), show(process.stderr, sys.stderr))
            code = await exit_code(process)
        finally:
            await end(process)
    if code == SSH_FAILED:
        print(f"{prefix}failed: {explain(host, code, list(last)).error()}", file=sys.stderr, flush=True)
    elif code:
        print(f"{prefix}failed: exit code {code}", file=sys.stderr, flush=True)
    return code


RUNCMD = Command(
    description="Run a command on each machine of the cluster file, by ssh. Each line of its output begins with the machine.",
    examples=(
        "ddlf runcmd -- nvidia-smi -L",
        "ddlf runcmd 'df -h ~'    # one word is a line for the shell there",
    ),
    options=_runcmd_options,
    run=runcmd,
)
