"""The server of peers: HTTP and WebSockets on one port, and the weight ledger behind them. Runs on the server.

The event loop only receives, decides and sends. Checks of sets, means, tests and the disk run on threads. One task
writes the journal: entries that arrive while it writes form the next batch, and share a sync. A peer gets the answer to
its post after the entry is on the disk.

Limits follow from the model: a frame is at most a set and its text. A connection holds one frame that it receives and
one answer that it sends. A peer that does not read, or does not answer pings within its lease, is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import http
import json
import logging
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qs, urlsplit

import numpy as np

from ddlf.algorithms.weights import Weights
from ddlf.errors import CheckpointError, CheckpointMismatch, DDLFError, ProtocolError
from ddlf.events import Event
from ddlf.events.record import RoundRecord
from ddlf.monitor.dashboard.address import is_ours
from ddlf.peers import frames, sessions
from ddlf.peers.entries import (
    NO_SET,
    NO_SHARD,
    WITH_SET,
    Arrived,
    Began,
    Ended,
    Entry,
    Invited,
    Joined,
    Left,
    Lost,
    MergeAsked,
    Merged,
    Posted,
    Rejected,
    Validated,
)
from ddlf.peers.frames import Answer, Broken, Bye, End, Hello, Message, Post, Score, Welcome
from ddlf.peers.journal import Journal, needed_sets, open_journal
from ddlf.peers.ledger import Fate, Instruction, Mean, Over, Reply, Unfit, WeightLedger
from ddlf.peers.merging import Part, mean_of_swaps, next_base, state_layout
from ddlf.peers.pages import NO_BROWSERS, BrowserModel, File, files
from ddlf.peers.plan import Plan
from ddlf.peers.rounds import RoundLedger
from ddlf.peers.sets import Layout, layout_of
from ddlf.peers.shards import Shards
from ddlf.peers.swap import SwapLedger
from ddlf.peers.telling import Rarely, Teller

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection
    from websockets.http11 import Request, Response

    from ddlf.peers.turns import TurnConnection, Turns

PING_S = 2.5
"""Seconds between two pings of a peer."""
TICK_S = 0.25
"""Seconds between two looks at leases, deadlines and the end."""
HELLO_S = 10.0
"""Seconds that a new connection has for its hello."""
MOST_CONNECTIONS = 1_000
WRONG_CODE_S = 0.5
"""Seconds until a wrong code is answered."""
MOST_WAITING_FOR_A_NO = 32
"""Wrong codes that wait at once for their answers; others are answered at once, and told to come back later."""
INLINE_BYTES = 256 * 1024
"""Sets up to this size are checked on the event loop: a thread costs more."""
AGAIN_S = 1.0
"""Seconds until the server writes to a disk again that has refused."""
END_S = 5.0
"""Seconds that the end of the server waits for peers to receive the last set."""
CLOSED = "the server of peers ends: nothing more is written to its journal"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; "
    "style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model of a run, as the server needs it.

    Args:
        text: Its text, which peers receive.
        layout: Layout of its sets.
        first: The set to begin with.
        trainable: Per tensor, whether it is trained.
        browser: The model for browsers.
        shards: The data that the server gives to peers; None if they have own data.
    """

    text: str
    layout: Layout
    first: bytes
    trainable: tuple[bool, ...]
    browser: BrowserModel = NO_BROWSERS
    shards: Shards | None = None


Waiting = tuple[Entry, bytes, asyncio.Future[None]]
"""An entry that waits for the disk, its set, and a future that is done when the ledger has taken it."""


class ComeBack(Exception):
    """The connection of a peer must end, but the peer may connect again."""


class Test(Protocol):
    """Tests weights on the server's test data. Called on a thread."""

    def __call__(self, weights: Weights) -> tuple[float, float, int]:
        """Return accuracy, loss and number of samples."""


@dataclass(kw_only=True)
class Line:
    """The connection of one peer.

    Attributes:
        socket: Its WebSocket.
        outbox: Answers to send.
        posted: Number of the post that has no answer yet; 0 without one.
    """

    socket: TurnConnection
    outbox: asyncio.Queue[Reply] = field(default_factory=asyncio.Queue)
    posted: int = 0


class PeerServer:
    """Serves a model to peers.

    Args:
        folder: The folder of the run. If it has a journal, the run continues.
        model: The model.
        plan: How the peers work together.
        say: Prints a line about what happens.
        control: Secret of the commands ``invite``, ``list``, ``kick`` and ``stop``.
        tell: Gets events about the run. It must return at once.
        test: Tests weights on the server's test data; None without such data.
        converged: Returns whether the training is over, from the newest record. Called on a thread.
        url: URL of the server for browsers behind a proxy; empty for the server's own address.

    Attributes:
        ledger: The ledger. Do not change it.
        sets: The bytes of each set that is needed.
        done: Set when the training is over.
    """

    def __init__(
        self,
        folder: Path,
        model: Model,
        plan: Plan,
        *,
        say: Callable[[str], None],
        control: str,
        tell: Callable[[Event], object] = lambda event: None,
        test: Test | None = None,
        converged: Callable[[RoundRecord], bool] | None = None,
        url: str = "",
    ) -> None:
        self.plan = plan
        self.model = model
        self.ledger: WeightLedger = SwapLedger(plan) if plan.way == "swap" else RoundLedger(plan)
        self.sets: dict[int, bytes] = {}
        self.done = asyncio.Event()
        self.port = 0
        self._teller = Teller(self.ledger, tell, model.layout.bytes)
        self._folder = folder
        self._say = say
        self._control = control
        self._test = test
        self._converged = converged
        self._url = url
        self._secure = False
        self._lines: dict[int, Line] = {}
        self._seen: dict[int, float] = {}
        self._connections = 0
        self._refusing = 0
        self._queue: asyncio.Queue[Waiting | None] = asyncio.Queue()
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._outer: Weights = []  # state of the outer optimizer, which belongs to the base
        self._stepped: Weights = []  # its state for the next base
        self._archiving = asyncio.Lock()
        self._leasing = asyncio.Lock()
        self._testing = False
        self._tested_at = 0.0
        self._tested = NO_SET
        self._alone_said = False
        self._shown = Rarely(time.time())
        self._next_set = 1
        self._next_peer = 1
        self._journal: Journal
        self._writer: asyncio.Future[None]
        self._turns: Turns
        self._loop: asyncio.AbstractEventLoop
        self._failure: BaseException | None = None

    # -- begin and end ------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Read the journal of the folder, or begin a new one.

        Raises:
            CheckpointError: The journal cannot be read or written.
        """
        self._journal, found = open_journal(self._folder)
        made: list[Instruction] = []
        if found.snapshot is not None:
            self.ledger.restore(found.snapshot)
        else:
            self._journal.begin_file(self.ledger.state(), {})
        for entry in found.entries:
            with contextlib.suppress(Unfit):  # it did not fit then, either
                made += self.ledger.apply(entry)
        if self.ledger.base == NO_SET:
            began = Began(at=time.time(), set=1, run=sessions.new_secret()[:16])
            self._journal.append([(began, self.model.first)])
            self.ledger.apply(began)
            self.sets[1] = self.model.first
        else:
            self.sets = needed_sets(self._journal, self.ledger.pinned)
            self._outer = self._stepped = self._split_base()
            self._say(
                f"resumed   {self.ledger.counts.get('posts', 0):,} posts of {len(self.ledger.members)} peers are in the journal"
            )
        self._next_set = self.ledger.next_set
        self._next_peer = max(self.ledger.members, default=0) + 1
        now = time.time()
        self._seen = dict.fromkeys(self.ledger.present, now)

    def tell_begin(self, name: str) -> None:
        """Tell that the run begins, or continues. Call it after ``recover``."""
        self._teller.begin(name, 0, time.time())

    def tell_end(self) -> None:
        """Tell that the run has ended, or was interrupted."""
        self._teller.end("complete" if self.ledger.over else "stopped", self.ledger.ended)

    def _split_base(self) -> Weights:
        """Return the state of the outer optimizer, which follows the base in the journal, and cut it off."""
        size, base = self.model.layout.bytes, self.ledger.base
        rest = self.sets[base][size:]
        self.sets = {number: data[:size] for number, data in self.sets.items()}
        if not rest:
            return []
        layout = state_layout(self.plan, self.model.layout.decode(self.sets[base]))
        if layout is None or (why := layout.fault(rest)):
            raise CheckpointMismatch(f"the state of the outer optimizer in {self._folder} cannot be used: {why}")
        return layout.decode(rest)

    def _for_file(self) -> dict[int, bytes]:
        """Return the bytes of all needed sets in the form of the journal."""
        base = self.ledger.base
        return {number: data + state_bytes(self._outer) * (number == base) for number, data in self.sets.items()}

    async def serve(
        self, sock: socket.socket, ready: Callable[[], None], context: ssl.SSLContext | None = None
    ) -> None:
        """Serve until the training is over or the task is cancelled.

        Args:
            sock: The listening socket.
            ready: Called when peers can join.
            context: For TLS; None for plain HTTP.

        Raises:
            CheckpointError: The journal cannot be written.
        """
        from websockets.asyncio.server import serve

        from ddlf.peers.turns import Turns

        self._turns = Turns()
        self._loop = asyncio.get_running_loop()
        self.port, self._secure = sock.getsockname()[1], context is not None or self._url.startswith("https:")
        silent = logging.getLogger("ddlf.peers.websockets")
        silent.disabled = True  # requests of strangers should not appear in the user's terminal
        async with serve(
            self._live,  # type: ignore[arg-type]  # it gets what create_connection makes
            sock=sock,
            ssl=context,
            process_request=self._request,
            compression=None,
            max_size=frames.PREFIX.size + frames.MOST_TEXT_BYTES + self.model.layout.bytes,
            max_queue=1,
            create_connection=self._turns.connection(),  # type: ignore[arg-type]  # a factory will do
            ping_interval=None,  # ``_watch`` pings, since the time limit is the peer's lease
            close_timeout=1.0,
            logger=silent,
            server_header=None,
        ):
            self._writer = asyncio.ensure_future(self._write_entries())
            self._writer.add_done_callback(self._ended)
            self._begin(self._keep_time())
            if (pending := self.ledger.pending()) is not None:
                self._carry_out(pending)
            if self.ledger.over:
                self._say(f"over      this training has ended before: {self.ledger.ended}; begin a new one to train on")
                self.done.set()
            ready()
            try:
                await self.done.wait()
                if self._failure is not None:
                    raise self._failure
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(END_S if self.ledger.over else 0):
                        lines = [line.socket.wait_closed() for line in self._lines.values()]
                        await asyncio.gather(*lines)
            finally:
                await self._end_tasks()
                await self._end_writer()
                await self._end_tasks()  # the last entries may have begun some
                self._teller.tick(time.time())
                self._journal.close()

    def leave(self) -> None:
        """End the server, but not the training: a later server continues it. A signal handler may call this."""
        self._loop.call_soon_threadsafe(self.done.set)

    async def last_set(self) -> bytes:
        """Return the mean of all sets as a merge-all would make it, without a change of the ledger."""
        numbers = self.ledger.all_sets()
        if len(numbers) < 2:
            return self.sets[numbers[0]]
        parts = [self._part(number) for number in numbers]
        return self.model.layout.encode(await asyncio.to_thread(mean_of_swaps, parts))

    def _part(self, number: int) -> Part:
        held = self.ledger.sets[number]
        weights = self.model.layout.decode(self.sets[number])
        return Part(weights=weights, trainings=held.trainings, samples=held.samples)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end_writer(self) -> None:
        """Write the entries that wait for the disk, and refuse later ones."""
        self._closed = True
        self._queue.put_nowait(None)
        await asyncio.gather(self._writer, return_exceptions=True)
        while not self._queue.empty():  # the writer has failed
            if (waiting := self._queue.get_nowait()) is not None:
                _set_exception(waiting[2], CheckpointError(CLOSED))

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.done.set()

    # -- the journal ----------------------------------------------------------------------------------------------------

    async def commit(self, entry: Entry, data: bytes = b"") -> None:
        """Write an entry to the journal, let the ledger take it, and carry out what follows.

        Raises:
            Unfit: The entry does not fit the ledger.
            CheckpointError: The journal cannot be written.
        """
        if self._closed:
            raise CheckpointError(CLOSED)
        self.ledger.admit(entry)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((entry, data, done))
        await done

    async def _write_entries(self) -> None:
        """Write entries in batches until None."""
        is_open = True
        while is_open:
            batch = [await self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get_nowait())
            is_open = None not in batch
            await self._write([one for one in batch if one is not None])

    async def _write(self, batch: list[Waiting]) -> None:
        """Write entries with one sync. A disk that refuses fails the entries, and not the server."""
        try:
            await asyncio.to_thread(self._journal.append, [(entry, data) for entry, data, _ in batch])
        except DDLFError as error:
            self._say(f"error     {error}")
            for _, _, done in batch:
                _set_exception(done, error)
            return
        for entry, data, done in batch:
            self._take(entry, data, done)
        if self._journal.is_long:
            try:
                await asyncio.to_thread(self._journal.begin_file, self.ledger.state(), self._for_file())
            except DDLFError as error:
                self._say(f"error     {error}")
            else:
                self._begin(self._archive())

    async def _archive(self) -> None:
        async with self._archiving:
            try:
                await asyncio.to_thread(self._journal.archive)
            except DDLFError as error:
                self._say(f"error     {error}")

    def _take(self, entry: Entry, data: bytes, done: asyncio.Future[None]) -> None:
        validated = self.ledger.validated
        if isinstance(entry, WITH_SET):
            self.sets[entry.set] = data[: self.model.layout.bytes]
        try:
            made = self.ledger.apply(entry)
        except Unfit as error:  # something in the same batch came first
            if isinstance(entry, WITH_SET):
                del self.sets[entry.set]
            _set_exception(done, error)
            return
        if isinstance(entry, Merged):
            self._outer = self._stepped
        self._teller.took(entry)
        for instruction in made:
            self._carry_out(instruction)
        self._forget([validated] if validated != self.ledger.validated else [])
        if not done.done():
            done.set_result(None)

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Reply():
                if (line := self._lines.get(instruction.peer)) is not None:
                    line.outbox.put_nowait(instruction)
            case Fate():
                self._forget([instruction.set])
            case Mean():
                self._begin(self._merge(instruction))
            case Over():
                self._begin(self._end(instruction.why))

    def _forget(self, sets: Sequence[int]) -> None:
        for number in sets:
            if not self.ledger.needs(number):
                self.sets.pop(number, None)

    async def _merge(self, mean: Mean) -> None:
        parts = {number: self._part(number) for number in mean.of}
        lines: list[str] = []
        if mean.base == NO_SET:
            weights = await asyncio.to_thread(mean_of_swaps, list(parts.values()))
        else:
            base = self.model.layout.decode(self.sets[mean.base])
            weights, outer, lines = await asyncio.to_thread(
                next_base, self.plan, base, parts, self._outer, self.model.trainable
            )
            self._stepped = [np.asarray(array) for array in outer]
        for line in lines:
            self._say(f"suspect   {line}")
        data = await asyncio.to_thread(self.model.layout.encode, weights)
        data += state_bytes(self._stepped)
        while True:
            try:
                await self.commit(Merged(at=time.time(), set=self._new_set(), of=mean.of), data)
                return
            except CheckpointError:  # the disk refuses now, and the sets stay as they are
                await asyncio.sleep(AGAIN_S)

    def _new_set(self) -> int:
        self._next_set += 1
        return self._next_set - 1

    # -- time -----------------------------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = time.time()
            record = self._teller.tick(now)
            if record is not None and self._converged is not None and not self.ledger.ended:
                await self._ask_whether_converged(self._converged, record)
            seen = self._seen | {peer: self._heard(peer, line) for peer, line in self._lines.items()}
            for entry in self.ledger.due(now, seen):
                if isinstance(entry, Left) and self._seen.get(entry.peer, 0.0) >= now:
                    continue  # it came back while an earlier entry was written
                try:
                    await self.commit(entry)
                except (Unfit, CheckpointError):  # it comes again if it is still due
                    continue
                if isinstance(entry, Left):
                    self._say(f"left      {self._name(entry.peer)}: {entry.why}")
            due = self.plan.validate_s and now - self._tested_at >= self.plan.validate_s
            if self._test is not None and due and not self._testing and self.ledger.present:
                self._tested_at, self._testing = now, True
                self._begin(self._validate())

    async def _ask_whether_converged(self, converged: Callable[[RoundRecord], bool], record: RoundRecord) -> None:
        try:
            is_over = await asyncio.to_thread(converged, record)
        except Exception as error:  # the owner's code
            self._converged = None
            self._say(f"error     is_convergent is not called again: {type(error).__name__}: {error}")
            return
        if is_over:
            with contextlib.suppress(Unfit, CheckpointError):
                await self.commit(Ended(at=time.time(), why="is_convergent of the app has ended it"))

    async def _validate(self) -> None:
        assert self._test is not None
        number = self.ledger.start()
        try:
            weights = self.model.layout.decode(self.sets[number])
            accuracy, loss, samples = await asyncio.to_thread(self._test, weights)
            entry = Validated(at=time.time(), set=number, accuracy=accuracy, loss=loss, samples=samples)
            with contextlib.suppress(Unfit, CheckpointError):
                await self.commit(entry)
                if number != self._tested and self._shown.is_due(time.time()):
                    self._say(f"validated set {number}: accuracy {accuracy:.4f}, loss {loss:.4f}, {samples:,} samples")
                self._tested = number
        finally:
            self._testing = False

    async def _end(self, why: str) -> None:
        final = self.ledger.base
        self._say(f"over      {why}")
        for peer, line in list(self._lines.items()):
            self._begin(self._send_end(peer, line, why, final))
        self.done.set()

    async def _send_end(self, peer: int, line: Line, why: str, final: int) -> None:
        with contextlib.suppress(OSError, Exception):
            await line.socket.send(frames.pieces(End(why=why, set_number=final, set=self.sets[final])))
            await line.socket.close(1000, "over")

    # -- HTTP -----------------------------------------------------------------------------------------------------------

    async def _request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer an HTTP request; None if it becomes a WebSocket."""
        headers, url = request.headers, urlsplit(request.path)
        try:
            host, origin = headers.get("Host", ""), headers.get("Origin")
            code, cookies = headers.get(sessions.CODE_HEADER, ""), headers.get("Cookie", "")
            authorization = headers.get("Authorization", "")
        except LookupError:
            return response(400, "the request has a header twice")
        if not is_ours(host, origin, self._url or f"http://127.0.0.1:{self.port}"):
            return response(403, "this server answers to its own name only: use the link as it was printed")
        match url.path:
            case "/join":
                return await self._join(code)
            case "/live":
                peer = self._peer_of(sessions.key_in(self.port, cookies, authorization))
                if not peer:
                    return response(401, "you have no session here: join with a link first")
                if self._connections >= MOST_CONNECTIONS:
                    return response(503, f"{MOST_CONNECTIONS} others are connected")
                connection.peer = peer  # type: ignore[attr-defined]
                return None
            case "/graph":
                return self._facts(self._peer_of(sessions.key_in(self.port, cookies, authorization)))
            case path if path.startswith("/control/"):
                if not hmac.compare_digest(authorization.encode(errors="replace"), f"Bearer {self._control}".encode()):
                    return response(401, "this needs the server's own secret")
                try:
                    return response(200, json.dumps(await self._command(path.removeprefix("/control/"), url.query)))
                except DDLFError as error:
                    return response(409, str(error))
            case "/shard":
                return await self._shard(self._peer_of(sessions.key_in(self.port, cookies, authorization)))
            case path if (file := files().get(path.removeprefix("/"))) is not None:
                return file_response(file)
        return response(404, "there is no such page")

    def _facts(self, peer: int) -> Response:
        """Answer the page's question about the model."""
        if not peer:
            return response(401, "you have no session here: join with a link first")
        browser = self.model.browser
        if browser.refusal:
            return response(409, browser.refusal)
        return response(200, browser.facts(self.plan, self.ledger.run, peer))

    async def _shard(self, peer: int) -> Response:
        """Answer a peer with the shard that it has."""
        if not peer:
            return response(401, "you have no session here: join with a link first")
        member = self.ledger.members[peer]
        if self.model.shards is None or not member.present:
            return response(409, "you have no shard here: connect first, without own data")
        content = await asyncio.to_thread(self.model.shards.content, member.shard)
        return file_response(File("application/octet-stream", content))

    async def _join(self, code: str) -> Response:
        key, peer = sessions.new_secret(), self._next_peer
        entry = Joined(at=time.time(), peer=peer, code=sessions.hashed(code), key=sessions.hashed(key))
        try:
            self.ledger.admit(entry)
            self._next_peer += 1
            await self.commit(entry)
        except Unfit as error:
            if self._refusing >= MOST_WAITING_FOR_A_NO:
                return response(429, "too many wrong codes at once: try again later")
            self._refusing += 1
            await asyncio.sleep(WRONG_CODE_S)
            self._refusing -= 1
            return response(403, str(error))
        found = response(200, json.dumps({"peer": peer, "key": key, "run": self.ledger.run}))
        found.headers["Set-Cookie"] = sessions.cookie(self.port, key, secure=self._secure)
        return found

    def _peer_of(self, key: str) -> int:
        """Return the number of the peer with this key; 0 if nobody has it."""
        if not key:
            return 0
        digest = sessions.hashed(key)
        found = [peer for peer, one in self.ledger.members.items() if one.key == digest and not one.removed]
        return found[0] if found else 0

    async def invite(self, count: int = 1) -> list[str]:
        """Return new codes, each for one peer."""
        codes = [sessions.new_secret() for _ in range(count)]
        now = time.time()
        entries = [Invited(at=now, code=sessions.hashed(code), until=now + sessions.CODE_S) for code in codes]
        await asyncio.gather(*map(self.commit, entries))
        return codes

    async def _command(self, name: str, query: str) -> dict[str, Any]:
        asked = {key: values[0] for key, values in parse_qs(query).items()}
        match name:
            case "invite":
                return {"codes": await self.invite(min(int(asked.get("count", "1")), 100))}
            case "list":
                return self.overview()
            case "merge":
                await self.commit(MergeAsked(at=time.time()))
                return {}
            case "stop":
                await self.commit(Ended(at=time.time(), why="stopped by ddlf peers stop"))
                return {}
            case "kick":
                peer = int(asked["peer"])
                await self.commit(Left(at=time.time(), peer=peer, why="removed", removed=True))
                if (line := self._lines.get(peer)) is not None:
                    self._begin(self._refuse(line.socket, "you were removed", "ask for a new link"))
                return {}
        raise Unfit(f"there is no command {name!r}")

    def overview(self) -> dict[str, Any]:
        """Return facts about the peers and the sets, for ``ddlf peers list``."""
        ledger, now = self.ledger, time.time()
        states: dict[str, int] = {}
        for held in ledger.sets.values():
            states[held.state] = states.get(held.state, 0) + 1
        return {
            "run": ledger.run,
            "way": self.plan.way,
            "over": ledger.ended,
            "shards": self.plan.shards,
            "free_shards": ledger.free_shards,
            "counts": ledger.counts,
            "sets": states,
            "accuracy": ledger.validations[-1].accuracy if ledger.validations else None,
            "peers": [
                {
                    "peer": peer,
                    "name": one.name,
                    "connected": peer in self._lines,
                    "present": one.present,
                    "removed": one.removed,
                    "samples": one.samples,
                    "shard": one.shard if one.present else NO_SHARD,
                    "posts": one.number,
                    "trainings": one.trainings,
                    "updates": one.updates,
                    "posted_s_ago": round(now - one.posted_at, 1) if one.posted_at else None,
                }
                for peer, one in sorted(ledger.members.items())
                if one.samples  # a member that has never arrived has used its code only
            ],
        }

    def _name(self, peer: int) -> str:
        return f"peer {peer}" + (f" ({name})" if (name := self.ledger.members[peer].name) else "")

    # -- a peer -----------------------------------------------------------------------------------------------------------

    async def _live(self, socket: TurnConnection) -> None:
        """Talk to one peer until its connection ends."""
        peer: int = socket.peer  # type: ignore[attr-defined]
        self._connections += 1
        try:
            async with asyncio.timeout(HELLO_S):
                hello = await self._receive(socket, (Hello,))
            assert isinstance(hello, Hello)
            await self._greet(socket, peer, hello)
        except (ComeBack, CheckpointError) as error:  # a full disk: the peer sends its post again
            await self._send_away(socket, str(error) if isinstance(error, ComeBack) else "try again later")
        except DDLFError as error:  # some are an OSError, too
            await self._refuse(socket, error.message, error.hint)
        except TimeoutError:
            await self._send_away(socket, f"no hello within {HELLO_S:.0f} s")
        except OSError:
            pass
        except Exception as error:
            if not _is_closed(error):
                self._say(f"error     the connection of {self._name(peer)} ended: {type(error).__name__}: {error}")
        finally:
            self._connections -= 1
            self._turns.end(socket)

    async def _greet(self, socket: TurnConnection, peer: int, hello: Hello) -> None:
        ledger = self.ledger
        keeps = hello.keeps and hello.run == ledger.run
        if hello.run and hello.run != ledger.run:
            raise Unfit("you have taken part in another run", hint="join this one with a new link")
        if hello.layout and hello.layout != self.model.layout.digest:
            raise Unfit("your model has other weights than the server's", hint="join again with a new link")
        name = "".join(letter for letter in hello.name if letter.isprintable())[: frames.MOST_NAME]
        if (earlier := self._lines.get(peer)) is not None:
            await self._refuse(earlier.socket, "the same peer has connected again", "close other windows and programs")
        self._seen[peer] = time.time()  # before it arrives: its lease begins at once
        await self._admit(peer, name, hello.samples, keeps=keeps)
        if len(ledger.present) == 1 and not self._alone_said:
            self._alone_said = True
            self._say("alone     one peer trains alone until others join; ddlf peers invite prints links for them")
        member, start = ledger.members[peer], NO_SET if keeps else ledger.start()
        line = self._lines[peer] = Line(socket=socket)
        welcome = Welcome(
            run=ledger.run,
            peer=peer,
            plan=asdict(self.plan),
            model=self.model.text,
            layout=self.model.layout.digest,
            number=member.number,
            set_number=start,
            trainings=member.trainings,
            rate=ledger.rate,
            shard=member.shard,
            set=self.sets[start] if start else b"",
        )
        tasks: list[asyncio.Future[None]] = []
        try:
            await socket.send(frames.pieces(welcome))
            del welcome  # its set
            tasks += [asyncio.ensure_future(self._send_answers(line)), asyncio.ensure_future(self._watch(peer, line))]
            await self._listen(peer, line)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._lines.get(peer) is line:
                del self._lines[peer]

    async def _admit(self, peer: int, name: str, samples: int, *, keeps: bool) -> None:
        """Let a peer take part, with its own samples or with a shard."""
        facts: dict[str, Any] = {"peer": peer, "name": name, "keeps": keeps}
        shards = self.model.shards
        if shards is None:
            await self.commit(Arrived(at=time.time(), samples=samples, **facts))
        else:
            async with self._leasing:  # a shard is free until the entry is on the disk
                shard = self.ledger.shard_for(peer, samples)
                samples = shards.sizes[shard - 1]
                await self.commit(Arrived(at=time.time(), samples=samples, shard=shard, **facts))
        of = f" of shard {self.ledger.members[peer].shard}" if shards is not None else ""
        self._say(f"here      {self._name(peer)} with {samples:,} samples{of}{' again' * keeps}")

    async def _listen(self, peer: int, line: Line) -> None:
        while True:
            message = await self._receive(line.socket, (Post, Score, Broken, Bye))
            self._seen[peer] = time.time()
            try:
                await self._received(peer, line, message)
            except Unfit:
                member = self.ledger.members[peer]
                if not (self.ledger.ended or member.present or member.removed):
                    raise ComeBack("the lease has run out") from None
                if not self.ledger.ended:  # otherwise the end is on its way to the peer
                    raise
            self._turns.end(line.socket)
            if isinstance(message, Bye):
                return
            del message  # its set is no longer needed while the peer trains

    async def _received(self, peer: int, line: Line, message: Message) -> None:
        match message:
            case Post():
                await self._posted(peer, line, message)
            case Score():
                await self._was_tested(peer, message)
            case Broken():
                why = message.why[: frames.MOST_TEXT_BYTES]
                self._say(f"again     {self._name(peer)} begins again: {why}")
                await self.commit(Lost(at=time.time(), peer=peer, why=why))
            case Bye():
                await self.commit(Left(at=time.time(), peer=peer, why="it said goodbye"))
                self._say(f"left      {self._name(peer)}")

    async def _posted(self, peer: int, line: Line, post: Post) -> None:
        ledger = self.ledger
        if ledger.is_repeated(peer, post.number):
            line.posted = post.number
            if (reply := ledger.repeat(peer)) is not None:
                line.outbox.put_nowait(reply)
            return
        if line.posted:
            raise ProtocolError(f"post {line.posted} is not answered yet")
        line.posted = post.number
        why = self.model.layout.fault(post.set)
        if not why:
            if len(post.set) <= INLINE_BYTES:
                why = self._not_finite(post.set)
            else:
                why = await asyncio.to_thread(self._not_finite, post.set)
        now = time.time()
        if why:
            self._say(f"rejected  post {post.number} of {self._name(peer)}: {why}")
            await self.commit(Rejected(at=now, peer=peer, number=post.number, contains=post.contains, why=why))
            return
        entry = Posted(
            at=now,
            peer=peer,
            number=post.number,
            set=self._new_set(),
            contains=post.contains,
            updates=post.updates,
            base=post.base,
            accuracy=_from_wire(post.accuracy),
            loss=_from_wire(post.loss),
        )
        await self.commit(entry, post.set)

    def _not_finite(self, data: bytes) -> str:
        return self.model.layout.not_finite(self.model.layout.decode(data))

    async def _was_tested(self, peer: int, tested: Score) -> None:
        entry = Validated(
            at=time.time(),
            set=tested.set_number,
            accuracy=_from_wire(tested.accuracy),
            loss=_from_wire(tested.loss),
            samples=tested.samples,
            peer=peer,
        )
        await self.commit(entry)

    async def _send_answers(self, line: Line) -> None:
        """Send answers one by one, as fast as the peer reads."""
        while True:
            reply = await line.outbox.get()
            with_set = reply.set != NO_SET and reply.answer != "validate"
            if with_set and reply.set not in self.sets:  # a merge-all has taken it back meanwhile
                reply, with_set = replace(reply, answer="continue", set=NO_SET), False
            held = self.ledger.sets.get(reply.set)
            answer = Answer(
                number=reply.number,
                answer=reply.answer,
                set_number=reply.set,
                trainings=held.trainings if held is not None else 0,
                accuracy=_to_wire(held.accuracy) if held is not None else -1.0,
                rate=self.ledger.rate,
                why=reply.why,
                set=self.sets[reply.set] if with_set else b"",
            )
            line.posted = 0
            await line.socket.send(frames.pieces(answer))
            del answer  # its set

    def _heard(self, peer: int, line: Line) -> float:
        """Return the time of the last sign of life. A byte of a message is one, and so is waiting for a turn to send it."""
        waits = self._turns.waits(line.socket)
        return time.time() if waits else max(self._seen.get(peer, 0.0), line.socket.heard_at)

    async def _watch(self, peer: int, line: Line) -> None:
        """Ping a peer, and end its connection if it does not answer within its lease."""
        while True:
            await asyncio.sleep(PING_S)
            try:
                async with asyncio.timeout(self.ledger.members[peer].lease_s):
                    await (await line.socket.ping())
            except TimeoutError:
                if time.time() - self._heard(peer, line) > self.ledger.members[peer].lease_s:
                    line.socket.transport.abort()
                    return
                continue  # the answer to the ping follows its message
            self._seen[peer] = time.time()

    async def _receive(self, socket: ServerConnection, of: tuple[type[Message], ...]) -> Message:
        data = await socket.recv()
        if isinstance(data, str):
            raise ProtocolError("a frame is a binary message, got text")
        return frames.decode(data, of, self.model.layout.bytes if of != (Hello,) else 0)

    async def _send_away(self, socket: ServerConnection, why: str) -> None:
        """End a connection so that the peer connects again by itself."""
        with contextlib.suppress(Exception):
            await socket.close(1013, why)

    async def _refuse(self, socket: ServerConnection, why: str, hint: str) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(END_S):
                await socket.send(frames.encode(End(why=why[:1000], hint=hint, over=False)))
                await socket.close(1008, "refused")


def response(status: int, body: str) -> Response:
    """Return an HTTP response. JSON bodies begin with a brace."""
    kind = "application/json" if body.startswith("{") else "text/plain; charset=utf-8"
    return file_response(File(kind, f"{body}\n".encode()), status)


def file_response(file: File, status: int = 200) -> Response:
    """Return an HTTP response with a file."""
    from websockets.datastructures import Headers
    from websockets.http11 import Response

    facts = {"Content-Type": file.kind, "Content-Length": str(len(file.content)), "Connection": "close"}
    return Response(status, http.HTTPStatus(status).phrase, Headers(HEADERS | facts), file.content)


def state_bytes(state: Weights) -> bytes:
    """Return the state of an outer optimizer as it follows its base in the journal; empty without a state."""
    return layout_of({str(number): array for number, array in enumerate(state)}).encode(state) if state else b""


def _set_exception(done: asyncio.Future[None], error: BaseException) -> None:
    if not done.done():
        done.set_exception(error)


def _is_closed(error: BaseException) -> bool:
    from websockets.exceptions import ConnectionClosed

    return isinstance(error, ConnectionClosed)


def _from_wire(value: float) -> float:
    """Return an accuracy or a loss of a message: -1 stands for none."""
    return value if value >= 0 else float("nan")


def _to_wire(value: float) -> float:
    return value if value >= 0 else -1.0
