"""Imports modules from below the script's folder on the master, at their first use. Runs in the executor.

The executor asks its daemon over their channel, and the daemon asks the master that has the worker. The daemon always
answers, so an import works on any thread, even while a method blocks the event loop. The import waits for the answer as
it would wait for a file. Modules installed on the worker take precedence over the master's.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import socket
import struct
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.resources.abc import Traversable, TraversableResources
from pathlib import Path, PurePosixPath
from typing import Any

from ddlf.errors import DDLFError
from ddlf.rpc.messages import loads
from ddlf.worker.executor_process import MAX_QUESTION_BYTES

LENGTH = struct.Struct("<Q")


def ask_daemon(channel: socket.socket, question: str, name: str, file: str = "") -> Any:
    """Ask the master a question through the daemon, such as for the source of a module, and wait for the answer.

    Returns:
        The result of ``Sources.answer``; None if the module does not exist or there is no master.
    """
    reply, daemon_end = socket.socketpair()
    with reply:
        with daemon_end:
            text = json.dumps([question, name, file]).encode()
            try:
                if len(text) > MAX_QUESTION_BYTES:
                    return None
                socket.send_fds(channel, [text], [daemon_end.fileno()])
            except OSError:
                return None
        data = b"".join(iter(lambda: reply.recv(1024**2), b""))
    if len(data) < LENGTH.size or LENGTH.unpack_from(data)[0] != len(data) - LENGTH.size:
        return None
    try:
        return loads([data[LENGTH.size :]])
    except DDLFError:
        return None


class MasterFinder(importlib.abc.MetaPathFinder):
    """Finds modules in the script's folder on the master, for ``import`` statements in this executor.

    Args:
        ask: Asks the master, like ``ask_daemon`` without the channel.
        turn: Identifies the running request, so that a request with many imports asks for the list of modules once;
            None for no request.

    Attributes:
        enabled: Whether the master answers questions about modules, and whether the running method may ask them.
    """

    def __init__(self, ask: Callable[..., Any], turn: Callable[[], object]) -> None:
        self.ask = ask
        self.enabled: Callable[[], bool] = lambda: True
        self._turn = turn
        self._names: tuple[object, frozenset[str]] = (None, frozenset())
        self._loaded: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self.enabled():
            return None
        parent = fullname.rpartition(".")[0]
        if parent:
            spec = getattr(sys.modules.get(parent), "__spec__", None)
            if not isinstance(getattr(spec, "loader", None), MasterLoader):
                return None
        elif fullname not in self._top():
            return None
        answer = self.ask("module", fullname)
        if not isinstance(answer, dict):
            return None
        self._loaded.add(fullname)
        loader = MasterLoader(self, answer)
        is_package = loader.kind != "source"
        return importlib.machinery.ModuleSpec(fullname, loader, origin=loader.file, is_package=is_package)

    def _top(self) -> frozenset[str]:
        turn = self._turn()
        if turn is None or self._names[0] != turn:
            self._names = turn, frozenset(self.ask("names", "") or ())
        return self._names[1]

    def forget(self) -> None:
        """Remove all modules of this master from the process. The next master has its own."""
        names, self._loaded = self._loaded, set()
        # Do not examine all modules: a fork shares their memory with its parent until the memory is accessed.
        for name in names:
            loader = getattr(getattr(sys.modules.get(name), "__spec__", None), "loader", None)
            if isinstance(loader, MasterLoader) and loader.finder is self:
                del sys.modules[name]


class MasterLoader(importlib.abc.InspectLoader):
    """Loads one module from its source text on the master."""

    def __init__(self, finder: MasterFinder, answer: dict[str, Any]) -> None:
        self.finder = finder
        self.kind = str(answer["kind"])
        self.file = str(answer["file"])
        self._source = bytes(answer["source"])

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the module's code. Tracebacks show the master's file."""
        if self.kind != "namespace":
            module.__file__ = self.file
            exec(compile(self._source, self.file, "exec", dont_inherit=True), vars(module))

    def get_source(self, fullname: str) -> str:
        """Return the source text of the module, for tracebacks and ``inspect``."""
        return importlib.util.decode_source(self._source)

    def is_package(self, fullname: str) -> bool:
        """Return whether this module is a package, so that it can contain modules."""
        return self.kind != "source"

    def get_data(self, path: str) -> bytes:
        """Return the bytes of a file in the package's folder, for ``pkgutil.get_data``."""
        package, file = self._package, os.path.relpath(path, os.path.dirname(self.file))
        return MasterFile(self.finder, package, PurePosixPath(file)).read_bytes()

    def get_resource_reader(self, fullname: str) -> TraversableResources:
        """Return a reader of the package's data files, for ``importlib.resources``."""
        self._package = fullname
        return MasterResources(self.finder, fullname)

    _package = ""


class MasterResources(TraversableResources):
    """The data files of a package on the master, for ``importlib.resources`` on this worker."""

    def __init__(self, finder: MasterFinder, package: str) -> None:
        self._root = MasterFile(finder, package, PurePosixPath())

    def files(self) -> MasterFile:
        """Return the folder of the package on the master."""
        return self._root


class MasterFile(Traversable):
    """A data file or folder of a package of the master. Its bytes are fetched when they are read."""

    def __init__(self, finder: MasterFinder, package: str, path: PurePosixPath) -> None:
        self._finder = finder
        self._package = package
        self._path = path

    @property
    def name(self) -> str:
        """The name of this file or folder, without the folders above it."""
        return self._path.name or self._package.rpartition(".")[2]

    def _files_below(self) -> list[PurePosixPath]:
        files = [PurePosixPath(file) for file in self._finder.ask("files", self._package) or ()]
        return [file.relative_to(self._path) for file in files if file.is_relative_to(self._path)]

    def iterdir(self) -> Iterator[MasterFile]:
        """Yield the files and folders in this folder."""
        for name in sorted({file.parts[0] for file in self._files_below() if file.parts}):
            yield self.joinpath(name)

    def is_dir(self) -> bool:
        """Return whether this entry is a folder: the package's own, or one with files below it."""
        return self._path == PurePosixPath() or any(file.parts for file in self._files_below())

    def is_file(self) -> bool:
        """Return whether this entry is a file."""
        return PurePosixPath() in self._files_below()

    def joinpath(self, *descendants: str | os.PathLike[str]) -> MasterFile:
        """Return an entry below this folder."""
        return MasterFile(self._finder, self._package, self._path.joinpath(*descendants))

    def __truediv__(self, child: str | os.PathLike[str]) -> MasterFile:
        return self.joinpath(child)

    def read_bytes(self) -> bytes:
        """Return the bytes of the file, fetched from the master.

        Raises:
            FileNotFoundError: The package has no such data file on the master.
        """
        data = self._finder.ask("data", self._package, str(self._path))
        if not isinstance(data, bytes):
            raise FileNotFoundError(f"package {self._package} has no data file {str(self._path)!r} on the master")
        return data

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open the file for reading, like ``open``."""
        stream = io.BytesIO(self.read_bytes())
        return stream if "b" in mode else io.TextIOWrapper(stream, *args, **kwargs)

    def read_text(self, encoding: str | None = None) -> str:
        """Return the content of the file as text."""
        return self.read_bytes().decode(encoding or "utf-8")

    def __repr__(self) -> str:
        return f"MasterFile({self._package!r}, {str(self._path)!r})"


def leave_current_folder() -> None:
    """Stop importing from the folder in which the worker was started. A worker on another machine could not find those
    modules.
    """
    current, package_folder = os.getcwd(), str(Path(__file__).resolve().parents[2])  # DDLF itself may be in this folder
    if sys.path and sys.path[0] in ("", current) and current != package_folder and not sys.flags.safe_path:
        del sys.path[0]
