"""The known addresses of this machine for connections from others. Runs in the daemon."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from pathlib import Path

ANY = ("0.0.0.0", "::")
_SIOCGIFADDR = 0x8915  # Linux: returns the IPv4 address of an interface
_GLOBAL = "00"  # the scope of an IPv6 address that is valid beyond its link


def addresses_of(host: str) -> list[str]:
    """Return the addresses where others can reach a socket that listens on ``host``.

    Args:
        host: One address, or the wildcard address of a family.

    Returns:
        Addresses, loopback first.
    """
    if host not in ANY:
        return [host]
    loopback = ["127.0.0.1"] if host == ANY[0] else ["::1", "127.0.0.1"]
    found = [*_ipv4(), *(_ipv6() if host == ANY[1] else ())]
    return [*loopback, *(one for one in dict.fromkeys(found) if not ipaddress.ip_address(one).is_loopback)]


def same_machine() -> str:
    """Return a text that identifies this machine until its next start. Other machines have other texts."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _ipv4() -> list[str]:
    found = []
    if sys.platform.startswith("linux"):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # no IPv4 address
                    answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):  # the host name cannot be resolved
        found += [str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return found


def _ipv6() -> list[str]:
    """Return the global IPv6 addresses from the file in which Linux lists them; none on other systems."""
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return [str(ipaddress.ip_address(bytes.fromhex(row[0]))) for row in rows if row[3] == _GLOBAL]
    return []
