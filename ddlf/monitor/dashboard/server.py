"""The dashboard of one master: files, WebSockets and metrics on one loopback port. Runs on a thread of the master.

It needs a thread because user code, such as an import or an evaluation, can block the master's event loop. The page
then continues, and says so. Events enter a deque, which costs a run 1 to 3 microseconds each. The thread empties it
``RATE_HZ`` times a second. Each browser receives new facts after it has received the previous ones. So no queue grows
for a slow browser, and the run waits for none.

The page's token allows viewing and stopping the run. It is not the workers' token, and cannot run code. A page of
another site has no token, and is refused by its Host and Origin headers first.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http
import json
import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.errors import DDLFError, ListenError
from ddlf.events import Event
from ddlf.monitor.dashboard import address
from ddlf.monitor.dashboard.board import Board, Received
from ddlf.rpc.tokens import automatic_token
from ddlf.version import __version__

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

RATE_HZ = 5.0
"""Number of updates of a page per second. People cannot read numbers faster."""
LOOK_S = 1.0
"""Seconds between two calls to the workers, while the page has viewers."""
HELD_UP_S = 2.0
"""Seconds until the page says that the master's event loop does not answer."""
MOST_VIEWERS = 32
READY_S = 20.0
END_S = 2.0
SUBPROTOCOL = "ddlf"
STATIC = Path(__file__).parent / "page"
SHARED = Path(__file__).parents[1] / "static"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Look = Callable[[], Awaitable[list[dict[str, Any]]]]


class Dashboard:
    """A web page that shows events. ``open`` starts it, ``close`` ends it.

    Args:
        look: Asks the workers, on the event loop that called ``open``. Returns a dict for each.
        port: The only port to try, 0 for any; None for the first free port from 8900 to 8919.
        stop: Asks the run to end after its round. Returns whether there is a run. Called on the same event loop. None
            if nothing can be stopped.
        follow: Objects with ``subscribe``, such as an app and a cluster. An event from two of them counts once.
        about: Constant facts, for the page.

    Attributes:
        url: URL of the page, with the token after the #.
        port: Its port on loopback.
        note: Note about the port, or an empty text.
        tunnel: Command that tunnels the page to the ssh client's machine, or an empty text.
    """

    def __init__(
        self,
        look: Look,
        *,
        port: int | None = None,
        stop: Callable[[], bool] | None = None,
        follow: Sequence[Any] = (),
        **about: Any,
    ) -> None:
        self.url = ""
        self.port = 0
        self.note = self.tunnel = ""
        self._requested_port = port
        self._look = look
        self._stop = stop
        self._follow = follow
        self._take_off: list[Callable[[], None]] = []
        facts: dict[str, Any] = dict(version=__version__, host=platform.node(), pid=os.getpid(), began=time.time())
        about = {"title": "", "cluster": "", **about, **facts, "can_stop": stop is not None}
        self._board = Board(**about)
        self._inbox: deque[tuple[float, Event | None]] = deque()
        self._newest: Event | None = None
        self._viewers: set[ServerConnection] = set()
        self._answers: Future[list[dict[str, Any]]] | None = None
        self._asked_at = 0.0
        self._was_heard = True  # whether the master's event loop has begun the last call
        self._closed = False
        self._metrics_at = 0.0
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None

    # -- on the master's event loop -----------------------------------------------------------------------------------

    async def open(self) -> Dashboard:
        """Serve the page. Return when it answers requests.

        Raises:
            ListenError: No port is free, or the page cannot be served.
            AuthError: The token cannot be stored.
            ConfigError: ``DDLF_DASHBOARD_URL`` is not a URL.
        """
        self._token = automatic_token("dashboard token").primary.decode()
        sock, self.note = address.listen(self._requested_port)
        self.port = sock.getsockname()[1]
        try:
            self.url = address.page_url(self.port, self._token, os.environ)
            self.tunnel = address.tunnel(self.port, os.environ)
        except DDLFError:
            sock.close()
            raise
        self._master = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._master.create_future()
        self._thread = threading.Thread(target=self._run, args=(sock, ready), name="ddlf-dashboard", daemon=True)
        self._thread.start()
        try:
            await asyncio.wait_for(ready, READY_S)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise ListenError(f"the dashboard on port {self.port} did not answer within {READY_S:g} s") from None
            if isinstance(error, OSError):
                raise ListenError(f"the dashboard on port {self.port} cannot be served: {error}") from None
            raise
        self._take_off = [source.subscribe(self.tell) for source in self._follow]
        return self

    def tell(self, event: Event, at: float | None = None) -> None:
        """Show an event on the page. This method is a sink, so it can subscribe to an app or a cluster.

        Args:
            event: The event.
            at: Its time, in seconds since 1970; None for now.
        """
        if event is not self._newest:
            self._newest = event
            self._inbox.append((time.time() if at is None else at, event))

    def stopping(self) -> None:
        """Show that the user asked the run to end. Any thread and any signal handler may call this."""
        self._inbox.append((time.time(), None))

    def close(self) -> None:
        """Show the last state to all viewers, and end. Safe to call again."""
        while self._take_off:
            self._take_off.pop()()
        self._closed = True
        if self._thread is not None and self._thread.is_alive():
            if self._loop is not None and self._end is not None:
                with contextlib.suppress(RuntimeError):  # the loop has just ended by itself
                    self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join(2 * END_S)

    async def __aenter__(self) -> Dashboard:
        return await self.open()

    async def __aexit__(self, *exc: object) -> None:
        self.close()

    # -- on the dashboard's thread ------------------------------------------------------------------------------------

    def _run(self, sock: Any, ready: asyncio.Future[None]) -> None:
        def answer(error: BaseException | None) -> None:
            if not ready.done():
                ready.set_exception(error) if error is not None else ready.set_result(None)

        def tell(error: BaseException | None = None) -> None:
            with contextlib.suppress(RuntimeError):  # the master's loop has ended
                self._master.call_soon_threadsafe(answer, error)

        try:
            with sock:
                asyncio.run(self._serve(sock, tell))
        except Exception as error:
            tell(error if isinstance(error, OSError) else OSError(f"{type(error).__name__}: {error}"))

    async def _serve(self, sock: Any, ready: Callable[[], None]) -> None:
        from websockets.asyncio.server import serve

        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        files = {
            f"/{path.name}": (path.read_bytes(), KINDS[path.suffix])
            for folder in (STATIC, SHARED)
            for path in folder.iterdir()
            if path.suffix in KINDS
        }
        self._files = {**files, "/": files["/index.html"]}
        silent = logging.getLogger("ddlf.monitor.dashboard.websockets")
        silent.disabled = True  # requests by strangers should not appear in the user's terminal
        async with serve(
            self._show,
            sock=sock,
            process_request=self._answer,
            subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]
            compression=None,
            max_size=4096,
            close_timeout=END_S / 2,
            logger=silent,
            server_header=None,
        ):
            file = address.announce(self.port, {"url": self.url, **self._board.about})
            ready()
            try:
                await self._keep_up()
            finally:
                with contextlib.suppress(OSError):
                    file.unlink()

    async def _keep_up(self) -> None:
        assert self._end is not None
        while not (self._closed or self._end.is_set()):
            self._take_in()
            self._ask_workers()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._end.wait(), 1 / RATE_HZ)
        self._take_in()
        self._board.about["over"] = True
        with contextlib.suppress(TimeoutError):  # wait for the last message to each viewer that still receives
            async with asyncio.timeout(END_S / 2):
                await asyncio.gather(*(viewer.wait_closed() for viewer in self._viewers))

    def _take_in(self) -> None:
        while self._inbox:
            at, event = self._inbox.popleft()
            if event is None:
                self._board.stop(at)
            else:
                self._board.tell(event, at)

    def _ask_workers(self) -> None:
        """Store the workers' answers about their state, and ask the workers again if there are viewers. At most one
        question is under way.
        """
        now = time.monotonic()
        if self._answers is not None and self._answers.done():
            if self._answers.cancelled() or self._answers.exception() is not None:
                logging.getLogger(__name__).debug("the workers cannot be asked", exc_info=True)
            else:
                self._board.set_workers(self._answers.result())
            self._answers = None
        is_needed = self._viewers or now - self._metrics_at < 60
        if self._answers is None and is_needed and now - self._asked_at >= LOOK_S:
            self._asked_at, self._was_heard = now, False
            with contextlib.suppress(RuntimeError):  # the master's loop has ended
                self._answers = asyncio.run_coroutine_threadsafe(self._ask(), self._master)

    async def _ask(self) -> list[dict[str, Any]]:
        self._was_heard = True
        return await self._look()

    @property
    def _held_s(self) -> float:
        """Return how many seconds the master's event loop has not answered; 0 below ``HELD_UP_S``."""
        silence_s = 0.0 if self._was_heard else time.monotonic() - self._asked_at
        return round(silence_s, 1) if silence_s > HELD_UP_S else 0.0

    # -- requests -----------------------------------------------------------------------------------------------------

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        """Return the answer to an HTTP request; None if it becomes a WebSocket."""
        headers, path = request.headers, request.path.partition("?")[0]
        try:
            host, origin = headers.get("Host", ""), headers.get("Origin")
        except LookupError:  # the request has the header twice
            return _response(400, "the request has a header twice")
        if not address.is_ours(host, origin, self.url):
            return _response(403, "this page answers to its own name only: open it by the URL that the run has printed")
        if path in self._files:
            body, kind = self._files[path]
            return _response(200, body, f"{kind}; charset=utf-8")
        if not self._may(headers.get("Authorization", ""), headers.get("Sec-WebSocket-Protocol", "")):
            return _response(
                401,
                "the token is missing or wrong: open the whole URL that the run has printed, with the text after the #",
            )
        if path == "/metrics":
            return self._metrics()
        if path != "/live":
            return _response(404, "there is no such page")
        if len(self._viewers) >= MOST_VIEWERS:
            return _response(503, f"{MOST_VIEWERS} other viewers are connected")
        return None

    def _may(self, authorization: str, protocols: str) -> bool:
        """Return whether a request contains the page's token, as a bearer token or, from browsers' WebSockets, as a
        subprotocol.
        """
        credentials = [
            authorization.removeprefix("Bearer ").strip(),
            *(protocol.strip() for protocol in protocols.split(",")),
        ]
        return any(
            hmac.compare_digest(credential.encode(errors="replace"), self._token.encode()) for credential in credentials
        )

    def _metrics(self) -> Response:
        try:
            from ddlf.monitor.dashboard.metrics import CONTENT_TYPE, text
        except ImportError:
            return _response(501, "metrics need prometheus-client: pip install 'ddlf[metrics]'")
        self._metrics_at = time.monotonic()
        self._take_in()
        return _response(200, text(self._board), CONTENT_TYPE)

    async def _show(self, viewer: ServerConnection) -> None:
        """Send a viewer the current state, then updates, at its own pace."""
        self._viewers.add(viewer)
        listening = asyncio.ensure_future(self._listen(viewer))
        received, told_at = Received(), 0.0
        self._take_in()
        try:
            while not listening.done():
                over = "over" in self._board.about
                now = time.time()
                message = self._board.news(received, now)
                if message or over or now - told_at >= LOOK_S:
                    told_at = now
                    message |= {"now": now, "held_s": self._held_s, "over": over}
                    await viewer.send(json.dumps(message, separators=(",", ":"), allow_nan=False, default=str))
                if over:
                    await viewer.close(1001, "the master has ended")
                    return
                await asyncio.wait([listening], timeout=1 / RATE_HZ)
        except OSError:
            pass
        finally:
            listening.cancel()
            self._viewers.discard(viewer)

    async def _listen(self, viewer: ServerConnection) -> None:
        async for text in viewer:
            # The text is not JSON, or not a dict; or the master's loop has ended.
            with contextlib.suppress(ValueError, AttributeError, RuntimeError):
                if json.loads(text).get("stop"):
                    self._master.call_soon_threadsafe(self._stop_run)

    def _stop_run(self) -> None:
        if self._stop is not None and self._stop():
            self.stopping()


def _response(status: int, body: str | bytes, kind: str = "text/plain; charset=utf-8") -> Response:
    from websockets.datastructures import Headers
    from websockets.http11 import Response

    data = f"{body}\n".encode() if isinstance(body, str) else body
    headers = Headers({**HEADERS, "Content-Type": kind, "Content-Length": str(len(data)), "Connection": "close"})
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(status, http.HTTPStatus(status).phrase, headers, data)
