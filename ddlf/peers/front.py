"""The HTTP front of a server of peers: it answers requests, and lets peers through that have a session. Runs on the server.

| request | allowed to | answer |
|---|---|---|
| ``/``, ``/page/...``, ``/engine/...`` | everybody | a file |
| ``/join`` | somebody with a code | a key, after the entry is in the journal |
| ``/graph``, ``/model`` | somebody with a code or a key | the model and the plan |
| ``/shard/NUMBER`` | the peer that has the shard | a piece of it |
| ``/live`` | a peer | a WebSocket, which the server serves |
| ``/control/...`` | somebody with the server's own secret | the result of a command |

Each refusal is one sentence. Before anything else, a request uses the quota of its address, and must name this server as its
host. The front changes its quotas only: entries go through the writer, and commands to the server.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import ipaddress
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ddlf.errors import CheckpointError, DDLFError
from ddlf.events.facts import to_data
from ddlf.monitor.dashboard.address import is_ours
from ddlf.peers import clock, sessions
from ddlf.peers.entries import Joined
from ddlf.peers.journal_writer import JournalWriter
from ddlf.peers.ledger import Unfit, WeightLedger
from ddlf.peers.pages import File, files
from ddlf.peers.plan import Offer, Plan
from ddlf.peers.quotas import Quotas, counted_as
from ddlf.peers.running_server import CommandAnswer
from ddlf.peers.served_model import Model
from ddlf.rpc.tls import is_loopback

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.datastructures import Headers
    from websockets.http11 import Request, Response

MOST_CONNECTIONS = 1_000
WRONG_CODE_S = 0.5
"""Seconds until a wrong code is answered."""
FLOODS = 9
"""New connections that a wrong code beyond its quota counts as, besides its own."""
MOST_WAITING_FOR_A_NO = 32
"""Wrong codes that wait at once for their answers; others are answered at once, and told to come back later."""
FULL = "the server's disk refuses to store anything now"
"""A peer hears this about a full disk, without the paths of the server."""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; "
    "style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Front:
    """Answers the HTTP requests of a server of peers.

    Args:
        ledger: The ledger, which knows codes and keys. It is only read.
        writer: Writes that a peer has used its code.
        plan: How the peers work together.
        model: The model.
        digest: Digest of the model's layout, as peers compare it.
        control: Secret of the commands.
        command: Carries out a command of the server's owner: its name, and the query of its URL.
        connected: Returns the number of connections.
        url: URL of the server for browsers; empty for its own address on loopback.
        proxied: Whether all connections come from a proxy, which names the address of each request.
        port: The port.
        has_tls: Whether the server itself ends TLS.
        quotas: Limits of the use by peers and addresses.
    """

    def __init__(
        self,
        ledger: WeightLedger,
        writer: JournalWriter,
        plan: Plan,
        model: Model,
        *,
        digest: str,
        control: str,
        command: Callable[[str, str], Awaitable[CommandAnswer]],
        connected: Callable[[], int],
        url: str,
        proxied: bool,
        port: int,
        has_tls: bool,
        quotas: Quotas,
    ) -> None:
        self.quotas = quotas
        self._ledger, self._writer, self._plan, self._model, self._digest = ledger, writer, plan, model, digest
        self._control, self._command, self._connected = control, command, connected
        self._url, self._proxied, self._port, self._has_tls = url, proxied, port, has_tls
        self._secure = has_tls or url.startswith("https:")
        self._next_peer = max(ledger.members, default=0) + 1
        self._refusing = 0  # wrong codes that wait for their answers
        self._lending: dict[int, ServerConnection] = {}  # the last piece of a shard of each peer

    async def answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer an HTTP request; None if it becomes a WebSocket."""
        headers, url = request.headers, urlsplit(request.path)
        try:
            host, origin = headers.get("Host", ""), headers.get("Origin")
            code, cookies = headers.get(sessions.CODE_HEADER, ""), headers.get("Cookie", "")
            authorization, byte_range = headers.get("Authorization", ""), headers.get("Range", "")
        except LookupError:
            return response(400, "the request has a header twice")
        address, now = self._address(connection, headers), clock.now()
        is_command = url.path.startswith("/control/")
        if not is_command and (wait_s := self.quotas.requests.wait_s(address, now)):
            return too_many("requests from your address", wait_s)
        if not self._is_ours(host, origin):
            addition = ", or with an address in place of its name" * self._has_tls
            return response(
                403, f"this server does not answer to {host[:100]!r}: use the link as it was printed{addition}"
            )
        match url.path:
            case "/join":
                return await self._join(code, address)
            case "/live":
                peer = self._peer_of(sessions.key_in(self._port, cookies, authorization))
                if not peer:
                    return response(401, "you have no session here: join with a link first")
                if self._connected() >= MOST_CONNECTIONS:
                    return response(503, f"{MOST_CONNECTIONS} others are connected: try again in a minute")
                if wait_s := self.quotas.connections.wait_s(peer, now):
                    return too_many(f"connections of peer {peer}", wait_s)
                connection.peer = peer  # type: ignore[attr-defined]
                return None
            case "/graph" | "/model":
                peer = self._peer_of(sessions.key_in(self._port, cookies, authorization))
                if (refused := await self._may_read(peer, code, address)) is not None:
                    return refused
                return self._page_model(peer) if url.path == "/graph" else self._offer()
            case path if path.startswith("/control/"):
                if not hmac.compare_digest(authorization.encode(errors="replace"), f"Bearer {self._control}".encode()):
                    return response(401, "this needs the server's own secret")
                try:
                    answer = await self._command(path.removeprefix("/control/"), url.query)
                    return json_response(answer)
                except CheckpointError as error:
                    return response(507, str(error))
                except DDLFError as error:
                    return response(409, str(error))
            case path if path.startswith("/shard/"):
                peer = self._peer_of(sessions.key_in(self._port, cookies, authorization))
                return self._shard(connection, peer, path.removeprefix("/shard/"), byte_range)
            case path if (file := files().get(path.removeprefix("/"))) is not None:
                return file_response(file)
        return response(404, "there is no such page")

    def _is_ours(self, host: str, origin: str | None) -> bool:
        """Return whether a request is for this server, and comes from its own page or from no page.

        If it has TLS, the server answers to all addresses: the page of another site reaches it under a name only.
        """
        url = self._url or f"http://127.0.0.1:{self._port}"
        if self._has_tls and _is_address(host):
            url = f"https://{host}"
        return is_ours(host, origin, url)

    async def _may_read(self, peer: int, code: str, address: str) -> Response | None:
        """Refuse to describe the model to somebody who has neither a session nor a code that can still be used."""
        if peer:
            return None
        if not code:
            return response(401, "you have no session here: join with a link first")
        try:
            self._ledger.admit(Joined(at=clock.now(), peer=self._next_peer, code=sessions.hashed(code), key=""))
        except Unfit as error:
            return await self._wrong_code(error, address)
        return None

    def _offer(self) -> Response:
        """Answer a Python peer that asks what it is to train, so that it can refuse before it uses its code."""
        return json_response(Offer(plan=self._plan, model=self._model.text, layout=self._digest))

    def _page_model(self, peer: int) -> Response:
        """Answer the page's question about the model. A page that has not joined yet is peer 0."""
        browser = self._model.browser
        if browser.refusal:
            return response(409, browser.refusal)
        return json_response(browser.for_page(self._plan, self._ledger.run, peer))

    def _shard(self, connection: ServerConnection, peer: int, number: str, byte_range: str) -> Response:
        """Answer a peer with a piece of the shard that it has. A peer gets one piece at a time."""
        if not peer:
            return response(401, "you have no session here: join with a link first")
        member, shards = self._ledger.members[peer], self._model.shards
        if shards is None or not member.present or str(member.shard) != number:
            return response(409, f"you do not have shard {number[:20]} here: connect first, without own data")
        match = re.fullmatch(r"bytes=(\d{1,15})-", byte_range or "bytes=0-")
        begin = int(match[1]) if match else -1
        piece, size = shards.piece(member.shard, begin) if match else (b"", 0)
        if not piece:
            return response(416, "a piece of a shard is asked for with the header Range: bytes=FIRST-")
        if (earlier := self._lending.get(peer)) is not None:
            earlier.transport.abort()
        self._lending[peer] = connection
        answer = file_response(File("application/octet-stream", piece), 206)
        answer.headers["Content-Range"] = f"bytes {begin}-{begin + len(piece) - 1}/{size}"
        return answer

    def _address(self, connection: ServerConnection, headers: Headers) -> str:
        """Return the address of a request; if a proxy is in front, the one that the proxy names."""
        forwarded = headers.get_all("X-Forwarded-For") if self._proxied else []
        address = (
            forwarded[-1].rpartition(",")[2].strip()[:64] if forwarded else str((connection.remote_address or ("",))[0])
        )
        return counted_as(address)

    def is_full(self, address: str) -> bool:
        """Return whether an address has used up its quota of new connections. Otherwise, count one."""
        if self._proxied or is_loopback(address):
            return False
        return self.quotas.arrivals.wait_s(counted_as(address), clock.now()) > 0

    async def _join(self, code: str, address: str) -> Response:
        peer = self._next_peer
        entry = Joined(at=clock.now(), peer=peer, code=sessions.hashed(code), key="")
        try:
            self._ledger.admit(entry)
            self._next_peer += 1
            key = sessions.new_secret()
            await self._writer.commit(replace(entry, key=sessions.hashed(key)))
        except Unfit as error:
            return await self._wrong_code(error, address)
        except CheckpointError:
            return response(507, f"{FULL}: try again later")
        answer = json_response(sessions.Session(peer=peer, key=key, run=self._ledger.run))
        answer.headers["Set-Cookie"] = sessions.cookie(self._port, key, secure=self._secure)
        return answer

    async def _wrong_code(self, error: Unfit, address: str) -> Response:
        """Answer a code that cannot be used, after some time."""
        now = clock.now()
        if wait_s := self.quotas.refused_joins.wait_s(address, now):
            self.quotas.arrivals.owe_s(address, now, FLOODS)
            return too_many("wrong codes from your address", wait_s)
        if self._refusing >= MOST_WAITING_FOR_A_NO:
            return too_many("wrong codes at once", 2 * WRONG_CODE_S)
        self._refusing += 1
        await asyncio.sleep(WRONG_CODE_S)
        self._refusing -= 1
        return response(403, str(error))

    def _peer_of(self, key: str) -> int:
        """Return the number of the peer with this key; 0 if nobody has it."""
        if not key:
            return 0
        digest = sessions.hashed(key)
        peers = [peer for peer, member in self._ledger.members.items() if member.key == digest and not member.removed]
        return peers[0] if peers else 0


def response(status: int, body: str) -> Response:
    """Return an HTTP response. JSON bodies begin with a brace."""
    kind = "application/json" if body.startswith("{") else "text/plain; charset=utf-8"
    return file_response(File(kind, f"{body}\n".encode()), status)


def json_response(answer: object) -> Response:
    """Return an HTTP response with the fields of a dataclass as JSON."""
    return response(200, json.dumps(to_data(answer), ensure_ascii=False))


def too_many(label: str, wait_s: float) -> Response:
    """Return the refusal of a request beyond a quota, with the seconds to wait."""
    seconds = ceil(wait_s)
    answer = response(429, f"too many {label}: try again in {seconds} s")
    answer.headers["Retry-After"] = str(seconds)
    return answer


def file_response(file: File, status: int = 200) -> Response:
    """Return an HTTP response with a file."""
    from websockets.datastructures import Headers
    from websockets.http11 import Response

    facts = {"Content-Type": file.kind, "Content-Length": str(len(file.content)), "Connection": "close"}
    return Response(status, http.HTTPStatus(status).phrase, Headers(HEADERS | facts), file.content)


def _is_address(host: str) -> bool:
    """Return whether a Host header has an address, and not a name."""
    try:
        ipaddress.ip_address(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
    return True
