"""Tokens: making, finding and holding the secret that master and workers share. Runs on both.

Rules:
    A token is shell access, since the product runs code: it is never printed, sent or taken from a command line.
    The first configured source decides. If it is bad, that is an error and never a reason to look further: falling
    back would quietly start a cluster with another secret, or with none.
    A token file has one line, or two while tokens are being replaced: the first proves who we are, both are accepted.

Imported by the daemon, so only the standard library (and `platformdirs`, when a default path is needed).
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
MAX_FILE_BYTES = 4096  # two tokens of 256 bits need 88

_TOKEN = re.compile(rb"[!-~]+")  # printable ASCII without spaces: url-safe, hexadecimal and base64 tokens
_FROM_ENVIRONMENT: dict[str, str] = {}  # what $DDLF_TOKEN held before it was removed: later calls must find it too


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """One token, or an old and a new one while they are being replaced. Its text form shows no secret.

    Args:
        all: The secrets, best first. A listener accepts each of them.
        source: Where they came from, for messages: "token file /home/ann/.config/ddlf/token".
    """

    all: tuple[bytes, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.all:
            raise ValueError("Tokens needs at least one token")

    @property
    def primary(self) -> bytes:
        """The token to prove ourselves with when dialling."""
        return self.all[0]

    @property
    def fingerprint(self) -> str:
        """The first 4 hex digits of the primary token's SHA-256: enough to see that two machines differ."""
        return hashlib.sha256(self.primary).hexdigest()[:4]

    def __repr__(self) -> str:
        return f"<Tokens: {len(self.all)} from {self.source}, fingerprint {self.fingerprint}>"


def new_token() -> str:
    """Return a new token: 32 random bytes as 43 url-safe characters."""
    return secrets.token_urlsafe(32)


def default_path() -> Path:
    """Return where a user's token lives: ``~/.config/ddlf/token``, or below ``$XDG_CONFIG_HOME``.

    Raises:
        AuthError: This user has no home folder, as in a container with a foreign user id.
    """
    return _user_folder("config") / "token"


def write_token(path: str | Path | None = None, token: str | None = None) -> Path:
    """Write a token to a file that only this user can read.

    Args:
        path: The file to make; `default_path` if None. Its folder is made too, for this user only.
        token: The text, of another machine's token; a new one if None.

    Returns:
        The file.

    Raises:
        AuthError: The file exists (a token is never overwritten), it cannot be written, or ``token`` is none.
    """
    path = _expanded(default_path() if path is None else path)
    if token is not None:
        given = _parse(token.encode("utf-8", "surrogateescape"), "what was pasted")
        token = "\n".join(one.decode() for one in given)
    try:
        _create(path, token or new_token())
    except FileExistsError:
        raise AuthError(
            f"{path} already holds a token, which is not overwritten",
            hint="to replace it, put the new token on a first line above the old one, or delete the file",
        ) from None
    return path


def find_tokens(token_file: str | Path | None = None) -> Tokens | None:
    """Return the tokens of the first source that is configured, or None if there is none.

    Looks at ``token_file``, then $DDLF_TOKEN_FILE, then $DDLF_TOKEN, then `default_path`. $DDLF_TOKEN is removed from
    the environment in any case, so that no child process inherits it, and its text is overwritten where the kernel shows
    it in ``/proc/PID/environ``.

    Args:
        token_file: A file named by a flag or in cluster.yaml.

    Raises:
        AuthError: The first configured source is missing, unreadable, readable by others, or holds no token.
    """
    if "DDLF_TOKEN" in os.environ:
        # Every other reader of the variable got a copy.
        _FROM_ENVIRONMENT["DDLF_TOKEN"] = os.environ["DDLF_TOKEN"]
        _wipe_variable(b"DDLF_TOKEN")
        del os.environ["DDLF_TOKEN"]

    if token_file is not None:
        return _read_named(_expanded(token_file), "token file")
    if (named := os.environ.get("DDLF_TOKEN_FILE")) is not None:
        if not named:
            raise AuthError("DDLF_TOKEN_FILE is set but empty", hint="name a file, or unset it")
        return _read_named(_expanded(named), "DDLF_TOKEN_FILE")
    if (token := _FROM_ENVIRONMENT.get("DDLF_TOKEN")) is not None:
        return Tokens(_parse(token.encode("utf-8", "surrogateescape"), "DDLF_TOKEN"), "DDLF_TOKEN")
    try:
        path = default_path()
    except AuthError:
        return None  # no home, so no token in it
    try:
        return _read(path, "token file")
    except FileNotFoundError:
        return None


def _wipe_variable(name: bytes) -> None:
    """Overwrite a variable in the memory that the process was started with: removing it only forgets where it is."""
    import ctypes

    with suppress(OSError, AttributeError):  # a C library that works in another way
        library = ctypes.CDLL(None)
        library.getenv.restype = ctypes.c_void_p
        address = library.getenv(name)
        if address:
            ctypes.memset(address, 0, len(ctypes.string_at(address)))


def loopback_tokens() -> Tokens:
    """Return this user's automatic token for workers that listen on loopback only; see ``automatic_token``."""
    return automatic_token("loopback token")


def is_automatic(token: bytes) -> bool:
    """Whether a token is that of ``loopback_tokens``, which is used where none is given."""
    with suppress(AuthError):
        path = state_folder() / "loopback-token"
        return os.path.lexists(path) and token in _read_named(path, "loopback token").all
    return False


def automatic_token(what: str) -> Tokens:
    """Return a token of this user's that keeps other users of this machine out; make it on first use.

    It lives in ``~/.local/state/ddlf/`` (or below ``$XDG_STATE_HOME``). When processes start at once, all of them get the same token.

    Args:
        what: Name for people, ``"loopback token"`` or ``"dashboard token"``; the file's has a hyphen for the space.

    Raises:
        AuthError: The file cannot be made, or is not usable.
    """
    path = state_folder() / what.replace(" ", "-")
    if not os.path.lexists(path):
        with suppress(FileExistsError):  # another process was faster: its token is the one
            _create(path, new_token())
    return _read_named(path, what)


def state_folder() -> Path:
    """Return where what is kept between commands lives: ``~/.local/state/ddlf``, or below ``$XDG_STATE_HOME``. It need not exist.

    Raises:
        AuthError: This user has no home.
    """
    return _user_folder("state")


def _user_folder(kind: Literal["config", "state"]) -> Path:
    """Return this user's folder for our files of one kind; it need not exist.

    Raises:
        AuthError: This user has no home.
    """
    import platformdirs

    find = platformdirs.user_config_path if kind == "config" else platformdirs.user_state_path
    try:
        folder = find("ddlf", appauthor=False)
    except RuntimeError:  # newer versions of platformdirs; older ones return a folder that begins with a literal ~
        folder = Path("~")
    if not folder.is_absolute():
        raise AuthError("this user has no home folder to keep a token in", hint="set HOME, or name a token file")
    return folder


def shell_path(path: Path) -> str:
    """``path`` as a shell on another machine, with another home folder, understands it."""
    with suppress(RuntimeError, ValueError):
        return f"~/{_in_quotes(path.relative_to(Path.home()))}"
    return _in_quotes(path)


def _in_quotes(path: Path) -> str:
    return str(path) if re.fullmatch(r"[\w./-]+", str(path)) else f'"{path}"'


def _expanded(path: str | Path) -> Path:
    """Return ``path`` with ~ replaced; unlike `Path.expanduser`, without an error where there is no home."""
    return Path(os.path.expanduser(path))


def _create(path: Path, token: str) -> None:
    """Make ``path`` with all of its content at once: nobody can ever read a half-written token.

    A hard link, since it is the one portable step that both fails if the name exists and shows the file complete.

    Raises:
        FileExistsError: ``path`` exists.
        AuthError: It cannot be written.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(f"{token}\n")
            os.link(draft, path)
        finally:
            draft.unlink()
    except OSError as error:
        # The folder can exist as a file, which is another problem than an existing token.
        if isinstance(error, FileExistsError) and os.path.lexists(path):
            raise
        raise AuthError(f"cannot write token file {path}: {error.strerror}", hint="choose a folder you own") from error


def _read_named(path: Path, what: str) -> Tokens:
    """Like `_read`, for a file that has to exist."""
    try:
        return _read(path, what)
    except FileNotFoundError:
        raise AuthError(
            f"{what} {path} does not exist", hint="make one with 'ddlf token new', or copy it from another machine"
        ) from None


def _read(path: Path, what: str) -> Tokens:
    """Read a token file.

    Raises:
        FileNotFoundError: There is none.
        AuthError: It is there, but must not or cannot be used.
    """
    try:
        # Non-blocking, or a named pipe that nobody writes to would hang us before we can refuse it.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = error.strerror if isinstance(error, OSError) else error
        raise AuthError(f"{what} {path} cannot be read: {reason}", hint=f"look at it with 'ls -l {path}'") from error
    try:
        status = os.fstat(descriptor)
        content = os.read(descriptor, MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(descriptor)
    _check_file(status, path, what)
    return Tokens(_parse(content, f"{what} {path}"), f"{what} {path}")


def _check_file(status: os.stat_result, path: Path, what: str) -> None:
    """Refuse what is no file, and what others could read or have written.

    Raises:
        AuthError: Says which, and the command that repairs it.
    """
    if stat.S_ISDIR(status.st_mode):
        raise AuthError(f"{what} {path} is a directory", hint="name the file in it")
    if not stat.S_ISREG(status.st_mode):
        raise AuthError(f"{what} {path} is not a regular file", hint="copy the token into one, with mode 600")
    if os.name != "posix":
        return  # Windows guards a user's folder with access lists, which the mode does not show
    if not is_private(status):
        mode = stat.S_IMODE(status.st_mode)
        raise AuthError(f"{what} {path} is readable by others ({mode:04o})", hint=f"run 'chmod 600 {path}'")
    if os.geteuid() not in (0, status.st_uid) and status.st_uid != 0:
        raise AuthError(
            f"{what} {path} belongs to another user (uid {status.st_uid})", hint="copy it to a file of your own"
        )


def is_private(status: os.stat_result) -> bool:
    """Whether only its owner, and whom root has let read it, can read a file with a secret, and nobody else can write it.

    As with ssh, the mode allows nothing to group and others. One exception: the group may read what belongs to root. Only root chose that
    group, and Kubernetes makes Secrets so for a pod with ``fsGroup``: owner root, group fsGroup, mode 0440.
    """
    allowed = 0o040 if status.st_uid == 0 else 0
    return not stat.S_IMODE(status.st_mode) & 0o077 & ~allowed


def _parse(content: bytes, source: str) -> tuple[bytes, ...]:
    """Return the one or two tokens in ``content``, without ever showing them in an error.

    Raises:
        AuthError: Empty, too long, not text, more than two lines, or too short.
    """
    if len(content) > MAX_FILE_BYTES:
        raise AuthError(f"{source} is longer than {MAX_FILE_BYTES} bytes, so it is no token", hint="name another file")
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
            f"{source} holds {len(tokens)} tokens, at most two can be in use", hint="keep the new one and the old one"
        )
    if shortest := [len(token) for token in tokens if len(token) < MIN_TOKEN_CHARACTERS]:
        raise AuthError(
            f"{source}: token too short ({min(shortest)} characters), need at least {MIN_TOKEN_CHARACTERS}",
            hint="use 'ddlf token new'",
        )
    return tokens
