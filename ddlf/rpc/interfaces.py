"""At which addresses a machine can be reached, as far as it knows itself. Runs in the daemon."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from pathlib import Path

ANY = ("0.0.0.0", "::")
_SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface
_GLOBAL = "00"  # the scope of an IPv6 address that is good beyond its link


def addresses_of(host: str) -> list[str]:
    """Those at which others reach what listens on an address.

    Args:
        host: One address, or that which stands for all of a family.

    Returns:
        Addresses of loopback first.
    """
    if host not in ANY:
        return [host]
    loopback = ["127.0.0.1"] if host == ANY[0] else ["::1", "127.0.0.1"]
    found = [*_ipv4(), *(_ipv6() if host == ANY[1] else ())]
    return [*loopback, *(one for one in dict.fromkeys(found) if not ipaddress.ip_address(one).is_loopback)]


def same_machine() -> str:
    """A text that is another one for each machine, and after each of its starts."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


def _ipv4() -> list[str]:
    found = []
    if sys.platform.startswith("linux"):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):  # it has none
                    answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                    found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):  # its name is not to be found
        found += [str(one[4][0]) for one in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    return found


def _ipv6() -> list[str]:
    """Of Linux, which lists them in a file."""
    with contextlib.suppress(OSError):
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
        return [str(ipaddress.ip_address(bytes.fromhex(row[0]))) for row in rows if row[3] == _GLOBAL]
    return []
