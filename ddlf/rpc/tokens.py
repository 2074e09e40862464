"""Tokens: creates, finds and stores the secret that master and workers share. Runs on both.

Rules:
    A token gives shell access, because DDLF runs code. It is never printed, sent or taken from a command line.
    The first configured source decides. If that source is bad, DDLF raises an error and never tries the next one. A
    fallback would start a cluster with another secret, or with none, and nobody would notice.
    A token file has one line, or two during a replacement. The first line proves this side's identity, both are
    accepted.

The daemon imports this file, so it uses only the standard library, and `platformdirs` when a default path is needed.
"""

import hashlib
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ddlf.errors import AuthError

MIN_TOKEN_CHARACTERS = 32
MAX_FILE_BYTES = 4096  # printable ASCII without spaces: URL-safe, hexadecimal and base64 tokens

_TOKEN = re.compile(rb"[!-~]+")  # printable ASCII without spaces: url-safe, hexadecimal and base64 tokens
_FROM_ENVIRONMENT: dict[str, str] = {}  # the value of $DDLF_TOKEN from before its removal, for later calls


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """One token, or an old and a new one while they are being replaced. Its text form shows no secret.

    Args:
        all: The secrets, best first. A listener accepts each of them.
        source: Their origin, for messages: "token file /home/ann/.config/ddlf/token".
    """

    all: tuple[bytes, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.all:
            raise ValueError("Tokens needs at least one token")

    @property
    def primary(self) -> bytes:
        """The token that proves this side's identity when it connects."""
        return self.all[0]

    @property
    def fingerprint(self) -> str:
        """The first 4 hex digits of the primary token's SHA-256: enough to see that two machines differ."""
        return hashlib.sha256(self.primary).hexdigest()[:4]

    def __repr__(self) -> str:
        return f"<Tokens: {len(self.all)} from {self.source}, fingerprint {self.fingerprint}>"


def new_token() -> str:
    """Return a new token: 32 random bytes as 43 URL-safe characters."""
    return secrets.token_urlsafe(32)


def default_path() -> Path:
    """Return the path of a user's token: ``~/.config/ddlf/token``, or below ``$XDG_CONFIG_HOME``.

    Raises:
        AuthError: This user has no home folder, for example in a container with a foreign user id.
    """
    return _user_folder("config") / "token"


def write_token(path: str | Path | None = None, token: str | None = None) -> Path:
    """Write a token to a file that only this user can read.

    Args:
        path: The file to create; `default_path` if None. Its folder is created too, for this user only.
        token: The text of another machine's token; a new token if None.

    Returns:
        The path of the file.

    Raises:
        AuthError: The file exists (a token is never overwritten) or cannot be written, or ``token`` is not a valid
            token.
    """
    path = _expand(default_path() if path is None else path)
    if token is not None:
        tokens = _parse(token.encode("utf-8", "surrogateescape"), "the pasted text")
        token = "\n".join(token_bytes.decode() for token_bytes in tokens)
    try:
        _create(path, token or new_token())
    except FileExistsError:
        raise AuthError(
            f"{path} already holds a token, which is not overwritten",
            hint="to replace it, put the new token on a first line above the old one, or delete the file",
        ) from None
    return path


def find_tokens(token_file: str | Path | None = None) -> Tokens | None:
    """Return the tokens of the first configured source, or None if there is no source.

    The sources are ``token_file``, then $DDLF_TOKEN_FILE, then $DDLF_TOKEN, then `default_path`. $DDLF_TOKEN is always
    removed from the environment, so that no child process inherits it. Its text is also overwritten in the memory that
    the kernel shows in ``/proc/PID/environ``.

    Args:
        token_file: A file named by a flag or in cluster.yaml.

    Raises:
        AuthError: The first configured source is missing, unreadable, readable by others, or contains no token.
    """
    if "DDLF_TOKEN" in os.environ:
        # Every other reader of the variable got a copy.
        _FROM_ENVIRONMENT["DDLF_TOKEN"] = os.environ["DDLF_TOKEN"]
        _wipe_variable(b"DDLF_TOKEN")
        del os.environ["DDLF_TOKEN"]

    if token_file is not None:
        return _read_named(_expand(token_file), "token file")
    if (path_text := os.environ.get("DDLF_TOKEN_FILE")) is not None:
        if not path_text:
            raise AuthError("DDLF_TOKEN_FILE is set but empty", hint="name a file, or unset it")
        return _read_named(_expand(path_text), "DDLF_TOKEN_FILE")
    if (token := _FROM_ENVIRONMENT.get("DDLF_TOKEN")) is not None:
        return Tokens(_parse(token.encode("utf-8", "surrogateescape"), "DDLF_TOKEN"), "DDLF_TOKEN")
    try:
        path = default_path()
    except AuthError:
        return None  # without a home folder there is no token in it
    try:
        return _read(path, "token file")
    except FileNotFoundError:
        return None


def _wipe_variable(name: bytes) -> None:
    """Overwrite a variable in the memory that the process was started with. Removing a variable leaves its text."""
    import ctypes

    with suppress(OSError, AttributeError):  # this C library works differently
        library = ctypes.CDLL(None)
        library.getenv.restype = ctypes.c_void_p
        address = library.getenv(name)
        if address:
            ctypes.memset(address, 0, len(ctypes.string_at(address)))


def loopback_tokens() -> Tokens:
    """Return the token that DDLF creates for this user's workers that listen on loopback only, where no other machine
    can connect. ``automatic_token`` describes it.
    """
    return automatic_token("loopback token")


def is_automatic(token: bytes) -> bool:
    """Return whether ``token`` is one of ``loopback_tokens``, the default where the user gives no token."""
    with suppress(AuthError):
        path = state_folder() / "loopback-token"
        return os.path.lexists(path) and token in _read_named(path, "loopback token").all
    return False


def automatic_token(label: str) -> Tokens:
    """Return a token that only this user can read, so that other users of this machine have no access. Create the token
    on first use.

    The file is in ``~/.local/state/ddlf/`` (or below ``$XDG_STATE_HOME``). Processes that start at the same time all
    get the same token.

    Args:
        label: The name in messages, such as ``"loopback token"``. The file name has a hyphen for the
            space.

    Raises:
        AuthError: The file cannot be created, or cannot be used.
    """
    path = state_folder() / label.replace(" ", "-")
    if not os.path.lexists(path):
        with suppress(FileExistsError):  # another process was faster; its token is used
            _create(path, new_token())
    return _read_named(path, label)


def state_folder() -> Path:
    """Return the folder for state between commands: ``~/.local/state/ddlf``, or below ``$XDG_STATE_HOME``. It may not
    exist.

    Raises:
        AuthError: This user has no home folder.
    """
    return _user_folder("state")


def _user_folder(kind: Literal["config", "state"]) -> Path:
    """Return this user's folder for DDLF's files of one kind. It may not exist.

    Raises:
        AuthError: This user has no home folder.
    """
    import platformdirs

    find = platformdirs.user_config_path if kind == "config" else platformdirs.user_state_path
    try:
        folder = find("ddlf", appauthor=False)
    except RuntimeError:  # newer versions of platformdirs; older ones return a folder that begins with a literal ~
        folder = Path("~")
    if not folder.is_absolute():
        raise AuthError("this user has no home folder for a token", hint="set HOME, or name a token file")
    return folder


def shell_path(path: Path) -> str:
    """Return ``path`` for use in a shell on another machine, where the home folder may differ."""
    with suppress(RuntimeError, ValueError):
        return f"~/{_in_quotes(path.relative_to(Path.home()))}"
    return _in_quotes(path)


def _in_quotes(path: Path) -> str:
    return str(path) if re.fullmatch(r"[\w./-]+", str(path)) else f'"{path}"'


def _expand(path: str | Path) -> Path:
    """Return ``path`` with ~ replaced. Unlike `Path.expanduser`, it raises no error without a home folder."""
    return Path(os.path.expanduser(path))


def _create(path: Path, token: str) -> None:
    """Create a token file.

    Raises:
        FileExistsError: ``path`` exists.
        AuthError: The file cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_private(path, f"{token}\n".encode("ascii"))
    except OSError as error:
        # The folder's path can be a file, which is a different problem from an existing token.
        if isinstance(error, FileExistsError) and os.path.lexists(path):
            raise
        raise AuthError(f"cannot write token file {path}: {error.strerror}", hint="choose a folder you own") from error


def create_private(path: Path, content: bytes) -> None:
    """Create a file that only this user can read, with its whole content at once, so that nobody reads a partial file.

    It uses a hard link. This is the one portable step that fails if the name exists and also shows the file complete.

    Raises:
        FileExistsError: ``path`` exists.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _read_named(path: Path, label: str) -> Tokens:
    """Read a token file that has to exist; otherwise like `_read`."""
    try:
        return _read(path, label)
    except FileNotFoundError:
        raise AuthError(
            f"{label} {path} does not exist", hint="make one with 'ddlf token new', or copy it from another machine"
        ) from None


def _read(path: Path, label: str) -> Tokens:
    """Read a token file.

    Raises:
        FileNotFoundError: The file does not exist.
        AuthError: The file exists, but must not or cannot be used.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe without a writer would hang before it can be refused.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise AuthError(
            f"{label} {path} cannot be read: {reason}", hint=f"check the file with 'ls -l {path}'"
        ) from error
    try:
        status = os.fstat(descriptor)
        content = os.read(descriptor, MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(descriptor)
    _check_file(status, path, label)
    return Tokens(_parse(content, f"{label} {path}"), f"{label} {path}")


def _check_file(status: os.stat_result, path: Path, label: str) -> None:
    """Refuse paths that are not files, and files that others could read or write.

    Raises:
        AuthError: The text gives the reason, and the hint gives the command that repairs it.
    """
    if stat.S_ISDIR(status.st_mode):
        raise AuthError(f"{label} {path} is a directory", hint="name a file in this directory")
    if not stat.S_ISREG(status.st_mode):
        raise AuthError(
            f"{label} {path} is not a regular file", hint="copy the token into a regular file with mode 600"
        )
    if os.name != "posix":
        return  # Windows protects a user's folder with access lists, which the mode does not show
    if not is_private(status):
        mode = stat.S_IMODE(status.st_mode)
        raise AuthError(f"{label} {path} is readable by others ({mode:04o})", hint=f"run 'chmod 600 {path}'")
    if os.geteuid() not in (0, status.st_uid) and status.st_uid != 0:
        raise AuthError(
            f"{label} {path} belongs to another user (uid {status.st_uid})", hint="copy the token into your own file"
        )


def is_private(status: os.stat_result) -> bool:
    """Return whether only the owner can write a file with a secret, and only the owner and a group chosen by root can
    read it.

    Like ssh, DDLF requires a mode without rights for group and others. There is one exception: the group may read a
    file that belongs to root. Only root chose that group, and Kubernetes creates Secrets this way for a pod with
    ``fsGroup``: owner root, group fsGroup, mode 0440.
    """
    allowed = 0o040 if status.st_uid == 0 else 0
    return not stat.S_IMODE(status.st_mode) & 0o077 & ~allowed


def _parse(content: bytes, source: str) -> tuple[bytes, ...]:
    """Return the one or two tokens in ``content``. Errors never show them.

    Raises:
        AuthError: The content is empty, too long, not text, has more than two lines, or a token is too short.
    """
    if len(content) > MAX_FILE_BYTES:
        raise AuthError(
            f"{source} is longer than {MAX_FILE_BYTES} bytes, so it cannot be a token", hint="name another file"
        )
    tokens = tuple(line.strip() for line in content.splitlines() if line.strip())
    if not tokens:
        raise AuthError(f"{source} is empty", hint="run 'ddlf token new' to make a token")
    if not all(_TOKEN.fullmatch(token) for token in tokens):
        raise AuthError(
            f"{source} is not a token: it holds spaces or characters outside ASCII",
            hint="write one token per line and nothing else",
        )
    if len(tokens) > 2:
        raise AuthError(
            f"{source} holds {len(tokens)} tokens, at most two can be in use",
            hint="keep only the new token and the old token",
        )
    if shortest := [len(token) for token in tokens if len(token) < MIN_TOKEN_CHARACTERS]:
        raise AuthError(
            f"{source}: token too short ({min(shortest)} characters), need at least {MIN_TOKEN_CHARACTERS}",
            hint="use 'ddlf token new'",
        )
    return tokens
