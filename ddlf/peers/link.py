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
import math
import queue
import ssl
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any, TypeVar

from ddlf.errors import AuthError, ConnectError, DDLFError, ProtocolError
from ddlf.events.facts import from_data
from ddlf.peers import frames
from ddlf.peers.frames import Answer, Bye, End, Hello, Masked, Message, Post, Welcome
from ddlf.peers.keys import OwnKey
from ddlf.peers.plan import Offer
from ddlf.peers.sessions import CODE_HEADER, PIN, Link, Session

if TYPE_CHECKING:
    from websockets.sync.client import ClientConnection

T = TypeVar("T")
OPEN_S = 10.0
"""Seconds to wait for a connection."""
WELCOME_S = 600.0
"""Seconds to wait for the welcome, whose set may be large and the line slow. A server that is gone is noticed by pings."""
PING_S, PONG_S = 5.0, 60.0
"""Seconds between two pings, and until the server must have answered. A ping waits behind a set that is being sent."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Seconds between two tries to connect again: at first, and at most."""
AGAIN = 1013
"""A server closes a connection with this code if the peer is to connect again."""
LOST_S = 10.0
"""Least seconds between two lines about a lost connection that comes back at once."""
RETRY_S = 600.0
"""A Python peer gives up a server that does not answer for this number of seconds."""
GONE = "check that the server runs; if its training is over, it has ended"
"""What to do if a server cannot be reached."""
WHICH_LINK = (
    "copy the link of the line `link` of ddlf peers serve; that of its line `dashboard` shows the training only"
)


class CutOffError(ConnectError):
    """A connection broke before the server's first message was whole."""


class Connection:
    """A connection that comes back by itself. Ask for the ``offer``, then ``open`` it.

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
        AuthError: It has another certificate than the link says.
    """

    welcome: Welcome
    _socket: ClientConnection

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
        self._code, _, self._pin = link.code.partition(PIN)
        self._tls = _pinned_context(link, self._pin) if link.scheme == "https" else None
        self._own_key = OwnKey(link)
        self._set_bytes = 0
        self._inbox: queue.Queue[Message | DDLFError] = queue.Queue()
        self._open_post: Post | Masked | None = None
        self._sent_again: Post | Masked | None = None  # the post that a new connection has begun with
        self._lock = threading.Lock()
        self._answering = threading.Lock()  # for ``_open_post`` and the inbox together
        self._open = threading.Event()
        self._sender = futures.ThreadPoolExecutor(1, "ddlf-peer-send") if background else None
        self._closed = threading.Event()
        self._shown_at = -math.inf
        self._thread = threading.Thread(target=self._receive, name="ddlf-peer", daemon=True)

    def offer(self) -> Offer:
        """Return what the server asks of a peer. The code of the link stays unused.

        Raises:
            ConnectError: The server cannot be reached.
            AuthError: The code of the link was used, or has expired.
            ProtocolError: The server's answer cannot be read.
        """
        key = self._own_key.key
        return self._ask(Offer, "/model", {"Authorization": f"Bearer {key}"} if key else {CODE_HEADER: self._code})

    def open(self) -> Welcome:
        """Use the code of the link, unless this peer has used it before, and connect.

        Raises:
            ConnectError: The server cannot be reached, or its training is over.
            AuthError: The code of the link was used, or has expired.
        """
        if not self._own_key.key:
            self._own_key.keep(self._ask(Session, "/join", {CODE_HEADER: self._code}))
        self._socket, reply = self._connect_first()
        if isinstance(reply, End):
            self._socket.close()
            raise ConnectError(
                f"the training of {self._link.origin} is over: {reply.why}", hint="ask for another training"
            )
        self.welcome = reply
        return reply

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
        """Whether a post has no answer yet. If not, ``take`` returns the answer, or has returned it."""
        with self._answering:
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
        if isinstance(message, Post | Masked):
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
            message = self._inbox.get(timeout_s != 0.0, timeout_s or None)
        except queue.Empty:
            return None
        if isinstance(message, DDLFError):
            raise message
        return message

    def shard(self, number: int) -> bytes:
        """Return the shard that this peer has, which the server sends in pieces.

        Args:
            number: Its number, from the welcome.

        Raises:
            ConnectError: The server cannot be reached, or gives none.
        """
        shard, size = bytearray(), 1
        while len(shard) < size:
            headers = {"Authorization": f"Bearer {self._own_key.key}", "Range": f"bytes={len(shard)}-"}
            status, content, facts = _response_of(self._link, f"/shard/{number}", headers, self._tls, None)
            if status != http.HTTPStatus.PARTIAL_CONTENT:
                reason = content[:1000].decode(errors="replace").strip()
                raise ConnectError(f"{self._link.origin} gives no shard: {reason}")
            size = int(facts["Content-Range"].rpartition("/")[2])
            shard += content
        return bytes(shard)

    def close(self) -> None:
        """End the connection. Safe to call again."""
        self._closed.set()
        with contextlib.suppress(Exception):
            self._socket.close()
        if self._sender is not None:
            self._sender.shutdown(wait=False, cancel_futures=True)
        self._own_key.release()

    # -- session --------------------------------------------------------------------------------------------------------

    def _ask(self, kind: type[T], path: str, headers: dict[str, str]) -> T:
        """Return the server's answer to a request.

        Raises:
            ConnectError: The server cannot be reached, or takes no peer now.
            AuthError: It refuses the link or the key.
            ProtocolError: The answer cannot be read.
        """
        status, body = request(self._link, path, headers, self._tls)
        if status == http.HTTPStatus.OK:
            try:
                return from_data(kind, json.loads(body))
            except (AttributeError, TypeError, ValueError) as error:
                raise ProtocolError(
                    f"the answer of {self._link.origin} to {path} cannot be read: {error}",
                    hint="install the same version of DDLF as the server",
                ) from None
        if status == http.HTTPStatus.UNAUTHORIZED and self._own_key.key:
            raise AuthError(f"{self._link.origin} refuses this peer: {body}", hint="ask for a new link")
        if status == http.HTTPStatus.FORBIDDEN:
            addition = " (another program of yours here is its peer now)" * (self._own_key.other_programs > 0)
            raise AuthError(f"{self._link.origin} refuses the link{addition}: {body}")  # the server says what to do
        if status in (429, 503, 507):
            raise ConnectError(f"{self._link.origin} takes no peer now: {body}", hint="the link stays unused")
        raise ConnectError(
            f"{self._link.origin} does not answer as a server of peers: {status} {body[:200]}", hint=WHICH_LINK
        )

    # -- connecting -------------------------------------------------------------------------------------------------------

    def _connect_first(self) -> tuple[ClientConnection, Welcome | End]:
        """Connect, and try again where the connection breaks: the code of the link is used by now."""
        waited, wait = 0.0, FIRST_WAIT_S
        while True:
            try:
                return self._connect()
            except CutOffError:
                if waited >= self._retry_s or self._closed.wait(wait):
                    raise
            if not waited:
                self._say("lost      the connection to the server before training began; it is tried again")
            waited += wait
            wait = min(2 * wait, LONGEST_WAIT_S)

    def _connect(self) -> tuple[ClientConnection, Welcome | End]:
        """Return a connection, and the first message of the server: an ``End`` says that the training is over."""
        from websockets.exceptions import InvalidStatus, WebSocketException
        from websockets.sync.client import connect

        silent = logging.getLogger("ddlf.peers.websockets")
        silent.disabled = True  # at the level DEBUG it would write the key into logs
        address = f"{self._link.origin.replace('http', 'ws', 1)}/live"
        try:
            opening = connect(
                address,
                ssl=self._tls,
                additional_headers={"Authorization": f"Bearer {self._own_key.key}"},
                compression=None,
                open_timeout=OPEN_S,
                max_size=None if not self._set_bytes else self._set_bytes + frames.MOST_WELCOME_BYTES + 64,
                ping_interval=PING_S,
                ping_timeout=PONG_S,
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
            raise _unreachable_error(self._link, error) from None
        try:
            socket.send(frames.encode(self._hello()))
            message = frames.decode(_bytes(socket.recv(WELCOME_S)), frames.FROM_SERVER, self._set_bytes)
        except (WebSocketException, TimeoutError, OSError) as error:
            socket.close()
            raise CutOffError(f"{self._link.origin} ended the connection: {error}") from None
        if isinstance(message, End) and not message.over:
            socket.close()
            raise AuthError(f"{self._link.origin} refuses this peer: {message.why}", hint=message.hint)
        if not isinstance(message, Welcome | End):
            raise ProtocolError(f"{self._link.origin} did not begin with a welcome")
        return socket, message

    def _receive(self) -> None:
        from websockets.exceptions import ConnectionClosed

        while not self._closed.is_set():
            try:
                message = frames.decode(_bytes(self._socket.recv()), frames.FROM_SERVER, self._set_bytes)
            except ConnectionClosed as closed:
                reason = closed.rcvd.reason if closed.rcvd is not None and closed.rcvd.code == AGAIN else ""
                if not self._closed.is_set() and not self._come_back(reason):
                    return
                continue
            except ProtocolError as error:
                self._inbox.put(error)
                return
            with self._answering:
                post = self._open_post
                if isinstance(message, Answer) and post is not None and message.number == post.number:
                    self._open_post = None
                self._inbox.put(message)
            if isinstance(message, End):
                return

    def _come_back(self, reason: str) -> bool:
        """Connect again as the same peer, and repeat an open post. Return whether it worked.

        Args:
            reason: Why the server has ended the connection; empty if it has not said so.
        """
        waited, wait, shown = 0.0, FIRST_WAIT_S, False
        self._open.clear()
        while not self._closed.wait(wait):
            if not shown and (waited or time.monotonic() - self._shown_at >= LOST_S):
                shown, self._shown_at = True, time.monotonic()
                because = f": {reason}" if reason else ""
                self._say(f"lost      the connection to the server{because}; {self._meanwhile}, and it is tried again")
            waited += wait
            wait = min(2 * wait, LONGEST_WAIT_S)
            try:
                socket, reply = self._connect()
            except ConnectError as error:
                if waited >= self._retry_s:
                    self._inbox.put(error)
                    return False
                continue
            except DDLFError as error:
                self._inbox.put(error)
                return False
            if isinstance(reply, End):
                self._inbox.put(reply)
                socket.close()
                return False
            self.welcome = reply
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
            if shown:
                self._say("back      connected again as the same peer")
            return True
        return False


def request(link: Link, path: str, headers: dict[str, str], tls: ssl.SSLContext | None) -> tuple[int, str]:
    """Send a GET request to a server of peers, and return status and body.

    Raises:
        ConnectError: The server cannot be reached.
    """
    status, body, _ = _response_of(link, path, headers, tls, 2**20)
    return status, body.decode(errors="replace").strip()


def _response_of(
    link: Link, path: str, headers: dict[str, str], tls: ssl.SSLContext | None, most: int | None
) -> tuple[int, bytes, http.client.HTTPMessage]:
    host = link.host.strip("[]")
    if tls is not None:
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(host, link.port, timeout=30, context=tls)
    else:
        connection = http.client.HTTPConnection(host, link.port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(most), answer.headers
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable_error(link, error) from None
    finally:
        connection.close()


def _unreachable_error(link: Link, error: Exception) -> ConnectError:
    """Return the error for a server that does not answer."""
    cause, hint = str(error), GONE
    if isinstance(error, ssl.SSLCertVerificationError):
        cause = f"its certificate is not trusted here, and the link does not name it: {error.verify_message}"
        hint = "copy the whole link, or name the file with the certificate of its authority in SSL_CERT_FILE"
    elif isinstance(error, ssl.SSLError) and (isinstance(error, ssl.SSLEOFError) or "WRONG_VERSION" in str(error)):
        cause, hint = "it does not answer to https", f"copy the whole link, which may begin with http://; {GONE}"
    elif isinstance(error, ConnectionResetError) and link.scheme == "http":
        cause, hint = "it has ended the connection", f"copy the whole link, which may begin with https://; {GONE}"
    return ConnectError(f"{link.origin} cannot be reached: {cause}", hint=hint)


def _pinned_context(link: Link, pin: str) -> ssl.SSLContext:
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
        raise _unreachable_error(link, error) from None
    if hashlib.sha256(ssl.PEM_cert_to_DER_cert(text)).hexdigest() != pin:
        raise AuthError(f"{link.origin} has another certificate than the link says", hint="ask for a new link")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the certificate itself is known, so it need not be signed
    context.load_verify_locations(cadata=text)
    return context


def _bytes(data: Any) -> bytes:
    if isinstance(data, str):
        raise ProtocolError("a frame is a binary message, got text")
    return bytes(data)
