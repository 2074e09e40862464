"""Secrets of peers: a code in a link, used once, becomes a key. Pure, except for random numbers.

The server keeps only SHA-256 hashes of them. They have 256 bits, so that a hash needs no salt. A link has the code
behind the ``#``, which browsers do not send and servers do not log.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from urllib.parse import urlsplit

from ddlf.errors import ConfigError

COOKIE = "ddlf-peer"
"""Name of the cookie with a browser's key. ``cookie_name`` adds the port, since cookies do not tell ports apart."""
CODE_HEADER = "X-DDLF-Code"
"""Header with the code in the request that uses it."""
PIN, PIN_LETTERS = ".", 64
"""The sign in a link between the code and the SHA-256 of the server's certificate, and the length of this SHA-256."""
CODE_S = 24 * 3600.0
"""Seconds until a code expires."""


def new_secret() -> str:
    """Return a new code or key: 32 random bytes as 43 URL-safe characters."""
    return secrets.token_urlsafe(32)


def hashed(secret: str) -> str:
    """Return the SHA-256 of a code or key, which the journal contains."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def cookie_name(port: int) -> str:
    """Return the name of the cookie of a server on this port."""
    return f"{COOKIE}-{port}"


def cookie(port: int, key: str, *, secure: bool) -> str:
    """Return the header ``Set-Cookie`` that gives a browser its key."""
    return f"{cookie_name(port)}={key}; Path=/; HttpOnly; SameSite=Strict" + "; Secure" * secure


def key_in(port: int, cookies: str, authorization: str) -> str:
    """Return the key in the headers ``Cookie`` or ``Authorization`` of a request; empty without one."""
    if authorization.startswith("Bearer "):
        return authorization.removeprefix("Bearer ").strip()
    pairs = (pair.strip().partition("=") for pair in cookies.split(";"))
    return next((value for name, _, value in pairs if name == cookie_name(port)), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The answer to ``/join``, for the code of a link.

    Args:
        peer: Number of the new peer.
        key: Its key.
        run: Name of the run.
    """

    peer: int
    key: str
    run: str


@dataclass(frozen=True, slots=True)
class Link:
    """A link: the address of a server, with a code.

    Attributes:
        scheme: ``"http"`` or ``"https"``.
        host: Name or address, as in the link.
        port: The port.
        code: The code; empty if the link has none.
    """

    scheme: str
    host: str
    port: int
    code: str

    @property
    def origin(self) -> str:
        """The link without its code."""
        return f"{self.scheme}://{self.host}:{self.port}"


def link_of(origin: str, code: str, pin: str) -> str:
    """Return the link for a code. ``pin`` is the SHA-256 of the server's certificate; empty if systems trust it."""
    return f"{origin}/#{code}" + f"{PIN}{pin}" * bool(pin)


def read_link(text: str) -> Link:
    """Return the parts of a link.

    Raises:
        ConfigError: It is not a link.
    """
    hint = "copy the whole line that `ddlf peers serve` or `ddlf peers invite` has printed"
    if not isinstance(text, str):
        raise ConfigError(f"a link is a text, got {type(text).__name__}", hint=hint)
    parts = urlsplit(text.strip())
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{text.partition('#')[0]!r} has no usable port: {error}", hint=hint) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise ConfigError(f"{text.partition('#')[0]!r} is not a link of a server of peers", hint=hint)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Link(parts.scheme, host, port or (443 if parts.scheme == "https" else 80), parts.fragment)
