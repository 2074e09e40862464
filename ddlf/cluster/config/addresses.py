"""Addresses of workers as people write them, and the choice of the configuration file. Imports only light modules."""

import ipaddress
import os
import re
from pathlib import Path

from ddlf.errors import ConfigError

DEFAULT_PORT = 9000


def find_config(path: str | Path | None = None) -> Path | None:
    """Return the configuration file to read: ``path``, else $DDLF_CONFIG, else ./cluster.yaml if it exists, else None.

    A file that is named (by the first two) is returned whether it exists or not. A missing file is then a mistake to
    report, and DDLF must not silently read another one.
    """
    if path is not None:
        return Path(os.path.expanduser(path))
    if path_text := os.environ.get("DDLF_CONFIG"):
        return Path(os.path.expanduser(path_text))
    return Path("cluster.yaml") if os.path.lexists("cluster.yaml") else None


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[IPv6 address]:port``.

    Raises:
        ConfigError: The address is invalid; the message says which part and why.
    """
    if "//" in text:
        raise ConfigError(f"an address is host:port without a protocol, got {quote(text)}")
    bracketed = re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", text)
    if bracketed:
        host, port = bracketed[1], bracketed[2]
        if ":" not in host:
            raise ConfigError(f"only an IPv6 address is written in brackets, got {quote(text)}")
    elif text.count(":") > 1:
        raise ConfigError(f"an IPv6 address needs brackets, as in '[::1]:{DEFAULT_PORT}', got {quote(text)}")
    else:
        host, _, port = text.partition(":")
    if not port:
        with_port = f"{text.rstrip(':')}:{DEFAULT_PORT}"
        raise ConfigError(f"{quote(text)} has no port, write {quote(with_port)}")
    if not re.fullmatch(r"-?[0-9]+", port):
        raise ConfigError(f"port must be an integer, got {quote(port)}")
    if len(port) > 10:  # int() would refuse thousands of digits with another error
        raise ConfigError(f"port must be 1-65535, got {quote(port)}")
    return checked_host(host), checked_port(int(port))


def parse_advertised(text: str) -> tuple[str, int]:
    """Return host and port of an address for other workers, ``HOST`` or ``HOST:PORT``.

    Port 0 stands for a missing port, and means the worker's own port.

    Raises:
        ConfigError: The address is invalid; the message says which part and why.
    """
    alone = re.fullmatch(r"\[[^\[\]]*\]|[^:]*", text)
    host, port = parse_address(f"{text}:{DEFAULT_PORT}" if alone else text)
    if ":" in host or re.fullmatch(r"[0-9.]+", host):
        address = ipaddress.ip_address(host)
        if address.is_unspecified or address.is_multicast:
            raise ConfigError(f"{quote(host)} is only an address to listen on: other workers cannot connect to it")
    return host, 0 if alone else port


def checked_port(port: int) -> int:
    if not 1 <= port <= 65535:
        raise ConfigError(f"port must be 1-65535, got {port}")
    return port


def checked_host(host: str) -> str:
    """Return a valid IP address or host name (RFC 1123, with underscores) as it is; else raise ``ConfigError``."""
    if ":" in host or re.fullmatch(r"[0-9.]+", host):
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigError(f"{quote(host)} is not a valid IP address") from None
        return host
    label = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})"
    if len(host) > 253 or not re.fullmatch(rf"{label}(\.{label})*\.?", host):
        raise ConfigError(f"host must be a host name or an IP address, got {quote(host)}")
    return host


def same_host(host: str) -> str:
    """Return a host in one standard spelling, so that two spellings of the same host can be compared. Names are not
    resolved.
    """
    return ipaddress.ip_address(host).compressed if ":" in host else host.lower().rstrip(".")


def quote(text: str) -> str:
    """Return ``text`` in quotes, on one line, without control characters, and not too long."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
