"""The server of peers: it puts its parts together, talks to each peer, and has begin and end. Runs on the server.

| part | what it has |
|---|---|
| ``WeightLedger`` | who takes part, and what became of each set; it decides |
| ``JournalWriter`` | the only task that writes entries; the ledger changes only in its ``take`` |
| ``KeptSets`` | the bytes of the needed sets |
| ``Front`` | HTTP, until a peer has its WebSocket |
| ``Leases`` | the connections, and when each peer was heard last |
| ``PostChecks`` | all checks of a post before its entry |
| ``Means`` | means and sums, which become entries |
| ``ServerValidation`` | tests on the server's own data |

The event loop only receives, decides and sends. Checks of large sets, means, tests and the disk run on threads. A peer gets
the answer to its post after the entry is on the disk. While an entry is written, all other tasks run: what they read from
the ledger before an ``await`` may be old after it. ``_take`` and all that it calls await nothing.

Limits follow from the model: a frame is at most a set and its text. A connection holds one frame that it receives and
one answer that it sends. A peer that does not read, or does not answer pings within its lease, is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from ddlf.algorithms.set_merge import towards
from ddlf.errors import CheckpointError, DDLFError, ProtocolError
from ddlf.events import Event
from ddlf.events.record import RoundRecord
from ddlf.peers import clock, frames, sessions
from ddlf.peers.checks import Finding, Last, SetCheck
from ddlf.peers.entries import (
    NO_SET,
    NO_SHARD,
    WITH_SET,
    Arrived,
    Began,
    Ended,
    Entry,
    Invited,
    Left,
    Lost,
    MergeAsked,
    Merged,
    Posted,
    Rejected,
    Summed,
    Validated,
)
from ddlf.peers.frames import (
    SECURE_FROM_PEER,
    Answer,
    Broken,
    Bye,
    End,
    Hello,
    Message,
    Post,
    Score,
    Welcome,
)
from ddlf.peers.front import FULL, Front
from ddlf.peers.journal import Journal, open_journal
from ddlf.peers.journal_writer import JournalWriter, unwritten_end
from ddlf.peers.kept_sets import KeptSets
from ddlf.peers.leases import Leases
from ddlf.peers.ledger import STRIKES, EndForAll, Fate, Instruction, Mean, Reply, Unfit, WeightLedger
from ddlf.peers.listener import Door
from ddlf.peers.means import Means
from ddlf.peers.merging import mean_of_swaps
from ddlf.peers.peer_connection import PeerConnection, WaitingAnswer
from ddlf.peers.plan import Plan
from ddlf.peers.post_checks import PostChecks
from ddlf.peers.quotas import Quotas
from ddlf.peers.release_counter import ReleaseCounter
from ddlf.peers.rounds import RoundLedger
from ddlf.peers.run_events import Teller
from ddlf.peers.running_server import CommandAnswer, Done, Invitations, ListedPeer, Overview, Stopped
from ddlf.peers.said_lately import SaidLately
from ddlf.peers.secure_ledger import SecureLedger
from ddlf.peers.secure_rounds import AddUp, Do, SecureRounds, Tell
from ddlf.peers.secure_updates import terms_of, values_in
from ddlf.peers.served_model import Model
from ddlf.peers.server_validation import ServerValidation, Validator
from ddlf.peers.spending import Spending
from ddlf.peers.swap import SwapLedger
from ddlf.peers.wire import Wire

if TYPE_CHECKING:
    from websockets.asyncio.server import ServerConnection

    from ddlf.peers.turns import Copies, TurnConnection, Turns

TICK_S = 0.25
"""Seconds between two looks at leases, deadlines and the end."""
HELD_UP_S = 1.0
"""A sleep that is longer by these seconds shows that the server was held up, as on an overloaded machine."""
HELLO_S = 60.0
"""Seconds that a new connection has for its hello. A browser first ends its batch, which may be slow."""
END_S = 3600.0
"""Most seconds that the end of the server waits for peers that still receive the last set."""
SAID_END_S = 2.0
"""The server says that it waits for peers after these seconds."""
REFUSE_S = 5.0
"""Seconds that the server waits for a peer to receive why it is refused."""
HAS_END = "it has received the last set"


class ComeBack(Exception):
    """The connection of a peer must end, but the peer may connect again."""


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
        url: URL of the server for browsers; empty for its own address on loopback.
        proxied: Whether all connections come from a proxy, which names the address of each request.
        quotas: Limits of the use by peers and addresses; None for the usual ones.

    Attributes:
        ledger: The ledger. Do not change it.
        writer: Writes entries to the journal, after ``recover``.
        wire: Makes the sets that travel.
        check: Judges posts before other peers get their sets.
        sets: The sets that are needed.
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
        test: Validator | None = None,
        converged: Callable[[RoundRecord], bool] | None = None,
        url: str = "",
        proxied: bool = False,
        quotas: Quotas | None = None,
    ) -> None:
        self.plan = plan
        self.quotas = quotas or Quotas()
        self._validation_requests: dict[int, int] = {}  # by peer: the set that it was asked to validate
        self.model = model
        self.ledger: WeightLedger = SwapLedger(plan) if plan.way == "swap" else RoundLedger(plan)
        self._sums: SecureRounds | None = None
        if plan.secure_aggregation:
            self.ledger = ledger = SecureLedger(plan)
            terms = partial(self._terms, plan, model.text)
            self._sums = SecureRounds(ledger, values_in(model.layout), terms)
        self.wire = Wire(model.layout, plan.codec, model.trainable)
        self.check = SetCheck(plan)
        self.sets = KeptSets(self.ledger, self.wire, self.check, model.trainable)
        self._post_checks = PostChecks(self.ledger, model, self.wire, self.sets, self.check, test)
        self.done = asyncio.Event()
        self._over = asyncio.Event()  # the last set is there
        self._may_end = asyncio.Event()
        self._teller = Teller(self.ledger, tell, self.wire.bytes)
        self._folder = folder
        self._say = say
        self._leases = Leases(self.ledger, say)
        self._lately = SaidLately(say)
        self._control = control
        self._test = test
        self._converged = converged
        self._url = url
        self._proxied = proxied
        self._connections = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._leasing = asyncio.Lock()
        self._has_said_alone = False
        self._short = NO_SET  # the base of the last round whose missing posts the server has named
        self._journal: Journal
        self.writer: JournalWriter
        self._writing: asyncio.Future[None]
        self._front: Front
        self._turns: Turns
        self._copies: Copies  # answers with a set that is made for one peer
        self._loop: asyncio.AbstractEventLoop
        self._failure: BaseException | None = None
        self._validation: ServerValidation | None = None  # None without test data of the server
        self._means: Means
        self._releases: ReleaseCounter | None = None  # None without noise
        self._spent_reasons: dict[int, str] = {}  # peers that must not post again, and why, if each post costs its peer

    # -- begin and end ------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Read the journal of the folder, or begin a new one.

        Raises:
            CheckpointError: The journal cannot be read or written.
        """
        self._journal, content = open_journal(self._folder)
        clock.continue_after(max((entry.at for entry in content.entries), default=0.0))
        self.writer = JournalWriter(
            self._journal,
            self.ledger,
            take=self._take,
            needed=self.sets.for_file,
            begin=self._begin,
            refused=self._say_error,
        )
        if self.plan.mechanism is not None:
            spending = Spending(self.plan, self._folder, continues=content.snapshot is not None)
            self._teller.epsilons = spending.epsilons
            self._releases = ReleaseCounter(spending, self.ledger, self._say, partial(self._say_error, "release"))
        instructions: list[Instruction] = []
        if content.snapshot is not None:
            self.ledger.restore(content.snapshot)
        else:
            self._journal.begin_file(self.ledger.state(), {})
        for entry in content.entries:
            with contextlib.suppress(Unfit):  # it did not fit then, either
                instructions += self.ledger.apply(entry)
        if self._releases is not None:
            spending = self._releases.spending
            spending.check_complete(self.ledger.releases, self.ledger.counts.get("posts", 0))
            self._spent_reasons = spending.spent_by_post()
        if self.ledger.base == NO_SET:
            began = Began(at=clock.now(), set=1, run=sessions.new_secret()[:16])
            self._journal.append([(began, self.model.first)])
            self.ledger.apply(began)
            self.sets.keep(began.set, self.model.first, self.wire.travelling(self.model.first))
        else:
            self.sets.read(self._journal, self._folder)
            posts, peers = self.ledger.counts.get("posts", 0), len(self.ledger.members)
            peers_text = f"{peers:,} peer{'s' * (peers != 1)}"
            self._say(f"resumed   {posts:,} post{'s' * (posts != 1)} of {peers_text} in the journal")
        members = self.ledger.members.items()
        self.check.recall(
            {
                peer: Last(member.length, member.trained, member.moved, member.longest)
                for peer, member in members
                if member.length
            }
        )
        self._leases.recall(clock.now())
        self._means = Means(
            self.ledger,
            self.model,
            self.wire,
            self.sets,
            self.check,
            self.writer,
            releases=self._releases,
            spent_reasons=self._spent_reasons,
            end_spent=self._end_spent,
            say=self._say,
            lately=self._lately,
        )
        if self._test is not None:
            self._validation = ServerValidation(self._test, self.ledger, self.sets, self.wire, self.writer, self._say)

    def tell_begin(self, name: str) -> None:
        """Tell that the run begins, or continues. Call it after ``recover``."""
        self._teller.begin(name, 0, clock.now())

    def tell_end(self) -> None:
        """Tell that the run has ended, or was interrupted."""
        self._teller.end("complete" if self.ledger.over else "stopped", self.ledger.ended)

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

        from ddlf.peers.turns import Copies, Turns

        self._turns, self._copies = Turns(), Copies()
        self._loop = asyncio.get_running_loop()
        self._front = Front(
            self.ledger,
            self.writer,
            self.plan,
            self.model,
            digest=self.wire.digest,
            control=self._control,
            command=self._command,
            connected=lambda: self._connections,
            url=self._url,
            proxied=self._proxied,
            port=sock.getsockname()[1],
            has_tls=context is not None,
            quotas=self.quotas,
        )
        silent = logging.getLogger("ddlf.peers.websockets")
        silent.disabled = True  # requests of strangers should not appear in the user's terminal
        async with serve(
            self._live,  # type: ignore[arg-type]  # it gets what create_connection makes
            sock=Door(sock, self._front.is_full),
            ssl=context,
            process_request=self._front.answer,
            compression=None,
            max_size=frames.PREFIX.size + frames.MOST_TEXT_BYTES + self.wire.bytes,
            max_queue=1,
            create_connection=self._turns.connection(),  # type: ignore[arg-type]  # a factory will do
            ping_interval=None,  # ``Leases.watch`` pings, since the time limit is the peer's lease
            close_timeout=1.0,
            logger=silent,
            server_header=None,
        ):
            self._writing = asyncio.ensure_future(self.writer.write())
            self._writing.add_done_callback(self._on_task_end)
            self._begin(self._keep_time())
            if (pending := self.ledger.pending()) is not None:
                self._carry_out(pending)
            if self.ledger.over:
                self._say(f"over      this training has ended before: {self.ledger.ended}; begin a new one to train on")
                self._over.set()
                self.done.set()
            ready()
            try:
                await self.done.wait()
                if self._failure is not None:
                    raise self._failure
                if self.ledger.over and self.ledger.present:
                    await self._until_all_have_left()
            finally:
                await self._end_tasks()
                await self._end_writer()
                await self._end_tasks()  # the last entries may have begun some
                self._teller.tick(clock.now())
                self._journal.close()

    def leave(self) -> None:
        """End the server, but not the training: a later server continues it. A signal handler may call this.

        After the end of the training, the server does not wait for its peers any more.
        """
        self._loop.call_soon_threadsafe(self.done.set)
        self._loop.call_soon_threadsafe(self._may_end.set)

    async def _until_all_have_left(self) -> None:
        """Wait until each peer has the last set or is gone. A peer is gone when its lease has run out, as ever.

        Peers that this server leaves behind are present in the journal: a later server waits for them.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SAID_END_S):
                await self._may_end.wait()
        if not self._may_end.is_set():
            self._say(f"waiting   until {self._without_end()} received the last set; Ctrl-C ends the server before")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await self._may_end.wait()
        if self._failure is not None:
            raise self._failure
        if self.ledger.present:
            self._say(f"missing   {self._without_end()} not received the last set; --resume waits for them again")
        for connection in self._leases.connections.values():
            connection.socket.transport.abort()

    def _without_end(self) -> str:
        present = self.ledger.present
        return f"{', '.join(map(self.ledger.label, present))} {'has' if len(present) == 1 else 'have'}"

    async def last_set(self) -> bytes:
        """Return the exact mean of all sets as a merge-all would make it, without a change of the ledger."""
        parts = [self.sets.part(number) for number in self.ledger.all_sets()]
        mean = parts[0].read() if len(parts) < 2 else await asyncio.to_thread(mean_of_swaps, parts)
        return self.model.layout.encode(mean)

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _end_writer(self) -> None:
        """Write the entries that wait for the disk, and refuse later ones."""
        self.writer.close()
        await asyncio.gather(self._writing, return_exceptions=True)
        self.writer.fail_waiting()

    def _begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self.done.set()
            self._may_end.set()

    # -- the journal ----------------------------------------------------------------------------------------------------

    def _say_error(self, of: str, error: DDLFError) -> None:
        """Print an error of the disk, but rarely: on a full disk each try fails."""
        self._lately.say(f"error     {error}", of, now=clock.now())

    def _take(self, entry: Entry, data: bytes, travelling: bytes) -> None:
        """Let the ledger take an entry that is on the disk, and carry out what follows."""
        validated = self.ledger.validated
        if isinstance(entry, WITH_SET):
            self.sets.keep(entry.set, data[: self.wire.length(data)], travelling)
        try:
            instructions = self.ledger.apply(entry)
        except Unfit:
            if isinstance(entry, WITH_SET):
                self.sets.drop(entry.set)
            raise
        if isinstance(entry, Posted) and (ledger_set := self.ledger.sets.get(entry.set)) is not None:
            self.check.accepted(entry, ledger_set.trainings)
        if isinstance(entry, (Merged, Summed)):
            self.sets.state = self.sets.next_state
        if isinstance(entry, Left) and entry.why != HAS_END:
            without = ", so it has not received the last set" * self.ledger.over
            self._say(f"left      {self.ledger.label(entry.peer)}: {entry.why}{without}")
        self._teller.took(entry)
        for instruction in instructions:
            self._carry_out(instruction)
        if validated != self.ledger.validated:
            self.sets.forget(validated)
        if self.ledger.over and not self.ledger.present:
            self._may_end.set()

    def _carry_out(self, instruction: Instruction) -> None:
        match instruction:
            case Reply():
                self._answer(instruction)
            case Fate():
                self.sets.forget(instruction.set)
            case Mean():
                self._begin(self._means.merge(instruction))
            case EndForAll():
                self._begin(self._end(instruction.reason))

    def _answer(self, reply: Reply) -> None:
        """Send an answer to a peer. If it has a set to merge, the step towards this set is bounded.

        A peer that has spent its budget gets no answer, since it would train and post again: the training ends.
        """
        if reason := self._spent_reasons.get(reply.peer):
            self._begin(self._end_spent(reason))
            return
        connection, share, start = self._leases.connections.get(reply.peer), 1.0, b""
        if reply.answer == "merge" and (ledger_set := self.ledger.sets.get(reply.set)) is not None:
            validated = reply.set == self.ledger.validated
            share = self.check.step(reply.peer, reply.set, ledger_set, validated=validated)
        elif reply.set != NO_SET and reply.answer != "validate":
            self.check.replaced(reply.peer, reply.set)
        if share < 1:
            waiting = [
                number
                for number, ledger_set in self.ledger.sets.items()
                if ledger_set.peer == reply.peer and ledger_set.state == "waiting"
            ]
            start = self.sets.travelling[max(waiting, default=self.ledger.validated)]
        if reply.answer == "validate":
            self._validation_requests[reply.peer] = reply.set
        if connection is not None:
            connection.answer(reply, share, start)

    # -- secure sums, and the end of the training -------------------------------------------------------------------------

    def _terms(self, plan: Plan, text: str, base: int, samples: int) -> str:
        return terms_of(plan, samples, text, self.sets.travelling[base])

    def _follow(self, instructions: Sequence[Do]) -> None:
        """Carry out what a secure sum needs."""
        for instruction in instructions:
            match instruction:
                case Tell():
                    if (connection := self._leases.connections.get(instruction.peer)) is not None:
                        connection.tell(instruction.message)
                case Reply():
                    self._carry_out(instruction)
                case AddUp():
                    self._begin(self._add_up(instruction))
                case _:
                    self._say(instruction.text)

    async def _add_up(self, work: AddUp) -> None:
        """Let a secure sum become the next base, and begin the next round."""
        assert self._sums is not None
        try:
            await self._means.add_up(work)
        except ProtocolError as error:
            self._follow(self._sums.wrong(error.message, clock.now()))
        except Unfit:  # the training has ended meanwhile
            self._follow(self._sums.ended())
        else:
            self._follow(self._sums.added(clock.now()))

    async def _end_spent(self, reason: str) -> None:
        """End the training, because another release would exceed the privacy budget."""
        with contextlib.suppress(Unfit):  # it has ended already
            await self._end_training(reason)

    async def _end_training(self, reason: str) -> None:
        """End the training. If the disk refuses the end, end the server: a later one continues the training.

        Raises:
            Unfit: The training has ended already.
            CheckpointError: The disk refuses, and the server ends.
        """
        try:
            await self.writer.commit(Ended(at=clock.now(), why=reason))
        except CheckpointError as error:
            self._failure = self._failure or unwritten_end(error)
            self.done.set()
            raise self._failure from error

    # -- time -----------------------------------------------------------------------------------------------------------

    async def _keep_time(self) -> None:
        while True:
            slept_at = clock.now()
            await asyncio.sleep(TICK_S)
            now = clock.now()
            if (late_s := now - slept_at - TICK_S) > HELD_UP_S:
                self._leases.extend(late_s, now)
            if self._sums is not None:
                self._follow(self._sums.step(now))
            record = self._teller.tick(now)
            if record is not None and self._converged is not None and not self.ledger.ended:
                await self._ask_whether_converged(self._converged, record)
            for entry in self.ledger.due_entries(now, self._leases.heard()):
                if isinstance(entry, Ended) and self._leases.waits_for_peers(now):
                    continue
                if isinstance(entry, Left) and self._leases.last_signs.get(entry.peer, 0.0) >= now:
                    continue  # it came back while an earlier entry was written
                try:
                    await (self._end_training(entry.why) if isinstance(entry, Ended) else self.writer.commit(entry))
                except (Unfit, CheckpointError):  # it comes again if it is still due
                    continue
                if isinstance(entry, Left):
                    self._leases.cut_expired(entry.peer)
            self._leases.cut_slow_readers(now)
            self._say_missing_posts()
            if self._validation is not None and self._validation.is_due(now):
                self._begin(self._validation.run())

    def _say_missing_posts(self) -> None:
        """Say once in a round that it waits for more posts than present peers can make."""
        missing, base = self.ledger.missing_posts, self.ledger.base
        if missing and base != self._short:
            self._short = base
            reason = f"the round needs {missing:,} more post{'s' * (missing > 1)}, and all peers that are here have posted or were rejected"
            self._say(f"quorum    {reason}")
            self._teller.report("quorum", reason)

    async def _ask_whether_converged(self, converged: Callable[[RoundRecord], bool], record: RoundRecord) -> None:
        try:
            is_over = await asyncio.to_thread(converged, record)
        except Exception as error:  # the owner's code
            self._converged = None
            self._say(f"error     is_convergent is not called again: {type(error).__name__}: {error}")
            return
        if is_over:
            with contextlib.suppress(Unfit, CheckpointError):
                await self._end_training("is_convergent of the app has ended it")

    async def _end(self, reason: str) -> None:
        self._say(f"over      {reason}")
        posts = sum(ledger_set.state == "waiting" for ledger_set in self.ledger.sets.values())
        if 0 < posts < self.plan.least_posts:
            self._say(
                f"left out  {posts:,} of {self.plan.quorum:,} posts of the last round, whose noise would be too small"
            )
        self._over.set()
        for peer, connection in list(self._leases.connections.items()):
            self._begin(self._send_end(peer, connection.socket))
        self.done.set()

    async def _send_end(self, peer: int, socket: TurnConnection) -> None:
        """Send the last set to a peer. It has left when its side has closed the connection, which comes after the set."""
        await self._over.wait()
        final = self.ledger.base
        with contextlib.suppress(Exception):
            end = End(why=self.ledger.ended, set_number=final, set=self.sets.travelling[final])
            await socket.send_alive(frames.pieces(end))
            self._teller.sent(len(end.set))
            socket.close_timeout = None  # a slow peer may take long, and a silent one loses its lease
            await socket.close(1000, "over")
        if socket.protocol.close_rcvd is not None and self.ledger.members[peer].present:
            with contextlib.suppress(Unfit, CheckpointError):
                await self.writer.commit(Left(at=clock.now(), peer=peer, why=HAS_END))

    # -- commands of the owner --------------------------------------------------------------------------------------------

    async def invite(self, count: int = 1, peers: int = 1) -> list[str]:
        """Return new codes, each for a number of peers."""
        codes = [sessions.new_secret() for _ in range(count)]
        now = clock.now()
        until = now + sessions.CODE_S
        entries = [Invited(at=now, code=sessions.hashed(code), until=until, peers=peers) for code in codes]
        await asyncio.gather(*map(self.writer.commit, entries))
        return codes

    async def _command(self, name: str, query: str) -> CommandAnswer:
        arguments = {key: values[0] for key, values in parse_qs(query).items()}
        match name:
            case "invite":
                count, peers = (min(max(int(arguments.get(name, "1")), 1), 1_000) for name in ("count", "peers"))
                return Invitations(codes=tuple(await self.invite(min(count, 100), peers)))
            case "list":
                return self.overview()
            case "merge":
                if self._sums is not None:
                    raise Unfit("in rounds with secure aggregation, the server has no sets to merge")
                if (
                    self.plan.least_posts
                    > len([ledger_set for ledger_set in self.ledger.sets.values() if ledger_set.state == "waiting"])
                    > 0
                ):
                    raise Unfit(
                        f"the round has fewer posts than its quorum of {self.plan.quorum:,}, so its noise is too small",
                        hint="wait for more peers",
                    )
                await self.writer.commit(MergeAsked(at=clock.now()))
                return Done()
            case "stop":
                await self._end_training("stopped by ddlf peers stop")
                return Stopped(secure=self._sums is not None)
            case "kick":
                peer = int(arguments["peer"])
                member = self.ledger.members.get(peer)
                if member is None or member.removed:
                    reason = f"there is no peer {peer}" if member is None else f"peer {peer} is removed already"
                    raise Unfit(reason, hint="ddlf peers list shows the peers")
                await self.writer.commit(Left(at=clock.now(), peer=peer, why="removed", removed=True))
                if (connection := self._leases.connections.get(peer)) is not None:
                    self._begin(self._refuse(connection.socket, "you were removed", "ask for a new link"))
                return Done()
        raise Unfit(f"there is no command {name!r}")

    def overview(self) -> Overview:
        """Return the peers and the sets, for ``ddlf peers list``."""
        ledger, now = self.ledger, clock.now()
        epsilons = {} if self._releases is None else self._releases.spending.epsilons()
        return Overview(
            run=ledger.run,
            way=self.plan.way,
            codec=self.plan.codec,
            set_bytes=self.wire.bytes,
            over=ledger.ended,
            shards=self.plan.shards,
            free_shards=tuple(ledger.free_shards),
            missing_posts=ledger.missing_posts,
            counts=ledger.counts,
            sets=Counter(ledger_set.state for ledger_set in ledger.sets.values()),
            accuracy=ledger.validations[-1].accuracy if ledger.validations else None,
            peers=tuple(
                ListedPeer(
                    peer=peer,
                    name=member.name,
                    connected=peer in self._leases.connections,
                    present=member.present,
                    removed=member.removed,
                    samples=member.samples,
                    shard=member.shard if member.present else NO_SHARD,
                    posts=member.number,
                    trainings=member.trainings,
                    updates=member.updates,
                    strikes=member.strikes,
                    out_s=ledger.out_s(peer, now),
                    posted_s_ago=round(now - member.posted_at, 1) if member.posted_at else None,
                    epsilon=epsilons.get(peer),
                )
                for peer, member in sorted(ledger.members.items())
                if member.samples  # a member that has never arrived has used its code only
            ),
        )

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
            await self._send_away(socket, str(error) if isinstance(error, ComeBack) else FULL)
        except DDLFError as error:  # some are an OSError, too
            await self._refuse(socket, error.message, error.hint)
        except TimeoutError:
            await self._send_away(socket, f"no hello within {HELLO_S:.0f} s")
        except OSError:
            pass
        except Exception as error:
            if not _is_closed(error):
                self._say(
                    f"error     the connection of {self.ledger.label(peer)} ended: {type(error).__name__}: {error}"
                )
        finally:
            self._connections -= 1
            self._turns.end(socket)

    async def _greet(self, socket: TurnConnection, peer: int, hello: Hello) -> None:
        ledger = self.ledger
        keeps = hello.keeps and hello.run == ledger.run
        if hello.run and hello.run != ledger.run:
            raise Unfit("you have taken part in another run", hint="join this one with a new link")
        if hello.layout and hello.layout != self.wire.digest:
            raise Unfit("your model has other weights than the server's", hint="join again with a new link")
        name = "".join(letter for letter in hello.name if letter.isprintable())[: frames.MOST_NAME]
        if (earlier := self._leases.connections.get(peer)) is not None:
            await self._refuse(earlier.socket, "the same peer has connected again", "close other windows and programs")
        self._leases.note(peer)  # before it arrives: its lease begins at once
        connection = PeerConnection(socket, self._copies, partial(self._message_of, peer), self._teller.sent)
        waits = keeps and ledger.repeat(peer) is None  # its post is in the open round
        if (reason := self._spent_reasons.get(peer)) and not waits:
            await self._end_spent(reason)
        try:
            await self._admit(peer, name, hello.samples, keeps=keeps)
        except Unfit:
            if not ledger.ended:
                raise
            self._leases.connect(peer, connection)
            await self._send_end(peer, socket)
            self._leases.disconnect(peer, connection)
            return
        if len(ledger.present) == self.plan.quorum == 1 and not self._has_said_alone:
            self._has_said_alone = True
            self._say("alone     one peer trains alone until others join; ddlf peers invite prints links for them")
        member, start = ledger.members[peer], NO_SET if keeps else ledger.start()
        if start:
            self.check.arrived(peer, start, member.trainings)
        self._leases.connect(peer, connection)
        if self._sums is not None:
            self._follow(self._sums.arrived(peer, keeps=keeps))
        welcome = Welcome(
            run=ledger.run,
            peer=peer,
            plan=asdict(self.plan),
            model=self.model.text,
            layout=self.wire.digest,
            number=member.number,
            set_number=start,
            trainings=member.trainings,
            rate=ledger.rate,
            shard=member.shard,
            set=self.sets.travelling[start] if start else b"",
        )
        tasks: list[asyncio.Future[None]] = []
        try:
            await connection.send(welcome)
            del welcome  # its set
            tasks += [
                asyncio.ensure_future(connection.send_when_due()),
                asyncio.ensure_future(self._leases.watch(peer, connection)),
            ]
            await self._listen(peer, connection)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._leases.disconnect(peer, connection)

    async def _admit(self, peer: int, name: str, samples: int, *, keeps: bool) -> None:
        """Let a peer take part, with its own samples or with a shard."""
        shards = self.model.shards
        arrived = Arrived(at=clock.now(), peer=peer, name=name, samples=samples, keeps=keeps)
        if shards is None:
            await self.writer.commit(arrived)
        else:
            async with self._leasing:  # a shard is free until the entry is on the disk
                shard = self.ledger.shard_for(peer, samples)
                samples = shards.sizes[shard - 1]
                await self.writer.commit(replace(arrived, at=clock.now(), samples=samples, shard=shard))
        of = f" of shard {self.ledger.members[peer].shard}" if shards is not None else ""
        noun = "sample" if samples == 1 else "samples"
        line = f"here      {self.ledger.label(peer)} with {samples:,} {noun}{of}{' again' * keeps}"
        if keeps:
            self._lately.say(line, "return", peer, now=clock.now())
        else:
            self._say(line)

    async def _listen(self, peer: int, connection: PeerConnection) -> None:
        of = (*(SECURE_FROM_PEER if self._sums is not None else (Post, Score)), Broken, Bye)
        while True:
            message = await self._receive(connection.socket, of)
            connection.is_working = True
            try:
                await self._on_message(peer, connection, message)
            except Unfit:
                member = self.ledger.members[peer]
                if not (self.ledger.ended or member.present or member.removed):
                    raise ComeBack("the lease has run out") from None
                if not self.ledger.ended:  # otherwise the end is on its way to the peer
                    raise
            finally:
                connection.is_working = False
                self._leases.note(peer)
            self._turns.end(connection.socket)
            size, is_bye = len(getattr(message, "set", b"")), isinstance(message, Bye)
            del message  # its set is no longer needed while the peer receives its answer, and trains
            if is_bye:
                return
            await connection.send_waiting()
            if wait_s := self.quotas.pace_s(peer, clock.now(), size):
                await self._pace(peer, connection, wait_s)

    async def _pace(self, peer: int, connection: PeerConnection, wait_s: float) -> None:
        """Do not read from a peer that sends more than its quota."""
        paced = f"paced     {self.ledger.label(peer)} sends more than its quota, so each message waits {wait_s:.2g} s"
        self._lately.say(paced, "quota", peer, now=clock.now())
        connection.is_resting = True
        connection.socket.transport.pause_reading()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await connection.socket.wait_closed()
        finally:
            connection.is_resting = False
            self._leases.note(peer)
            connection.socket.transport.resume_reading()

    async def _on_message(self, peer: int, connection: PeerConnection, message: Message) -> None:
        match message:
            case Post():
                try:
                    await self._on_post(peer, connection, message)
                except Unfit:
                    # The same post came before by an earlier connection and was being checked. Its answer goes to this one.
                    if not self.ledger.is_repeated(peer, message.number):
                        raise
            case Score():
                await self._was_tested(peer, message)
            case _ if self._sums is not None and isinstance(message, SECURE_FROM_PEER):
                self._follow(self._sums.received(peer, message, clock.now()))
            case Broken():
                reason = message.why[: frames.MOST_TEXT_BYTES]
                self._lately.say(
                    f"again     {self.ledger.label(peer)} begins again: {reason}", "posts", peer, now=clock.now()
                )
                await self.writer.commit(Lost(at=clock.now(), peer=peer, why=reason))
            case Bye():
                await self.writer.commit(Left(at=clock.now(), peer=peer, why="it said goodbye"))

    async def _on_post(self, peer: int, connection: PeerConnection, post: Post) -> None:
        ledger = self.ledger
        if ledger.is_repeated(peer, post.number):
            if (
                connection.last_answered == post.number
            ):  # its round closed after the peer came back, and before it posted again
                return
            connection.open_post = post.number
            if (reply := ledger.repeat(peer)) is not None:
                self._answer(reply)
            return
        if connection.open_post:
            raise ProtocolError(f"post {connection.open_post} is not answered yet")
        connection.open_post = post.number
        if self._releases is not None and self._releases.spending.is_by_post:
            spent_reason = await self._releases.count(peer)  # the server has seen it, whatever becomes of it
            if spent_reason:
                self._spent_reasons[peer] = spent_reason
                self._say(f"budget    the open round is the last one: {spent_reason}")
        if out_s := ledger.out_s(peer, clock.now()):
            await self._reject(
                peer, post, Finding(reason=f"after {STRIKES} strikes, posts count again in {out_s:.0f} s")
            )
            return
        if reason := self.wire.fault(post.set):
            await self._reject(peer, post, Finding(reason=reason, strike="again"))
            return
        finding, sketch = await self._post_checks.judge(peer, post)
        if finding.reason:
            await self._reject(peer, post, finding)
            return
        entry = Posted(
            at=clock.now(),
            peer=peer,
            number=post.number,
            set=self.sets.new_number(),
            contains=post.contains,
            updates=post.updates,
            base=post.base,
            accuracy=_from_wire(post.accuracy),
            loss=_from_wire(post.loss),
            length=finding.length,
            moved=finding.moved,
            share=finding.share,
        )
        self.check.keep(entry.set, sketch)
        try:
            await self.writer.commit(entry, post.set)
        finally:
            if entry.set not in self.sets.travelling:  # it has no place in the ledger
                self.check.drop(entry.set)

    async def _reject(self, peer: int, post: Post, finding: Finding) -> None:
        """Write that a post is rejected, and why."""
        line = f"rejected  post {post.number} of {self.ledger.label(peer)}: {finding.reason}"
        if finding.strike == "no":
            self._lately.say(line, "posts", peer, now=clock.now())
        else:
            self._say(line)
        entry = Rejected(
            at=clock.now(),
            peer=peer,
            number=post.number,
            contains=post.contains,
            why=finding.reason,
            strike=finding.strike,
        )
        await self.writer.commit(entry)
        if finding.strike != "no" and (out_s := self.ledger.out_s(peer, entry.at)):
            self._say(f"out       {self.ledger.label(peer)}: its posts count again in {out_s:.0f} s")

    async def _was_tested(self, peer: int, tested: Score) -> None:
        entry = Validated(
            at=clock.now(),
            set=tested.set_number,
            accuracy=_from_wire(tested.accuracy),
            loss=_from_wire(tested.loss),
            samples=tested.samples,
            peer=peer,
        )
        self.ledger.admit(entry)
        if self._validation_requests.pop(peer, NO_SET) != entry.set:  # a peer that is not asked could end the training
            self._say(f"ignored   a validation of {self.ledger.label(peer)} that it was not asked for")
            return
        await self.writer.commit(entry)

    async def _message_of(self, peer: int, waiting: WaitingAnswer) -> Answer:
        """Return an answer, with its set or with a set that is a share of the way to it from the set of the peer's post."""
        reply, share, start = waiting
        has_set = reply.set != NO_SET and reply.answer != "validate"
        if (
            has_set and reply.set not in self.sets.travelling
        ):  # a merge-all or a later round has taken it back meanwhile
            if reply.answer == "merge":
                reply, has_set = replace(reply, answer="continue", set=NO_SET), False
            else:
                reply = replace(reply, set=self.ledger.base)
        ledger_set = self.ledger.sets.get(reply.set)
        data = self.sets.travelling[reply.set] if has_set else b""
        return Answer(
            number=reply.number,
            answer=reply.answer,
            set_number=reply.set,
            trainings=ledger_set.trainings if ledger_set is not None else 0,
            accuracy=_to_wire(ledger_set.accuracy) if ledger_set is not None else -1.0,
            rate=self.ledger.rate,
            why=reply.reason,
            epsilon=-1.0 if self._releases is None else self._releases.spending.epsilon(peer),
            set=data
            if share == 1 or not has_set
            else await asyncio.to_thread(self._intermediate_set, start, data, share),
        )

    def _intermediate_set(self, start: bytes, end: bytes, share: float) -> bytes:
        """Return a set that is a share of the way from one set to another."""
        return self.wire.encode(towards(self.wire.decode(start), self.wire.decode(end), share))

    async def _receive(self, socket: ServerConnection, of: tuple[type[Message], ...]) -> Message:
        data = await socket.recv()
        if isinstance(data, str):
            raise ProtocolError("a frame is a binary message, got text")
        return frames.decode(data, of, self.wire.bytes if Post in of else 0)

    async def _send_away(self, socket: ServerConnection, reason: str) -> None:
        """End a connection so that the peer connects again by itself."""
        with contextlib.suppress(Exception):
            await socket.close(1013, reason)

    async def _refuse(self, socket: ServerConnection, reason: str, hint: str) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(REFUSE_S):
                await socket.send(frames.encode(End(why=reason[:1000], hint=hint, over=False)))
                await socket.close(1008, "refused")


def _is_closed(error: BaseException) -> bool:
    from websockets.exceptions import ConnectionClosed

    return isinstance(error, ConnectionClosed)


def _from_wire(value: float) -> float:
    """Return an accuracy or a loss of a message: -1 stands for none."""
    return value if value >= 0 else float("nan")


def _to_wire(value: float) -> float:
    return value if value >= 0 else -1.0
