"""A second process that loads an app's data and makes its model, as each worker does: ``python -m ddlf.extras.advice.again``. What it sees
differ is told.

The app travels as it does to workers, pickled. The second process has another hash seed, has imported and set nothing, and takes its machine for
another one: of another name, address and number of processors.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ddlf.data.parts import contents
from ddlf.errors import DDLFError, NotPicklable, tracebacks
from ddlf.rpc.code import is_installed, pickle_object, unpickle
from ddlf.training.roles.build import describe_weights

SECONDS = 300.0
"""After which the second process is taken to hang."""
MOST_FILES = 5
METHODS = ("load_dataset", "create_model")
ASKED_THROUGH = {"os.py", "_collections_abc.py", "<frozen os>", "<frozen _collections_abc>"}
"""Files between who asks for a variable of the environment, and the answer."""
OF_ALL_MACHINES = (
    "DDLF_",
    "KERAS_",
    "TF_",
    "XLA_",
    "JAX_",
    "CUDA_",
    "OMP_",
    "MKL_",
    "PYTHON",
    "PATH",
    "HOME",
    "TMP",
    "LANG",
    "LC_",
    "XDG_",
)
"""How variables begin that are of libraries or the system, and that each machine has as it needs them."""


def packed(app: Any, seen: dict[str, Any]) -> bytes | None:
    """The app as it travels to workers, before it has loaded anything; None if it cannot, which is noted.

    Args:
        app: The user's ``IApp``.
        seen: Where sentences are noted.
    """
    try:
        return pickle_object(app)
    except NotPicklable as error:
        seen["travel"] = (error.message,)
        return None


async def seen_again(app: Any, pickled: bytes, asks_for_devices: bool = False) -> dict[str, Any]:
    """What a second process has seen that this one has not, as sentences by what they are about.

    Args:
        app: With data and model, as this process has them.
        pickled: The app before that.
        asks_for_devices: Whether its code asks which devices there are: then a third one is told that there is a graphics card.
    """
    mine = _facts(app)
    found = await _asked(mine, pickled)
    if asks_for_devices and not {"failed", "data", "model"} & set(found):
        with_card = await _asked(mine, pickled, "card")
        found |= {
            name: tuple(one.replace("a second process", "a process with a graphics card") for one in with_card[name])
            for name in ("data", "model")
            if name in with_card
        }
    return found


async def _asked(mine: dict[str, Any], pickled: bytes, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "ddlf.extras.advice.again", sys.path[0], *more]
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(pickled), SECONDS)
    except TimeoutError:
        return {"failed": (f"load_dataset and create_model took more than {SECONDS:.0f} s in a second process",)}
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        return {
            "failed": (f"a second process ended with exit code {process.returncode} in load_dataset or create_model",)
        }
    return differing(mine, json.loads(out.decode().rpartition("\n")[2]))


def differing(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """What two processes have made of one app, as sentences by what they are about.

    Args:
        mine: Facts of this one.
        theirs: Those of the second.
    """
    if error := theirs.get("error"):
        return {"failed": (f"in a second process {error}",)}
    found: dict[str, Any] = {}
    other = [name for name in {**mine["data"], **theirs["data"]} if mine["data"].get(name) != theirs["data"].get(name)]
    if other:
        found["data"] = (f"a second process has other values in {', '.join(other)}",)
    if (a := mine["weights"]) != (b := theirs["weights"]):
        first = next((one[0] for one, two in zip(a, b, strict=False) if one[1:] != two[1:]), "")
        if len(a) != len(b) or first:
            what = f"{len(b)} weights instead of {len(a)}" if len(a) != len(b) else f"another shape or type of {first}"
            found["model"] = (f"a second process has {what}",)
    if asked := theirs.get("asked"):
        found["asked"] = tuple(f"{who} asks for {what}" for who, what in asked)
    if files := theirs["files"]:
        found["files"] = (f"load_dataset and create_model read {', '.join(files[:MOST_FILES])}",)
    return found


def _facts(app: Any) -> dict[str, Any]:
    return {"data": contents(app), "weights": describe_weights(app.model), "files": []}


def is_of_this_machine(path: str, script: str) -> bool:
    """Whether a file that was read is one that other machines need not have.

    Args:
        path: Of the file.
        script: Folder of the script; Python files there travel.
    """
    real = os.path.realpath(path)
    usual = (
        "/proc/",
        "/sys/",
        "/dev/",
        "/etc/",
        "/usr/",
        "/lib",
        os.path.realpath(sys.prefix),
        os.path.realpath(sys.base_prefix),
    )
    home = os.path.expanduser("~")
    places = [os.environ.get("DDLF_DATA", ""), f"{home}/.keras", f"{home}/.cache", os.environ.get("XDG_CACHE_HOME", "")]
    known = [*usual, *(os.path.realpath(place) for place in places if place), str(Path(__file__).parents[2])]
    is_code = real.endswith((".py", ".pyc", ".so", ".pth"))
    return not (is_code or is_installed(real) or real.startswith(tuple(known))) and os.path.isfile(real)


def _on_another_machine(tell: Callable[[str], None]) -> None:
    """Have this process take its machine for another one, and tell what the user's code asks of it."""
    import platform
    import socket
    import uuid

    name, processors = "another-machine", (os.cpu_count() or 1) + 1

    def telling(what: str, answer: Any) -> Callable[..., Any]:
        def asked(*of: Any) -> Any:
            tell(what)
            return answer

        return asked

    socket.gethostname = socket.getfqdn = telling("the name of its machine", name)
    platform.node = telling("the name of its machine", name)
    uuid.getnode = telling("the address of its machine", 0x0242AC110002)
    os.cpu_count = lambda: processors
    os.environ["HOSTNAME"] = name
    if hasattr(os, "uname"):
        own = os.uname()
        os.uname = telling("the name of its machine", os.uname_result((own.sysname, name, *own[2:])))

    class Told(type(os.environ)):  # type: ignore[misc]
        """Variables of the environment, of which it is told who reads them."""

        def __getitem__(self, key: str) -> str:
            if not str(key).startswith(OF_ALL_MACHINES):
                tell(f"the environment variable {key}")
            value: str = super().__getitem__(key)
            return value

    os.environ.__class__ = Told


def _asker() -> str:
    """The method of the app in which the user's own code asks for something; empty if it is not the user's code that asks."""
    frame: FrameType | None = sys._getframe(3)  # behind what asks, and what stands in its place
    while frame is not None and os.path.basename(frame.f_code.co_filename) in ASKED_THROUGH:
        frame = frame.f_back
    if frame is None or tracebacks.is_machinery(file := frame.f_code.co_filename) or tracebacks.LIBRARIES.search(file):
        return ""
    if file.startswith(os.path.realpath(sys.base_prefix)):
        return ""
    while frame is not None:
        if frame.f_code.co_name in METHODS:
            return frame.f_code.co_name
        frame = frame.f_back
    return ""


def _with_a_card() -> None:
    """Have TensorFlow say that there is a graphics card, to those who ask by its name."""
    import tensorflow as tf

    real, card = tf.config.list_physical_devices, tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    tf.config.list_physical_devices = tf.config.experimental.list_physical_devices = lambda kind=None: (
        [card] if kind == "GPU" else real(kind)
    )
    tf.test.is_gpu_available = lambda *of, **more: True
    tf.config.experimental.set_memory_growth = lambda *of: None
    tf.config.set_visible_devices = lambda *of: None


def _main() -> None:
    """Load and build what standard input holds, and print the facts of it."""
    script, out = sys.argv[1], os.dup(1)
    os.dup2(2, 1)  # what the app prints is not an answer
    if script:
        sys.path.insert(0, script)
    opened: dict[str, None] = {}
    listening = False

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if listening and event == "open" and isinstance(arguments[0], str) and "w" not in str(arguments[1] or "r"):
            opened[os.path.abspath(arguments[0])] = None

    sys.addaudithook(hear)
    from ddlf.data.parts import check_data
    from ddlf.extras.advice.collect import build, load

    asked: dict[tuple[str, str], None] = {}

    def tell(what: str) -> None:
        if listening and (who := _asker()):
            asked[who, what] = None

    _on_another_machine(tell)
    if sys.argv[2:]:
        with contextlib.suppress(ImportError):
            _with_a_card()
    try:
        app = unpickle(sys.stdin.buffer.read())
        listening = True
        asyncio.run(load(app))
        check_data(app)
        asyncio.run(build(app))
        listening = False
        files = [path for path in opened if is_of_this_machine(path, script)]
        answer = _facts(app) | {"files": files, "asked": list(asked)}
    except (Exception, DDLFError) as error:
        answer = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    with contextlib.closing(os.fdopen(out, "w")) as file:
        file.write(f"\n{json.dumps(answer)}")


if __name__ == "__main__":
    _main()
