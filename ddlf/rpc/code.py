"""Serializes functions and objects. No other file pickles or unpickles. Runs on both sides.

Workers unpickle. A master does so only if it allows pickled results.

Code is addressed by its content. cloudpickle pickles a function, the SHA-256 of the bytes is its name, and a worker
that already has it receives only the name. ``CodeSender`` (one for each connection) remembers the code that the other
side has. ``CodeCache`` (one in a worker) keeps the received code. A cache that has dropped a function answers
``CodeMissing``, and the sender sends that call again in full.

Modules that are not installed, such as those next to the user's script, travel by value. A worker therefore needs no
copy of the user's files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
import sys
import sysconfig
import types
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from ddlf.errors import DDLFError, NotPicklable, ProtocolError
from ddlf.rpc.messages import Tag, where_modules_come_from

Cached = type(functools.cache(len))
"""The type that ``functools.cache`` and ``lru_cache`` make. It is neither a function nor a class."""


def find_culprit(value: Any, can_pickle: Callable[[Any], bool]) -> str | None:
    """Return the path to the innermost part of ``value`` that cannot be pickled, with its class; None if there is no
    such part.
    """
    return _find(value, name_of(value), can_pickle, 0, set())


def _find(value: Any, path: str, can_pickle: Callable[[Any], bool], depth: int, visited: set[int]) -> str | None:
    if id(value) in visited or depth > 6 or can_pickle(value):
        return None
    visited.add(id(value))
    for suffix, part in _parts(value):
        culprit = _find(part, f"{path}{suffix}", can_pickle, depth + 1, visited)
        if culprit:
            return culprit
    return f"{path} (a {type(value).__module__}.{type(value).__qualname__})"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that are pickled with ``value``, each with the path to it."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
        yield "", value.__func__
    elif isinstance(value, Cached):
        yield "", value.__wrapped__
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    elif isinstance(value, type):
        # A class also lists its own descriptors, which are never pickled.
        attributes = (
            (name, item) for name, item in vars(value).items() if not isinstance(item, types.GetSetDescriptorType)
        )
        yield from ((f".{name}", item) for name, item in attributes)
    else:
        yield from _parts_of_object(value)
        yield " -> class", type(value)


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object's pickled state. ``__getstate__`` and ``__reduce__`` may omit attributes."""
    try:
        kind: Any = type(value)
        reduces = any(getattr(kind, name) is not getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
        reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if reduces else None
        state = reduced[2:3] if isinstance(reduced, tuple) else (value.__getstate__(),)
    except Exception:  # the object cannot be pickled at all
        return
    if isinstance(reduced, tuple):
        yield from ((f" -> argument {position}", item) for position, item in enumerate(reduced[1], 1))
    for part in state:
        for names in part if isinstance(part, tuple) else (part,):  # attributes, slots
            if isinstance(names, dict):
                yield from ((f".{name}", item) for name, item in names.items())
            elif names is not None:
                yield " -> state", names


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty cell
            yield f" -> variable {name!r}", cell.cell_contents
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f" -> global {name!r}", function.__globals__[name]
    for item in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield " -> a default", item
    yield from ((f".{name}", item) for name, item in vars(function).items())


def _global_names(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the global variables that a function uses, also in functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def name_of(value: Any) -> str:
    """Return the name of a function or class, or of the class of any other value."""
    has_name = isinstance(value, types.FunctionType | types.MethodType | type)
    return str(value.__qualname__ if has_name else type(value).__qualname__)


def text_of(error: Exception) -> str:
    """Return the message of an exception, even if its ``__str__`` raises."""
    try:
        return str(error)
    except Exception:
        return "no text"


HASH_BYTES = 32
CACHE_ENTRIES = 4096
CACHE_BYTES = 256 * 1024**2
MAX_CODE_BYTES = CACHE_BYTES
"""Maximum size of one pickled function, with its variables and defaults. A worker's cache cannot keep a larger one."""


class CodeMissing(DDLFError):
    """The receiver lacks code that was sent by name only. Users never see this error, because the sender sends the code
    in full.

    Attributes:
        may_have_run: False if the worker refused the request for this reason, so that it may be sent again. True if a
            method raised the error.
    """

    may_have_run = True


_CANNOT_GO = "cannot be sent to a worker"


def pickle_object(value: Any) -> bytes:
    """Pickle any object. Functions and classes of the user's own modules travel by value.

    Raises:
        NotPicklable: A part of the value cannot be sent; the text has the path to it. Or the value is a function that
            carries more data than a worker's cache can keep.
    """
    with _own_modules_by_value():
        try:
            file = io.BytesIO()
            _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
            data = file.getvalue()
        except Exception as error:  # an object's own __reduce__ may raise anything
            path = find_culprit(value, _can_pickle)
            raise NotPicklable(
                f"{path or 'the value'} {_CANNOT_GO} ({type(error).__name__}: {text_of(error)})",
                hint="create it inside the method, on the worker, or pass plain data instead",
            ) from None
    if isinstance(value, types.FunctionType | type):
        _check_size(data, name_of(value))
    return data


def _check_size(code: bytes, name: str) -> None:
    if len(code) > MAX_CODE_BYTES:
        raise NotPicklable(
            f"function {name!r} carries {len(code) / 1e6:,.1f} MB in its variables and defaults",
            hint="pass arrays as arguments, or use set_variable",
        )


def _reduce_cached(value: Any) -> str | tuple[Any, ...]:
    """Reduce a function made by ``functools.cache`` or ``lru_cache``.

    cloudpickle would send it by name. A worker can resolve such a name only in an installed module.
    """
    module = sys.modules.get(value.__module__)
    is_sent_by_value = value.__module__ == "__main__" or value.__module__ in cloudpickle.list_registry_pickle_by_value()
    resolved: Any = module
    for part in value.__qualname__.split("."):
        resolved = getattr(resolved, part, None)
    if resolved is value and not is_sent_by_value:
        return str(value.__qualname__)
    return _cache, (value.__wrapped__, value.cache_parameters()), vars(value)


def _cache(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _reduce_code(code: types.CodeType) -> tuple[Any, ...]:
    """Keep the file name of a code object, so that a worker's traceback shows the user's file and line.

    cloudpickle 3.1.3 and later write ``"<dynamic-code>"`` instead.
    """
    make, args = cloudpickle.CloudPickler.dispatch_table[types.CodeType](code)
    return make, tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args)


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap(
        {Cached: _reduce_cached, types.CodeType: _reduce_code}, cloudpickle.CloudPickler.dispatch_table
    )


def unpickle(data: bytes) -> Any:
    """Return the object that ``pickle_object`` wrote.

    Raises:
        NotPicklable: The bytes need a module or a Python version that this side lacks.
    """
    try:
        return pickle.loads(data)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        raise NotPicklable(
            f"cannot load code sent to Python {sys.version_info.major}.{sys.version_info.minor} "
            f"({type(error).__name__}: {text_of(error)})",
            hint=where_modules_come_from(missing)
            if missing
            else "install the missing package on the worker, and use the same Python version on all machines",
        ) from error


class Snapshot:
    """A copy of a function and of everything that it uses. Later changes do not affect the sent function.

    Args:
        function: The function. It is pickled once; ``data`` has the bytes.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.data = pickle_object(function)

    def __reduce__(self) -> Any:
        return pickle.loads, (self.data,)


class Pickled(bytes):
    """An object that is pickled once for many calls. A worker receives the bytes with the first call; later calls send
    only their name, like a function's.

    Args:
        value: Any object that has a ``__name__``.
    """

    def __new__(cls, value: Any) -> Pickled:
        pickled = super().__new__(cls, pickle_object(value))
        _check_size(pickled, value.__name__)
        return pickled

    @functools.cached_property
    def address(self) -> bytes:
        """The SHA-256 of the pickled bytes, under which a worker finds them again."""
        return hashlib.sha256(self).digest()


class PickleOnce:
    """Pickles the objects of one call to several workers. It pickles each object once, for the first worker.

    It knows objects by their identity. Use it for one call only, because the arguments may change afterwards.
    """

    def __init__(self) -> None:
        self._pickled: dict[int, tuple[Any, bytes]] = {}  # by id; keeps the object, which keeps its id

    def __call__(self, value: Any) -> bytes:
        """Pickle ``value`` with ``pickle_object``, or return the bytes from its first pickling."""
        if id(value) not in self._pickled:
            self._pickled[id(value)] = value, pickle_object(value)
        return self._pickled[id(value)][1]


class CodeSender:
    """Remembers the code that the other side of one connection has. ``dump`` is the ``dump_object`` for
    ``values.dumps``.
    """

    def __init__(self) -> None:
        self._sent: OrderedDict[bytes, None] = OrderedDict()

    def dump(self, value: Any, pickle: Callable[[Any], bytes] = pickle_object) -> tuple[Tag, bytes]:
        """Encode functions and classes by content address, and pickle other objects."""
        data = pickle(value)
        if isinstance(data, Pickled):
            address = data.address
        elif isinstance(value, types.FunctionType | type):
            address = hashlib.sha256(data).digest()
        else:
            return Tag.OBJECT, data
        if address in self._sent:
            self._sent.move_to_end(address)
            return Tag.CODE, address
        self._sent[address] = None
        if len(self._sent) > CACHE_ENTRIES:  # the other side's cache has dropped this code, too
            self._sent.popitem(last=False)
        return Tag.CODE, address + data

    def forget(self) -> None:
        """Forget which code the other side has, so that all code is sent in full again."""
        self._sent.clear()


class CodeCache:
    """The received functions by content address. ``load`` is the ``load_object`` for ``values.loads``.

    Args:
        unpickle: Makes an object from its bytes.
    """

    def __init__(self, unpickle: Callable[[bytes], Any] = unpickle) -> None:
        self._unpickle = unpickle
        self._loaded: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def load(self, tag: Tag, data: bytes) -> Any:
        """Return the object that arrived as these bytes, or as the address of bytes in the cache. A cached function is
        not unpickled again.

        Raises:
            CodeMissing: Only an address arrived, and the cache lacks the code.
            ProtocolError: The bytes do not match their address.
        """
        if tag is Tag.OBJECT:
            return self._unpickle(data)
        address, blob = data[:HASH_BYTES], data[HASH_BYTES:]
        if address in self._loaded:
            self._loaded.move_to_end(address)
            return self._loaded[address][0]
        if not blob:
            raise CodeMissing(f"code {address.hex()[:8]} is not in the cache")
        if hashlib.sha256(blob).digest() != address:
            raise ProtocolError("code does not match its address")
        value = self._unpickle(blob)
        self._loaded[address] = value, len(blob)
        self._bytes += len(blob)
        while self._bytes > CACHE_BYTES or len(self._loaded) > CACHE_ENTRIES:
            _, (_, size) = self._loaded.popitem(last=False)
            self._bytes -= size
        return value


def dump_result(value: Any) -> tuple[Tag, bytes]:
    """Pickle an object in a result. This is the ``dump_object`` of a worker whose master allows pickled results."""
    try:
        return Tag.OBJECT, pickle_object(value)
    except NotPicklable as error:
        error.message = error.message.replace(_CANNOT_GO, "cannot be sent back as a result")
        error.hint = "return plain data, such as the arguments of its constructor"
        raise


def load_result(tag: Tag, data: bytes) -> Any:
    """Unpickle an object in a result. This is the ``load_object`` of a master that allows pickled results."""
    if tag is not Tag.OBJECT:
        raise ProtocolError("a worker may not send code")
    return unpickle(data)


@contextlib.contextmanager
def _own_modules_by_value() -> Iterator[None]:
    """Let cloudpickle send modules that are not installed by value while one value is pickled."""
    registered_names = cloudpickle.list_registry_pickle_by_value()
    registered = [module for module in own_modules() if module.__name__ not in registered_names]
    for module in registered:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


_INSTALLED = tuple(
    {
        f"{Path(path).resolve()}{os.sep}"
        for path in (*sysconfig.get_paths().values(), sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
        # A prefix such as /usr would make every script below it count as installed.
        if len(Path(path).parts) > 2
    }
)
_is_own_by_file: dict[str, bool] = {}
_scan: tuple[int, str, list[Any]] = (0, "", [])


def own_modules() -> list[Any]:
    """Return the imported modules that are not installed.

    Each call examines only the modules imported since the last call. There are thousands of modules, and after a fork
    both processes share their memory until it is accessed.
    """
    global _scan
    count, last, modules = _scan
    module_names = list(sys.modules)  # in one step: another thread may import
    added = len(module_names) - count
    new_names = module_names[::-1][: max(0, added) + 1]
    if added >= 0 and new_names[-1] == last:
        new_names.pop()
    else:  # some modules may have been removed, too
        new_names, count, modules = module_names[::-1], 0, []
    if new_names:
        modules = [
            *modules,
            *(module for name in reversed(new_names) if _is_own(name, module := sys.modules.get(name))),
        ]
        _scan = count + len(new_names), new_names[0], modules
    return modules


def _is_own(name: str, module: Any) -> bool:
    """Return whether a module is not installed. A module with two names, such as the main module in a process of
    ``multiprocessing``, counts under its ``__name__`` only.
    """
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or name == "__main__" or getattr(module, "__name__", None) != name:
        return False
    if file not in _is_own_by_file:
        _is_own_by_file[file] = file.endswith(".py") and not is_installed(file)
    return _is_own_by_file[file]


def is_installed(file: str) -> bool:
    """Return whether a file belongs to Python, to this environment or to DDLF, and thus not to the user."""
    folder, name = os.path.split(file)
    path = os.path.realpath(file) if os.path.islink(file) else os.path.join(_resolved(folder), name)
    return path.startswith(_INSTALLED) or "site-packages" in path


_resolved = functools.cache(os.path.realpath)
"""Resolves a path. The cache helps because thousands of modules are in only hundreds of folders."""


def _can_pickle(value: Any) -> bool:
    try:
        _Pickler(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except Exception:
        return False
    return True
