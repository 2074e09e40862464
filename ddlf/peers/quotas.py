"""Quotas of a server of peers: what a peer, a code and an address may use, so that nobody slows down the others. Pure.

| what | of | quota | beyond it |
|---|---|---|---|
| joins | a code | as many peers as the code says, one by default | refused |
| refused joins | an address | 30, then one in 2 s | refused, with the seconds to wait |
| requests | an address | 2,000, then 100 a second | refused, with the seconds to wait |
| new connections | an address of another machine | 3,000, then 150 a second | closed before TLS |
| connections | a peer | one at a time; 60, then one a second | refused, with the seconds to wait |
| messages, such as posts | a peer | 500, then 100 a second | the server reads its next one later |
| bytes of messages | a peer | 1 GiB, then 128 MiB a second | the server reads its next one later |
| open sets | a peer | the one that waits, and the one that it was given | the ledger keeps no others |
| validations | a peer | the one that it was asked for | does not count |
| time to read an answer | a peer | 30 s, or longer for a set of more than 480 kB: 16 kB/s | its connection ends |

A code has no other quota: it is that of its peers. A wrong code beyond its quota counts as ten new connections. An address
is one of IPv4, or a network of IPv6, since one machine may have all its addresses. Behind a proxy, the proxy names the
address, and the server closes no new connections.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache

MOST_KEYS = 10_000
"""A quota remembers this number of addresses or peers. The one that was heard longest ago is forgotten first."""
READ_S, READ_BYTES_S = 30.0, 16_000
"""A peer must read an answer in ``READ_S``, or at ``READ_BYTES_S`` bytes a second if that is longer."""


class Quota:
    """A number of uses at once, and a rate of further ones, for each key (a leaky bucket).

    Args:
        burst: Uses at once.
        rate: Further uses per second.
    """

    def __init__(self, burst: float, rate: float) -> None:
        self._burst_s, self._use_s = burst / rate, 1 / rate
        self._paid_at: OrderedDict[Hashable, float] = OrderedDict()  # when all uses so far are paid for

    def wait_s(self, key: Hashable, now: float, uses: float = 1.0) -> float:
        """Use the quota, and return 0; if it is used up, return the seconds until it can be used again."""
        waits = self._debt_s(key, now) + uses * self._use_s - self._burst_s
        if waits > 0:
            return waits
        self.owe_s(key, now, uses)
        return 0.0

    def owe_s(self, key: Hashable, now: float, uses: float = 1.0) -> float:
        """Use the quota in any case, and return the seconds until the use is within the quota."""
        owed_s = max(self._paid_at.pop(key, now) - now, 0.0) + uses * self._use_s
        self._paid_at[key] = now + owed_s  # the last key, since it was heard last
        if len(self._paid_at) > MOST_KEYS:
            self._paid_at.popitem(last=False)
        return max(0.0, owed_s - self._burst_s)

    def _debt_s(self, key: Hashable, now: float) -> float:
        return max(0.0, self._paid_at.get(key, now) - now)


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """The quotas of a server. The module's table explains them."""

    refused_joins: Quota = field(default_factory=lambda: Quota(30, 0.5))
    requests: Quota = field(default_factory=lambda: Quota(2_000, 100))
    arrivals: Quota = field(default_factory=lambda: Quota(3_000, 150))
    connections: Quota = field(default_factory=lambda: Quota(60, 1))
    messages: Quota = field(default_factory=lambda: Quota(500, 100))
    bytes: Quota = field(default_factory=lambda: Quota(2**30, 2**27))

    def pace_s(self, peer: int, now: float, size: int) -> float:
        """Return the seconds until the server reads the next message of a peer, after one of this size."""
        return max(self.messages.owe_s(peer, now), self.bytes.owe_s(peer, now, size))


@lru_cache(maxsize=MOST_KEYS)
def counted_as(address: str) -> str:
    """Return the address or network whose quotas an address uses."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(ip) >> 64 << 64))


def reading_s(size: int) -> float:
    """Return the seconds that a peer has to read an answer of this size."""
    return max(READ_S, size / READ_BYTES_S)
