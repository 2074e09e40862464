"""The connection of a Python peer to its server. Runs on the peer.

A thread receives. If the connection ends, it connects again as the same peer, and sends a post again that has no answer
yet. The server answers each post once.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import logging
import os
import queue
import ssl
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.errors import AuthError, ConnectError, DDLFError, ProtocolError
from ddlf.peers import frames
from ddlf.peers.frames import Answer, Bye, End, Hello, Message, Post, Welcome
from ddlf.peers.sessions import CODE_HEADER, Link, hashed
from ddlf.rpc.tokens import create_private, state_folder

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

OPEN_S = 10.0
"""Seconds to wait for a connection, and for the welcome."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Seconds between two tries to connect again: at first, and at most."""
RETRY_S = 600.0
"""A Python peer gives up a server that does not answer for this number of seconds."""
GONE = "check that the server runs; if its training is over, it has ended"
"""What to do if a server cannot be reached."""
PIN = "."
"""In a link, between the code and the SHA-256 of the server's certificate."""


class Connection:
    """A connection that comes back by itself.

    Args:
        link: The link.
        hello: Makes the first message of each connection.
        say: Prints a line.
        retry_s: The peer gives up a server that does not answer for this number of seconds.
        background: Whether ``send`` returns at once, and a thread sends.
        meanwhile: Says in a line what happens while the server cannot be reached.

    Attributes:
        welcome: The newest welcome.

    Raises:
        ConnectError: The server cannot be reached.
        AuthError: The code of the link was used, or has expired.
    """

    def __init__(
        self,
        link: Link,
        hello: Callable[[], Hello],
        say: Callable[[str], None],
        *,
        retry_s: float = RETRY_S,
        background: bool = False,
        meanwhile: str = "training continues",
    ) -> None:
        self._link = link
        self._meanwhile = meanwhile
        self._hello = hello
        self._say = say
        self._retry_s = retry_s
        code, _, self._pin = link.code.partition(PIN)
        self._tls = _pinned(link, self._pin) if link.scheme == "https" else None
        self._key = self._session(code)
        self._set_bytes = 0
        self._inbox: queue.Queue[Message | DDLFError] = queue.Queue()
        self._open_post: Post | None = None
        self._sent_again: Post | None = None  # the post that a new connection has begun with
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._sender = futures.ThreadPoolExecutor(1, "ddlf-peer-send") if background else None
        self._closed = threading.Event()
        self._socket, self.welcome = self._connect()
        self._thread = threading.Thread(target=self._receive, name="ddlf-peer", daemon=True)

    def start(self, set_bytes: int) -> None:
        """Begin to receive.

        Args:
            set_bytes: Length of a set of the model.
        """
        self._set_bytes = set_bytes
        self._open.set()
        self._thread.start()

    @property
    def waits(self) -> bool:
        """Whether a post has no answer yet."""
        return self._open_post is not None

    @property
    def is_open(self) -> bool:
        """Whether the server can be reached, as far as is known."""
        return self._open.is_set()

    @property
    def has_news(self) -> bool:
        """Whether the server has sent something that was not taken yet."""
        return not self._inbox.empty()

    def send(self, message: Message) -> None:
        """Send a message. A post that is lost with its connection is sent again."""
        if isinstance(message, Post):
            self._open_post = message
        if isinstance(message, Bye):
            self._closed.set()  # the server ends the connection now, and it must not come back
        if self._sender is None:
            self._send(message)
        else:
            self._sender.submit(self._send, message)

    def flush(self, timeout_s: float) -> None:
        """Wait until all messages have been sent, at most for this number of seconds."""
        if self._sender is not None:
            futures.wait([self._sender.submit(lambda: None)], timeout_s)

    def _send(self, message: Message) -> None:
        with self._lock, contextlib.suppress(Exception):  # the receiving thread notices, and connects again
            if message is not self._sent_again:
                self._socket.send(frames.encode(message))

    def take(self, timeout_s: float | None = 0.0) -> Message | None:
        """Return the next message of the server; None if there is none within this time.

        Raises:
            DDLFError: The connection has ended for good.
        """
        try:
            found = self._inbox.get(timeout_s != 0.0, timeout_s or None)
        except queue.Empty:
            return None
        if isinstance(found, DDLFError):
            raise found
        return found

    def shard(self) -> bytes:
        """Return the shard that this peer has, as the server sends it.

        Raises:
            ConnectError: The server cannot be reached, or gives none.
        """
        status, content = _got(self._link, "/shard", {"Authorization": f"Bearer {self._key}"}, self._tls, None)
        if status != http.HTTPStatus.OK:
            raise ConnectError(f"{self._link.origin} gives no shard: {content[:1000].decode(errors='replace').strip()}")
        return content

    def close(self) -> None:
        """End the connection. Safe to call again."""
        self._closed.set()
        with contextlib.suppress(Exception):
            self._socket.close()
        if self._sender is not None:
            self._sender.shutdown(wait=False, cancel_futures=True)

    # -- session --------------------------------------------------------------------------------------------------------

    def _session(self, code: str) -> str:
        """Return the key for this link: the stored one, or a new one for the code."""
        path = state_folder() / "peers" / f"{hashed(code + self._link.origin)[:32]}.json"
        if path.exists():
            return str(json.loads(path.read_text(encoding="utf-8"))["key"])
        facts = self._ask("/join", {CODE_HEADER: code})
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            create_private(path, json.dumps({"origin": self._link.origin, **facts}).encode())
        return str(facts["key"])

    def _ask(self, path: str, headers: dict[str, str]) -> dict[str, Any]:
        status, body = request(self._link, path, headers, self._tls)
        if status == http.HTTPStatus.OK:
            return dict(json.loads(body))
        if status in (401, 403):
            raise AuthError(f"{self._link.origin} refuses the link: {body}")  # the server says what to do
        raise ConnectError(f"{self._link.origin} does not answer as a server of peers: {status} {body[:200]}")

    # -- connecting -------------------------------------------------------------------------------------------------------

    def _connect(self) -> tuple[ClientConnection, Welcome]:
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        silent = logging.getLogger("ddlf.peers.websockets")
        silent.disabled = True  # at the level DEBUG it would write the key into logs
        address = f"{self._link.origin.replace('http', 'ws', 1)}/live"
        try:
            opening = connect(
                address,
                ssl=self._tls,
                additional_headers={"Authorization": f"Bearer {self._key}"},
                compression=None,
                open_timeout=OPEN_S,
                max_size=None if not self._set_bytes else self._set_bytes + frames.MOST_WELCOME_BYTES + 64,
                ping_interval=5.0,
                ping_timeout=15.0,
                proxy=None,
                user_agent_header=None,
                logger=silent,
            )
            socket = contextlib.ExitStack().enter_context(opening)  # it stays open; this class closes it
        except InvalidStatus as error:
            status, body = error.response.status_code, (error.response.body or b"").decode(errors="replace").strip()
            kind = AuthError if status in (401, 403) else ConnectError
            raise kind(f"{self._link.origin} refuses this peer: {body}", hint="ask for a new link") from None
        except (OSError, WebSocketException, TimeoutError) as error:
            raise ConnectError(f"{self._link.origin} cannot be reached: {error}", hint=GONE) from None
        try:
            socket.send(frames.encode(self._hello()))
            message = frames.decode(_bytes(socket.recv(OPEN_S)), frames.FROM_SERVER, self._set_bytes)
        except (WebSocketException, TimeoutError, OSError) as error:
            socket.close()
            raise ConnectError(f"{self._link.origin} ended the connection: {error}") from None
        if isinstance(message, End):
            socket.close()
            raise AuthError(f"{self._link.origin} refuses this peer: {message.why}", hint=message.hint)
        if not isinstance(message, Welcome):
            raise ProtocolError(f"{self._link.origin} did not begin with a welcome")
        return socket, message

    def _receive(self) -> None:
        from websockets.exceptions import ConnectionClosed

        while not self._closed.is_set():
            try:
                message = frames.decode(_bytes(self._socket.recv()), frames.FROM_SERVER, self._set_bytes)
            except ConnectionClosed:
                if not self._closed.is_set() and not self._come_back():
                    return
                continue
            except ProtocolError as error:
                self._inbox.put(error)
                return
            if isinstance(message, Answer) and self._open_post is not None and message.number == self._open_post.number:
                self._open_post = None
            self._inbox.put(message)
            if isinstance(message, End):
                return

    def _come_back(self) -> bool:
        """Connect again as the same peer, and repeat an open post. Return whether it worked."""
        waited, wait = 0.0, FIRST_WAIT_S
        self._open.clear()
        self._say(f"lost      the connection to the server; {self._meanwhile}, and it is tried again")
        while not self._closed.wait(wait):
            waited += wait
            wait = min(2 * wait, LONGEST_WAIT_S)
            try:
                socket, self.welcome = self._connect()
            except ConnectError as error:
                if waited >= self._retry_s:
                    self._inbox.put(error)
                    return False
                continue
            except DDLFError as error:
                self._inbox.put(error)
                return False
            with self._lock:
                self._socket = socket
                if self._closed.is_set():  # closed meanwhile
                    socket.close()
                    return False
                if (post := self._open_post) is not None:
                    self._sent_again = post
                    with contextlib.suppress(Exception):
                        socket.send(frames.encode(post))
            self._open.set()
            self._say("back      connected again as the same peer")
            return True
        return False


def request(link: Link, path: str, headers: dict[str, str], tls: ssl.SSLContext | None) -> tuple[int, str]:
    """Send a GET request to a server of peers, and return status and body.

    Raises:
        ConnectError: The server cannot be reached.
    """
    status, body = _got(link, path, headers, tls, 2**20)
    return status, body.decode(errors="replace").strip()


def _got(
    link: Link, path: str, headers: dict[str, str], tls: ssl.SSLContext | None, most: int | None
) -> tuple[int, bytes]:
    host = link.host.strip("[]")
    if tls is not None:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(host, link.port, timeout=30, context=tls)
    else:
        connection = http.client.HTTPConnection(host, link.port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(most)
    except (OSError, http.client.HTTPException) as error:
        raise ConnectError(f"{link.origin} cannot be reached: {error}", hint=GONE) from None
    finally:
        connection.close()


def _pinned(link: Link, pin: str) -> ssl.SSLContext:
    """Return a TLS context that accepts the server's certificate: the one that the link names, or a signed one.

    Raises:
        AuthError: The server has another certificate than the link says.
        ConnectError: The server cannot be reached.
    """
    if not pin:
        return ssl.create_default_context()
    try:
        text = ssl.get_server_certificate((link.host.strip("[]"), link.port), timeout=OPEN_S)
    except OSError as error:
        raise ConnectError(f"{link.origin} cannot be reached: {error}", hint=GONE) from None
    if hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest() != pin:
        raise AuthError(f"{link.origin} has another certificate than the link says", hint="ask for a new link")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is known
    context.load_verify_locations(cadata=text)
    return context


def _bytes(data: Any) -> bytes:
    if isinstance(data, str):
        raise ProtocolError("a frame is a binary message, got text")
    return bytes(data)


def forget(link: Link) -> None:
    """Delete the stored key of a link."""
    code = link.code.partition(PIN)[0]
    path: Path = state_folder() / "peers" / f"{hashed(code + link.origin)[:32]}.json"
    with contextlib.suppress(OSError):
        os.unlink(path)
