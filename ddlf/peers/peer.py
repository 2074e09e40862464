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
from ddlf.algorithms.weights import Weights, difference, is_float
from ddlf.errors import AuthError, BadUpdate, ConfigError, DDLFError, ProtocolError
from ddlf.peers.entries import NO_SET
from ddlf.peers.frames import Answer, Broken, Bye, End, Hello, Masked, Message, Post, Score, Welcome
from ddlf.peers.keys import has_account
from ddlf.peers.link import RETRY_S, Connection
from ddlf.peers.model import Trained, accuracy_of
from ddlf.peers.plan import Offer, Plan
from ddlf.peers.secure_peer import MESSAGES, SecurePeer
from ddlf.peers.sessions import PIN, PIN_LETTERS, Link, read_link
from ddlf.peers.wire import Wire
from ddlf.privacy.release import Mechanism

LEAVE_S = 10.0
"""Seconds that a peer that leaves waits for the answer to its last post."""
SHOWN_S = 2.0
"""Least seconds between two lines about posts."""
BROKEN_S = 10.0
"""Least seconds between two lines about weights that cannot be used."""
ROUND_S = 5.0
"""A peer that waits for the end of its round says so after these seconds."""
LOOK_S = 0.1
"""Seconds between two looks whether a peer that waits for an answer is to leave."""
Train = Callable[[Offer], Trained]
"""Makes the model with the private data, from the offer of the server."""


def check_link(text: str) -> Link:
    """Return the parts of a link for a peer.

    Raises:
        ConfigError: It is not a link, or has no code.
    """
    link = read_link(text)
    if not link.code:
        raise ConfigError("the link has no code behind its #", hint="copy the whole link")
    _, point, pin = link.code.partition(PIN)
    if point and len(pin) != PIN_LETTERS:
        raise ConfigError(
            f"the link is not whole: {PIN_LETTERS} letters belong behind its last point, and there are {len(pin)}",
            hint="copy the whole link",
        )
    return link


class Peer:
    """Takes part in a training with private data.

    Args:
        link: The link that ``ddlf peers serve`` or ``ddlf peers invite`` has printed.
        make: Makes the model with the data. It may use the text of the server's model, or the owner's own code.
        name: Name for people, which the server shows.
        say: Prints a line about what happens.
        retry_s: The peer gives up a server that does not answer for this number of seconds.
        background: Whether a set is sent while training continues.
        secure_aggregation: Whether to refuse a server that sees single updates.

    Attributes:
        trained: The model with its live weights.
        plan: How the peers work together.
        updates: Batches trained so far.
        posts: Posts so far.
        merges: Sets of others that were merged.
        takes: Sets that were merged or loaded after the first one.
        last_set: Number of the last one.
        why_over: Why the training was over; empty while it is not.
    """

    trained: Trained
    plan: Plan
    _connection: Connection
    _wire: Wire
    _mechanism: Mechanism | None
    _meanwhile = "training continues"

    def __init__(
        self,
        link: str,
        make: Train,
        *,
        name: str = "",
        say: Callable[[str], None] = print,
        retry_s: float = RETRY_S,
        background: bool = False,
        secure_aggregation: bool = False,
    ) -> None:
        self._link = check_link(link)
        self._needs_sums = secure_aggregation
        self._make = make
        self._name = name
        self._say = say
        self._retry_s, self._background = retry_s, background
        self._run = self._digest = ""
        self._keeps_weights = False
        self._trainings = 0
        self._contains = NO_SET
        self._base = NO_SET
        self._posted: Weights = []
        self._start: Weights = []  # the set that the training began with, if the peer clips its own update
        self._since = 0
        self._posted_at = 0.0
        self._accuracy = float("nan")
        self._number = 0
        self._shown_at = self._broken_at = -math.inf
        self._unshown = ""
        self._leaves_at = 0.0
        self._rate = 0.0
        self._secure: SecurePeer | None = None
        self._waited_for = 0
        self.updates = 0
        self.posts = 0
        self.merges = 0
        self.takes = 0
        self.last_set = NO_SET
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
        """Connect, and begin with the server's set. Data and models that do not fit leave the link unused.

        Raises:
            ConnectError: The server cannot be reached.
            AuthError: The server refuses this peer.
        """
        self._connection = self._new_connection()
        try:
            self._prepare(self._connection.offer())
            welcome = self._connection.open()
            try:
                self._begin(welcome)
            except DDLFError:
                self._connection.send(Bye())  # otherwise the server waits for it until its lease runs out
                raise
        except BaseException:
            self.close()  # another peer of this program may use the key of the link
            raise

    def leave(self) -> None:
        """Let ``run`` post the last batches, say goodbye and return. A signal handler may call this."""
        self._leaves_at = self._leaves_at or time.monotonic() + LEAVE_S

    def close(self) -> None:
        """End the connection. Safe to call again."""
        self._show_last_post()
        if hasattr(self, "_connection"):
            self._connection.close()

    def _new_connection(self) -> Connection:
        return Connection(
            self._link,
            self._hello,
            self._say,
            retry_s=self._retry_s,
            background=self._background,
            meanwhile=self._meanwhile,
        )

    def _has_posted_all(self) -> bool:
        is_late = 0 < self._leaves_at < time.monotonic()
        if self._secure is not None:  # a peer that leaves before the sum makes it void
            return is_late or (self._since == 0 and not self._connection.waits)
        if self._connection.waits:  # a post of a round counts even if its peer has left
            return (self._since == 0 and self.plan.way == "rounds") or is_late
        return self._since == 0

    @property
    def _reported_samples(self) -> int:
        """The samples that this peer trains on, which are its weight in a round. Held-out ones do not count."""
        return self.trained.samples

    def _hello(self) -> Hello:
        return Hello(
            name=self._name,
            samples=self._reported_samples,
            layout=self._digest,
            run=self._run,
            keeps=self._keeps_weights,
            updates=self.updates,
        )

    def _prepare(self, offer: Offer) -> None:
        """Make the model, or refuse what the server asks for. The link is unused so far."""
        self.plan = offer.plan
        self._check_earlier_posts()
        if self._needs_sums and not self.plan.secure_aggregation:
            raise ConfigError(
                "the server's plan has no secure aggregation, so the server would see your single updates",
                hint="ask its owner for --way rounds --secure-aggregation, or join without --secure-aggregation",
            )
        if self.plan.shards:
            raise ConfigError(
                "this server gives each peer a part of its data", hint="join without your data: ddlf peers join LINK"
            )
        self._take_model(self._make(offer), offer)

    def _check_earlier_posts(self) -> None:
        """Refuse a link whose account says an epsilon: posts without noise would make it wrong."""
        if has_account(self._link):
            raise ConfigError(
                "earlier posts with this link hid single samples, and posts without --privacy-unit sample would tell about them",
                hint="join with --privacy-unit sample, or ask for a new link",
            )

    def _take_model(self, trained: Trained, offer: Offer) -> None:
        """Train this model.

        Raises:
            ConfigError: It has other weights than that of the server.
        """
        self.trained, self._mechanism, self._text = trained, self.plan.mechanism, offer.model
        self._wire = Wire(trained.layout, self.plan.codec, trained.trainable)
        self._digest = self._wire.digest
        if self._digest != offer.layout:
            raise ConfigError(
                "your model has other weights than the server's",
                hint="create the same model, with the same trainable layers: `ddlf model diff` shows differences",
            )
        if self.plan.way == "swap":
            self._rule = SET_MERGE.read(self.plan.merge)

    def _begin(self, welcome: Welcome) -> None:
        self._read(welcome)
        first = self._first_set(welcome)
        if self.plan.secure_aggregation:
            self._secure = SecurePeer(self.plan, welcome.run, welcome.peer, self.trained.samples, self._say, self._text)
            self._secure.begin(welcome.set_number, first, welcome.set)
        self._load(first)
        self._base = self.last_set = welcome.set_number
        self._ready(welcome)

    def _read(self, welcome: Welcome) -> None:
        self._number, self._trainings = welcome.number, welcome.trainings
        self._set_rate(welcome.rate)

    def _first_set(self, welcome: Welcome) -> Weights:
        if fault := self._wire.fault(welcome.set):
            raise ProtocolError(f"the server's first set cannot be used: {fault}")
        return self._start_from(self._wire.decode(welcome.set))

    @property
    def _hides(self) -> bool:
        """Whether the peer itself clips its updates and adds noise, because it trusts nobody."""
        return self._mechanism is not None and self._mechanism.trust == "nobody"

    def _start_from(self, weights: Weights) -> Weights:
        self._start = weights if self._hides else []
        return weights

    def _hidden(self, weights: Weights) -> Weights:
        """Return weights as they may leave this machine: with the clipped and noised update, if nobody is trusted.

        Only one such set is made for each update: a second one with other noise would tell more.
        """
        if self._mechanism is None or not self._hides:
            return weights
        with np.errstate(over="ignore"):  # then it is not finite, and refused
            change = difference(self._start, weights)
        update = self._mechanism.protected(change, self.trained.trainable)
        return [g - u if is_float(g) else g for g, u in zip(self._start, update, strict=True)]

    def _ready(self, welcome: Welcome) -> None:
        """Begin to receive."""
        self._run, self._keeps_weights = welcome.run, True
        self._posted_at = time.monotonic()
        self._connection.start(self._wire.bytes)
        self._say(f"joined    as peer {welcome.peer}; {self._facts_for_people(welcome)}")

    def _facts_for_people(self, welcome: Welcome) -> str:
        travels = "the server learns only sums of updates" if self._secure is not None else "sets of weights travel"
        samples = self.trained.samples
        return f"{samples:,} sample{'s stay' if samples > 1 else ' stays'} here, {travels}"

    def _step(self, *, trains: bool) -> None:
        """Train a batch, post if it is time, and take what the server has sent."""
        waits = (self.plan.way == "rounds" and self._connection.waits) or self._waits_for_sum()
        if waits:
            self._show_round()
        if trains and not waits and self._may_train():
            self.trained.batch(self.plan.batch_size)
            self.updates += 1
            self._since += 1
        self._take(0.0)
        may_post = self._secure is None or self._secure.is_ready
        if may_post and not self.why_over and self.is_due(1 if not trains else self.plan.updates):
            self._post()
        self._take(LOOK_S if waits or not trains or not self._may_train() else 0.0)

    def _waits_for_sum(self) -> bool:
        """Return whether no batch may be trained now: keys or a base have come, or a post is due, perhaps without keys yet."""
        return self._secure is not None and (self._connection.has_news or self._is_time(self.plan.updates))

    def _show_round(self) -> None:
        """Say, once in a round, that the peer waits for its end."""
        waited_s = time.monotonic() - self._posted_at
        if self._waited_for != self._number and self._connection.is_open and waited_s >= ROUND_S:
            self._waited_for, quorum = self._number, self.plan.quorum
            self._show_last_post()
            self._say(f"waiting   the round is open{f': it needs posts of {quorum:,} peers' * (quorum > 1)}")

    def _may_train(self) -> bool:
        """Return whether the data may be trained on now."""
        return True

    def is_due(self, updates: int, ahead: int = 0) -> bool:
        """Return whether it is time to post. The answer to the last post is taken first: the server takes a post that does
        not contain the set of this answer for one whose peer has missed it, and gives the set a second time.

        Args:
            updates: Updates between two posts.
            ahead: Updates that will have been trained then, in addition.
        """
        return self._is_time(updates, ahead) and not (self._connection.waits or self._connection.has_news)

    def _is_time(self, updates: int, ahead: int = 0) -> bool:
        since = self._since + ahead
        is_late = self.plan.seconds and time.monotonic() - self._posted_at >= self.plan.seconds
        return bool(since and (since >= updates or is_late))

    def _take(self, timeout_s: float | None) -> None:
        """Take what the server has sent, and wait for the first message."""
        message = self._connection.take(timeout_s)
        while message is not None:
            match message:
                case Answer():
                    self._on_answer(message)
                case End():
                    self._on_end(message)
                case _ if isinstance(message, MESSAGES):
                    self._pass_on(message)
                case _:
                    raise ProtocolError(f"the server sent {type(message).__name__} in the middle of a run")
            message = self._connection.take()

    def _pass_on(self, message: Message) -> None:
        """Take a message about a secure sum, and answer it."""
        if self._secure is None:
            raise ProtocolError("the server sent keys, and its plan has no secure aggregation")
        if (answer := self._secure.received(message)) is not None:
            self._connection.send(answer)

    def _post(self) -> None:
        means, weights = self.trained.means(), self.trained.weights()
        self._accuracy = accuracy_of(means)
        loss = means.get("loss", float("nan"))
        try:
            post = self._next_post(weights, loss)
        except BadUpdate as error:
            self._break(f"after training: {error.message}", error.hint)
            return
        self._number = post.number
        self._trainings += 1
        self._since, self._posted_at, self.posts = 0, time.monotonic(), self.posts + 1
        self._connection.send(post)
        batches = f"{self.updates:,} batch{'es' * (self.updates > 1)}"
        self._unshown = f"posted    set {self.posts} after {batches}: {self._training_facts(loss)}"
        if time.monotonic() - self._shown_at >= SHOWN_S:
            self._show_last_post()

    def _training_facts(self, loss: float) -> str:
        """Return what the line about a post tells about its training."""
        return f"loss {loss:.4f}, accuracy {self._accuracy:.4f}"

    def _next_post(self, weights: Weights, loss: float) -> Post | Masked:
        """Return the next post: with a set, or with a masked update.

        Raises:
            BadUpdate: The weights cannot travel.
        """
        if self._secure is not None:
            self._posted = []  # it waits for the base, and trains nothing meanwhile
            return self._secure.masked(weights, self._number + 1, self._since)
        if problem := self._wire.unfit(weights):
            raise BadUpdate(problem)
        data = self._wire.encode(self._hidden(weights))
        self._posted = self._wire.decode(data)  # as the server has them
        return Post(
            number=self._number + 1,
            contains=self._contains,
            updates=self._since,
            base=self._base if self.plan.way == "rounds" else NO_SET,
            accuracy=-1.0 if self._mechanism else _to_wire(self._accuracy),  # a metric would tell without noise
            loss=-1.0 if self._mechanism else _to_wire(loss),
            set=data,
        )

    def _show_last_post(self) -> None:
        """Print the line about the last post, if it was not printed."""
        if self._unshown:
            self._say(self._unshown)
            self._unshown, self._shown_at = "", time.monotonic()

    def _break(self, reason: str, hint: str = "") -> None:
        if time.monotonic() - self._broken_at >= BROKEN_S:
            self._broken_at = time.monotonic()
            self._say(f"broken    {reason}; beginning again from the last validated set{hint and f'; {hint}'}")
        self._since = 0
        notified = None
        while True:  # earlier answers belong to the broken weights
            if self._connection.welcome is not notified:  # not yet, or the message was lost with its connection
                notified = self._connection.welcome
                self._connection.send(Broken(why=reason[:500]))
            message = self._connection.take(1.0)
            if message is None and not self._connection.is_open:  # nobody can help: continue as before
                return
            if isinstance(message, End):
                self._on_end(message)
                return
            if isinstance(message, Answer) and message.answer in ("replace", "rejected"):
                self._on_answer(replace(message, answer="rejected", why=""))
                return
            if isinstance(message, MESSAGES):
                self._pass_on(message)

    def _on_answer(self, answer: Answer) -> None:
        self._set_rate(answer.rate)
        if answer.answer == "continue":
            return
        if self._secure is not None and answer.answer in ("merge", "validate"):
            raise ProtocolError(f"the server asks to {answer.answer} a single set, and its plan has secure aggregation")
        if answer.answer == "validate":
            self._validate(answer.set_number, self._posted)
            return
        if fault := self._wire.fault(answer.set):
            raise ProtocolError(f"the server's set {answer.set_number} cannot be used: {fault}")
        weights = self._wire.decode(answer.set)
        if answer.answer == "merge":
            self._merge(answer, weights)
            return
        self._start_from(weights)
        if self._secure is not None:
            self._secure.begin(answer.set_number, weights, answer.set)
        if answer.answer == "replace" and self._posted and not self._hides:
            # keep the training since the post, and what its rounding has lost
            weights = [
                g + (live - posted) if is_float(g) else g
                for g, live, posted in zip(weights, self.trained.weights(), self._posted, strict=True)
            ]
        if answer.answer == "rejected":
            if answer.why:
                self._say(f"rejected  {answer.why}; beginning again from set {answer.set_number}")
            self._since = 0
        self._load(weights)
        self._contains = self._base = self.last_set = answer.set_number
        self._trainings = answer.trainings
        self.takes += 1

    def _validate(self, number: int, weights: Weights) -> None:
        if self._mechanism is not None:  # a metric would tell without noise
            return
        accuracy, loss, samples = self.trained.test(weights)
        if math.isfinite(loss):
            tested = Score(set_number=number, accuracy=_to_wire(accuracy), loss=max(loss, 0.0), samples=samples)
            self._connection.send(tested)

    def _merge(self, answer: Answer, weights: Weights) -> None:
        own_set = WeightSet(weights=self.trained.weights(), trainings=self._trainings, accuracy=self._accuracy)
        received_set = WeightSet(weights=weights, trainings=answer.trainings, accuracy=_from_wire(answer.accuracy))
        merged = self._rule.merge(own_set, received_set)
        if problem := self.trained.layout.not_finite(merged.weights):
            self._break(f"merging set {answer.set_number}: {problem}")
            return
        if merged is not own_set:
            self._load(merged.weights)
        self._trainings, self._contains = merged.trainings, answer.set_number
        self.last_set = answer.set_number
        self.takes += 1
        self.merges += 1

    def _on_end(self, end: End) -> None:
        if not end.over:
            raise AuthError(f"the server has ended this peer's session: {end.why}", hint=end.hint)
        if end.set and not self._wire.fault(end.set):
            self._load(self._wire.decode(end.set))
        self.why_over = end.why
        self._show_last_post()
        self._say(f"over      {end.why}")

    def _load(self, weights: Weights) -> None:
        self.trained.assign([np.asarray(array) for array in weights])

    def _set_rate(self, rate: float) -> None:
        if self.plan.decay and rate and rate != self._rate:
            self._rate = rate
            self.trained.set_rate(rate)


def _to_wire(value: Any) -> float:
    return float(value) if value >= 0 and math.isfinite(value) else -1.0


def _from_wire(value: float) -> float:
    return value if value >= 0 else float("nan")
