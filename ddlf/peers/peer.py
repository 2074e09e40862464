"""A peer in Python: trains on its own data, posts its sets, and merges the answers into its live weights.

Runs on the peer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ddlf.algorithms.set_merge import SET_MERGE, WeightSet
from ddlf.algorithms.weights import Weights, is_float
from ddlf.errors import AuthError, ConfigError, DDLFError, ProtocolError
from ddlf.events.facts import from_data
from ddlf.peers.entries import NO_SET
from ddlf.peers.frames import Answer, Broken, Bye, End, Hello, Post, Score, Welcome
from ddlf.peers.link import RETRY_S, Connection
from ddlf.peers.model import Trained, accuracy_of
from ddlf.peers.plan import Plan
from ddlf.peers.sessions import read_link

LEAVE_S = 10.0
"""Seconds that a peer that leaves waits for the answer to its last post."""
LOOK_S = 0.1
"""Seconds between two looks whether a peer that waits for an answer is to leave."""
Train = Callable[[Welcome], Trained]
"""Makes the model with the private data, from the welcome of the server."""


class Peer:
    """Takes part in a training with private data.

    Args:
        link: The link that ``ddlf peers serve`` or ``ddlf peers invite`` has printed.
        make: Makes the model with the data. It may use the text of the server's model, or the owner's own code.
        samples: Number of private samples. It must not change during a run.
        name: Name for people, which the server shows.
        say: Prints a line about what happens.
        retry_s: The peer gives up a server that does not answer for this number of seconds.
        background: Whether a set is sent while training continues.

    Attributes:
        trained: The model with its live weights.
        plan: How the peers work together.
        updates: Batches trained so far.
        posts: Posts so far.
        merges: Sets of others that were merged.
        takes: Sets that were merged or loaded after the first one.
        taken: Number of the last one.
        why_over: Why the training was over; empty while it is not.
    """

    trained: Trained
    plan: Plan
    _connection: Connection
    _meanwhile = "training continues"

    def __init__(
        self,
        link: str,
        make: Train,
        *,
        samples: int,
        name: str = "",
        say: Callable[[str], None] = print,
        retry_s: float = RETRY_S,
        background: bool = False,
    ) -> None:
        self._link = read_link(link)
        if not self._link.code:
            raise ConfigError("the link has no code behind its #", hint="copy the whole link")
        self._make = make
        self._samples = samples
        self._name = name
        self._say = say
        self._retry_s, self._background = retry_s, background
        self._run = ""
        self._keeps = False
        self._trainings = 0
        self._contains = NO_SET
        self._base = NO_SET
        self._posted: Weights = []
        self._since = 0
        self._posted_at = 0.0
        self._accuracy = float("nan")
        self._number = 0
        self._leaves_at = 0.0
        self._rate = 0.0
        self.updates = 0
        self.posts = 0
        self.merges = 0
        self.takes = 0
        self.taken = NO_SET
        self.why_over = ""

    def run(self, *, most_updates: int | None = None) -> Trained:
        """Train until the training is over, and return the model. At the end it has the merged weights of all peers.

        Args:
            most_updates: Leave after this number of batches; None to stay.

        Raises:
            ConnectError: The server cannot be reached.
            AuthError: The server refuses this peer.
        """
        try:
            self.join()
            while not self.why_over:
                trains = not self._leaves_at and (most_updates is None or self.updates < most_updates)
                if not trains and self._has_posted_all():
                    self._connection.send(Bye())
                    break
                self._step(trains=trains)
        finally:
            self.close()
        return self.trained

    def join(self) -> None:
        """Connect, and begin with the server's set.

        Raises:
            ConnectError: The server cannot be reached.
            AuthError: The server refuses this peer.
        """
        self._connect()
        try:
            self._begin(self._connection.welcome)
        except DDLFError:
            self._connection.send(Bye())  # otherwise the server waits for it until its lease runs out
            raise

    def leave(self) -> None:
        """Let ``run`` post the last batches, say goodbye and return. A signal handler may call this."""
        self._leaves_at = self._leaves_at or time.monotonic() + LEAVE_S

    def close(self) -> None:
        """End the connection. Safe to call again."""
        if hasattr(self, "_connection"):
            self._connection.close()

    def _connect(self) -> None:
        self._connection = Connection(
            self._link,
            self._hello,
            self._say,
            retry_s=self._retry_s,
            background=self._background,
            meanwhile=self._meanwhile,
        )

    def _has_posted_all(self) -> bool:
        if self._connection.waits:  # a post of a round counts even if its peer has left
            return (self._since == 0 and self.plan.way == "rounds") or 0 < self._leaves_at < time.monotonic()
        return self._since == 0

    def _hello(self) -> Hello:
        return Hello(
            name=self._name,
            samples=self._samples,
            layout=self.trained.layout.digest if self._run else "",
            run=self._run,
            keeps=self._keeps,
            updates=self.updates,
        )

    def _begin(self, welcome: Welcome) -> None:
        self._read(welcome)
        self._load(self._first_set(welcome))
        self._base = self.taken = welcome.set_number
        self._ready(welcome)

    def _read(self, welcome: Welcome) -> None:
        """Take the plan and the model of a welcome."""
        try:
            self.plan = from_data(Plan, welcome.plan)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"the server's plan cannot be read: {error}") from None
        self.trained = self._make(welcome)
        if self.trained.layout.digest != welcome.layout:
            raise ConfigError(
                "your model has other weights than the server's",
                hint="create the same model: `ddlf model diff` shows differences",
            )
        if self.plan.way == "swap":
            self._rule = SET_MERGE.read(self.plan.merge)
        self._number, self._trainings = welcome.number, welcome.trainings
        self._set_rate(welcome.rate)

    def _first_set(self, welcome: Welcome) -> Weights:
        if why := self.trained.layout.fault(welcome.set):
            raise ProtocolError(f"the server's first set cannot be used: {why}")
        return self.trained.layout.decode(welcome.set)

    def _ready(self, welcome: Welcome) -> None:
        """Begin to receive."""
        self._run, self._keeps = welcome.run, True
        self._posted_at = time.monotonic()
        self._connection.start(self.trained.layout.bytes)
        self._say(f"joined    as peer {welcome.peer}; {self._about(welcome)}")

    def _about(self, welcome: Welcome) -> str:
        return f"{self._samples:,} samples stay here, sets of weights travel"

    def _step(self, *, trains: bool) -> None:
        """Train a batch, post if it is time, and take what the server has sent."""
        waits = self.plan.way == "rounds" and self._connection.waits
        if trains and not waits and self._may_train():
            self.trained.batch(self.plan.batch_size)
            self.updates += 1
            self._since += 1
        if self.is_due(1 if not trains else self.plan.updates):
            self._post()
        self._take(LOOK_S if waits or not trains or not self._may_train() else 0.0)

    def _may_train(self) -> bool:
        """Return whether the data may be trained on now."""
        return True

    def is_due(self, updates: int, more: int = 0) -> bool:
        """Return whether it is time to post.

        Args:
            updates: Updates between two posts.
            more: Updates that will have been trained then, in addition.
        """
        since = self._since + more
        late = self.plan.seconds and time.monotonic() - self._posted_at >= self.plan.seconds
        return bool(since and (since >= updates or late) and not self._connection.waits)

    def _take(self, timeout_s: float | None) -> None:
        """Take what the server has sent, and wait for the first message."""
        message = self._connection.take(timeout_s)
        while message is not None:
            match message:
                case Answer():
                    self._answered(message)
                case End():
                    self._ended(message)
                case _:
                    raise ProtocolError(f"the server sent {type(message).__name__} in the middle of a run")
            message = self._connection.take()

    def _post(self) -> None:
        means, weights = self.trained.means(), self.trained.weights()
        self._accuracy = accuracy_of(means)
        if why := self.trained.layout.not_finite(weights):
            self._break(f"after training: {why}")
            return
        self._posted, self._number = weights, self._number + 1
        self._trainings += 1
        loss = means.get("loss", float("nan"))
        post = Post(
            number=self._number,
            contains=self._contains,
            updates=self._since,
            base=self._base if self.plan.way == "rounds" else NO_SET,
            accuracy=_to_wire(self._accuracy),
            loss=_to_wire(loss),
            set=self.trained.layout.encode(weights),
        )
        self._since, self._posted_at, self.posts = 0, time.monotonic(), self.posts + 1
        self._connection.send(post)
        self._say(
            f"posted    set {self.posts} after {self.updates:,} batches: loss {loss:.4f}, accuracy {self._accuracy:.4f}"
        )

    def _break(self, why: str) -> None:
        self._say(f"broken    {why}; beginning again from the last validated set")
        self._since = 0
        told = None
        while True:  # earlier answers belong to the broken weights
            if self._connection.welcome is not told:  # not yet, or the message was lost with its connection
                told = self._connection.welcome
                self._connection.send(Broken(why=why[:500]))
            message = self._connection.take(1.0)
            if message is None and not self._connection.is_open:  # nobody can help: continue as before
                return
            if isinstance(message, End):
                self._ended(message)
                return
            if isinstance(message, Answer) and message.answer in ("replace", "rejected"):
                self._answered(replace(message, answer="rejected"))
                return

    def _answered(self, answer: Answer) -> None:
        self._set_rate(answer.rate)
        if answer.answer == "continue":
            return
        if answer.answer == "validate":
            self._validate(answer.set_number, self._posted)
            return
        if why := self.trained.layout.fault(answer.set):
            raise ProtocolError(f"the server's set {answer.set_number} cannot be used: {why}")
        given = self.trained.layout.decode(answer.set)
        if answer.answer == "merge":
            self._merge(answer, given)
            return
        if answer.answer == "replace" and self._posted:  # keep the training since the post
            given = [
                g + (live - posted) if is_float(g) else g
                for g, live, posted in zip(given, self.trained.weights(), self._posted, strict=True)
            ]
        if answer.answer == "rejected":
            self._say(f"rejected  {answer.why}; beginning again from set {answer.set_number}")
            self._since = 0
        self._load(given)
        self._contains = self._base = self.taken = answer.set_number
        self._trainings = answer.trainings
        self.takes += 1

    def _validate(self, number: int, weights: Weights) -> None:
        accuracy, loss, samples = self.trained.test(weights)
        if math.isfinite(loss):
            tested = Score(set_number=number, accuracy=_to_wire(accuracy), loss=max(loss, 0.0), samples=samples)
            self._connection.send(tested)

    def _merge(self, answer: Answer, given: Weights) -> None:
        mine = WeightSet(weights=self.trained.weights(), trainings=self._trainings, accuracy=self._accuracy)
        theirs = WeightSet(weights=given, trainings=answer.trainings, accuracy=_from_wire(answer.accuracy))
        merged = self._rule.merge(mine, theirs)
        if why := self.trained.layout.not_finite(merged.weights):
            self._break(f"merging set {answer.set_number}: {why}")
            return
        if merged is not mine:
            self._load(merged.weights)
        self._trainings, self._contains = merged.trainings, answer.set_number
        self.taken = answer.set_number
        self.takes += 1
        self.merges += 1

    def _ended(self, end: End) -> None:
        if not end.over:
            raise AuthError(f"the server has ended this peer's session: {end.why}", hint=end.hint)
        if end.set and not self.trained.layout.fault(end.set):
            self._load(self.trained.layout.decode(end.set))
        self.why_over = end.why
        self._say(f"over      {end.why}")

    def _load(self, weights: Weights) -> None:
        self.trained.assign([np.asarray(one) for one in weights])

    def _set_rate(self, rate: float) -> None:
        if self.plan.decay and rate and rate != self._rate:
            self._rate = rate
            self.trained.set_rate(rate)


def _to_wire(value: Any) -> float:
    return float(value) if value >= 0 and math.isfinite(value) else -1.0


def _from_wire(value: float) -> float:
    return value if value >= 0 else float("nan")
