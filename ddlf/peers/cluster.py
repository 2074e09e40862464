"""A cluster as one peer: a run of workers posts its weights and merges sets of others between two commits.

Runs on the master of the run. ``LiveWeights`` stands for the model of this peer, with the weights of the run. An update
is a commit, and the samples are the app's. The token of the workers never goes to the server.

The state of the peer is a part of the run's state, so each checkpoint has it. A resumed run comes back as the same
peer, by the key of the link in the state folder:

| the checkpoint is | the run |
|---|---|
| as new as the last post | continues with its weights, which contain all that the server thinks; in rounds, with its base |
| older than the last post | merges the set that the server gives to peers without weights; in rounds it loads the set |
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from ddlf.algorithms.rate_decay import Never
from ddlf.algorithms.set_merge import WeightSet
from ddlf.algorithms.weights import Weights
from ddlf.errors import AppError, ConfigError, DDLFError
from ddlf.events import PeersTold, SetPosted, SetTaken
from ddlf.extras import provided
from ddlf.peers.entries import NO_SET
from ddlf.peers.frames import Bye, End, Post
from ddlf.peers.model import MOST_TESTED, PART, accuracy_of, rows_of, trained_tensors
from ddlf.peers.peer import Peer
from ddlf.peers.plan import Offer
from ddlf.peers.sets import Layout, layout_of
from ddlf.privacy import contradictions
from ddlf.training.callbacks.master import merged_metrics
from ddlf.training.context import App
from ddlf.training.external_weights import STATE
from ddlf.training.progress import Progress, local
from ddlf.training.slot.optimizers import rate_variables
from ddlf.training.spec import RunSpec

GOODBYE_S = 10.0
"""Longest wait for the answer to the last post in swaps, and for the bye to be sent."""
LOOK_S = 0.1


class LiveWeights:
    """The weights of a run, as the model of a peer.

    Args:
        app: The app, with its model.
        progress: The state of the run.
        evaluate: Evaluates weights on some rows of the app's arrays: ``(weights, x, y) -> metrics``. It may wait for the
            master's other evaluations.

    Attributes:
        layout: Layout of its exact sets.
        trainable: Per tensor, whether it is trained.
        current: The weights, in the order of ``model.weights``.
        samples: Number of training samples of the run.
    """

    def __init__(self, app: App, progress: Progress, evaluate: Callable[..., dict[str, float]]) -> None:
        self._app, self._progress, self._evaluate = app, progress, evaluate
        variables = provided("named_weights", PART)(getattr(app.model, "inner", app.model))
        indices = {id(variable): index for index, variable in enumerate(app.model.weights)}
        self._indices = [indices[id(variable)] for variable in variables.values()]
        if len(self._indices) != len(indices):
            raise AppError("some weights of the model belong to no layer, so peers cannot exchange them")
        self.layout: Layout = layout_of({name: np.asarray(variable) for name, variable in variables.items()})
        self.trainable = trained_tensors(app.model, variables)
        self.current: Weights = []
        self.samples = progress.samples
        self._reported = len(progress.records)
        self._random = np.random.default_rng()

    def weights(self) -> Weights:
        """Return the live weights, which nobody changes in place."""
        return [self.current[index] for index in self._indices]

    def assign(self, weights: Weights) -> None:
        """Replace the live weights."""
        weights_in_order = list(self.current) or [np.empty(0)] * len(self._indices)
        for index, array in zip(self._indices, weights, strict=True):
            weights_in_order[index] = array
        self.current = weights_in_order

    def means(self) -> dict[str, float]:
        """Return the mean metrics of the commits since the last call."""
        records = self._progress.records[self._reported :]
        self._reported = len(self._progress.records)
        return merged_metrics(records) if records else {}

    def test(self, weights: Weights) -> tuple[float, float, int]:
        """Return accuracy, loss and number of samples of weights, on some of the app's test or validation data.

        The loss is NaN without such data.
        """
        for part in ("test", "val"):
            x, y = getattr(self._app, f"x_{part}", None), getattr(self._app, f"y_{part}", None)
            first = next(iter(x.values())) if isinstance(x, dict) else x
            if isinstance(first, np.ndarray) and isinstance(y, np.ndarray | dict):
                break
        else:
            return math.nan, math.nan, 0
        rows = np.arange(len(first))
        if len(rows) > MOST_TESTED:
            rows = np.sort(self._random.choice(rows, MOST_TESTED, replace=False))
        in_order: Weights = [np.empty(0)] * len(self._indices)
        for index, array in zip(self._indices, weights, strict=True):
            in_order[index] = array
        logs = self._evaluate(in_order, rows_of(x, rows), rows_of(y, rows))
        return accuracy_of(logs), float(logs["loss"]), len(rows)

    def set_rate(self, rate: float) -> None:
        """Let all slots train with a learning rate from their next round on."""
        self._progress.rates = [[rate] * len(rate_variables(self._app.model))]


class Posting(Peer):
    """The peer of a run: it posts and takes sets when the run says so, and never waits for a server that is gone."""

    trained: LiveWeights  # type: ignore[assignment]

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords, retry_s=math.inf, background=True)
        self._tests = ThreadPoolExecutor(1, "ddlf-peer-test")

    def join_with(self, live: LiveWeights, state: Weights, check: Callable[[], None]) -> None:
        """Connect, and begin: with the server's set, or as the peer of an earlier run with its weights.

        Args:
            live: The weights of the run.
            state: The result of ``state`` in the earlier run; empty for none.
            check: Raises an error if the run cannot follow the plan.
        """
        self.trained = live
        self._connection = self._new_connection()
        self._prepare(self._connection.offer())
        check()
        posted = trainings = 0
        if state:
            posted, contains, base, trainings, self.updates, self._since = map(int, state[0])
            self._run, self._keeps_weights = state[1].tobytes().decode(), True
            self._contains, self._base = contains, base
        welcome = self._connection.open()
        if self._keeps_weights and welcome.number > posted:  # the checkpoint is older than its last post
            self._connection.close()
            self._keeps_weights, self._contains = False, NO_SET
            self._connection = self._new_connection()
            welcome = self._connection.open()
        self._read(welcome)
        if self._keeps_weights:
            self._trainings = trainings
        else:
            first, self._base, self.last_set = self._first_set(welcome), welcome.set_number, welcome.set_number
            if state and self.plan.way == "swap":
                own_set = WeightSet(weights=self.trained.weights(), trainings=trainings)
                server_set = WeightSet(weights=first, trainings=welcome.trainings)
                first = self._rule.merge(own_set, server_set).weights
            self._load(first)
        ends_round = (
            self._keeps_weights and self.plan.way == "rounds" and 0 < posted == welcome.number and not self._since
        )
        self._ready(welcome)
        if ends_round:
            self._ask_for_base()

    def state(self) -> Weights:
        """Return what a resumed run needs to come back as the same peer."""
        numbers = self._number, self._contains, self._base, self._trainings, self.updates, self._since
        return [np.array(numbers, np.int64), np.frombuffer(self._run.encode(), np.uint8).copy()]

    def count(self) -> None:
        """Count a commit of the run."""
        self.updates += 1
        self._since += 1

    @property
    def has_news(self) -> bool:
        """Whether the server has sent something."""
        return self._connection.has_news

    def exchange(self) -> None:
        """Post if it is time, and take what the server has sent. In rounds, wait for the end of the round."""
        self._take(0.0)
        if not self.why_over and self.is_due(self.plan.updates):
            self._post()
            self._take(0.0)
        if self.plan.way == "rounds":
            self._until_round_ends()

    def _ask_for_base(self) -> None:
        """Send the last post of the earlier run again, whose weights the run has, and wait for the base that contains it.

        The earlier run has left without this base, and a post that begins with an older one is rejected.
        """
        data = self._wire.encode(self.trained.weights())
        self._posted = self._wire.decode(data)
        self._connection.send(
            Post(
                number=self._number,
                contains=self._contains,
                updates=0,
                base=self._base,
                accuracy=-1.0,
                loss=-1.0,
                set=data,
            )
        )
        self._until_round_ends()

    def _until_round_ends(self) -> None:
        while self._connection.waits and self._connection.is_open and not self.why_over:
            self._show_round()
            self._take(LOOK_S)

    def leave(self) -> None:
        """Post a last time, wait until the post is acknowledged, and say goodbye.

        The weights stay as they are: the server gives a set that is not merged to others.
        """
        self._until_answered()
        if not self.why_over and self._since and self._connection.is_open and not self._connection.waits:
            self._post()
            self._until_answered()
        if self.why_over:
            self._say(f"over      {self.why_over}; the last updates of this run are not in the last set")
            return
        if self._connection.waits:
            self._say("lost      the last post has no answer from the server, so it may be lost")
        self._connection.send(Bye())
        self._connection.flush(GOODBYE_S)

    def _until_answered(self) -> None:
        patience = GOODBYE_S + self.plan.deadline_s * (self.plan.way == "rounds")
        until = time.monotonic() + patience
        while self._connection.waits and not self.why_over and time.monotonic() < until:
            message = self._connection.take(LOOK_S)
            if isinstance(message, End) and message.over:
                self.why_over = message.why
            elif isinstance(message, End):
                self._on_end(message)
            elif message is None and not self._connection.is_open:
                break

    def close(self) -> None:
        """End the connection and the tests. Safe to call again."""
        self._tests.shutdown(wait=False, cancel_futures=True)
        super().close()

    def _validate(self, number: int, weights: Weights) -> None:
        def validate() -> None:
            with suppress(Exception):  # the run ends meanwhile; the server asks again
                super(Posting, self)._validate(number, weights)

        with suppress(RuntimeError):  # closed
            self._tests.submit(validate)


class ClusterPeer:
    """A run's membership in a training with peers, as ``ddlf.training.external_weights.Outside`` describes it.

    Args:
        link: The link.
        app: The app, with its model.
        spec: The settings of the run.
        progress: The state of the run.
        evaluate: Evaluates weights on arrays, on the master: ``async (weights, x, y) -> metrics``.

    Raises:
        ConfigError: The link cannot be used.
    """

    def __init__(self, link: str, app: App, spec: RunSpec, progress: Progress, evaluate: Any) -> None:
        self._app, self._spec, self._progress = app, spec, progress
        self._loop = asyncio.get_running_loop()

        def test(*args: Any) -> dict[str, float]:
            logs: dict[str, float] = asyncio.run_coroutine_threadsafe(evaluate(*args), self._loop).result()
            return logs

        self._live = LiveWeights(app, progress, test)
        self._peer = Posting(link, self._model_for, name=type(app).__name__, say=self._say)
        self._failure = ""

    @property
    def needs_weights(self) -> bool:
        """Whether the next commit will probably post or take a set."""
        return not self._failure and (self._peer.has_news or self._peer.is_due(self._peer.plan.updates, ahead=1))

    @property
    def over(self) -> str:
        """Why the training of all peers is over."""
        return self._peer.why_over

    async def join(self) -> None:
        """Connect, and put the weights that the run begins with into its progress."""
        state = self._progress.group(STATE)
        current = local(self._progress.weights)
        saved = [] if state is None else local(state)
        self._progress.drop(STATE)
        self._live.current = list(current)
        try:
            await asyncio.to_thread(self._peer.join_with, self._live, saved, self._check)
        except BaseException:
            self._peer.close()  # another run of this program may use the key of the link
            raise
        self._take_over(current)
        self._keep()
        self._tell_few_commits()

    async def exchanged(self, weights: Weights | None) -> Weights | None:
        """Count a commit, post its weights if it is time, and take what the server has sent."""
        if self._failure:
            return weights
        peer = self._peer
        peer.count()
        if weights is not None and (peer.has_news or peer.is_due(peer.plan.updates)):
            self._live.current = posted = list(weights)
            posts, merges, takes = peer.posts, peer.merges, peer.takes
            try:
                await asyncio.to_thread(peer.exchange)
            except DDLFError as error:
                self._failure = str(error)
                self._tell("alone", f"the run continues without peers: {error}")
            if peer.posts > posts:
                self._app.run_context.emit(SetPosted(version=self._progress.version, number=peer.posts))
            if peer.takes > takes:
                how: Literal["merge", "replace"] = "merge" if peer.merges > merges else "replace"
                self._app.run_context.emit(SetTaken(version=self._progress.version, set=peer.last_set, how=how))
            if self._live.current is not posted:
                weights = self._live.current
        self._keep()
        return weights

    async def leave(self, weights: Weights) -> bool:
        """Say goodbye after a last post."""
        if self._failure:
            return False
        if self.over:
            self._tell_summary()
            return False
        posts = self._peer.posts
        self._live.current = list(weights)
        try:
            await asyncio.to_thread(self._peer.leave)
        except DDLFError as error:
            self._tell("alone", str(error))
        self._tell_summary()
        self._keep()
        if self._peer.posts > posts:
            self._app.run_context.emit(SetPosted(version=self._progress.version, number=self._peer.posts))
        return self._peer.posts > posts

    async def close(self) -> None:
        """End the connection."""
        await asyncio.to_thread(self._peer.close)

    def _model_for(self, offer: Offer) -> LiveWeights:
        return self._live

    def _check(self) -> None:
        """Refuse a plan that the run cannot follow."""
        plan, local_settings, exchange = self._peer.plan, self._spec.local, self._spec.exchange
        contradictions.check(
            contradictions.Choice(
                trainers="runs",
                clip=plan.clip,
                noise=plan.noise,
                trust=plan.trust,
                way=plan.way,
                secure=plan.secure_aggregation,
            )
        )
        if not plan.decay:
            return
        if exchange.one_step or not rate_variables(self._app.model):
            raise ConfigError(
                "the server's plan lowers the learning rate, and this run cannot change that of its optimizer",
                hint="serve without decay, or train with exchange='star' and a constant learning rate",
            )
        if local_settings.schedule is not None or not isinstance(local_settings.rate_decay, Never):
            raise ConfigError(
                "the server's plan and this run both set the learning rate",
                hint="leave schedule and rate_decay of the app out, or serve without decay",
            )

    def _tell_few_commits(self) -> None:
        """Say that the run ends before its first post is due."""
        progress, plan = self._progress, self._peer.plan
        rounds = len(progress.starts) - 1 - progress.reached
        commits = rounds if self._spec.train.in_rounds else rounds * progress.slots_in(progress.reached)
        if 0 < commits < plan.updates and not plan.seconds:
            reason = f"the server's plan posts after {plan.updates:,} commits, and this run has {commits:,}"
            self._tell(
                "rarely", f"{reason}: it posts at its end only; ddlf peers serve --updates {max(1, commits // 5)}"
            )

    def _tell_summary(self) -> None:
        """Say how much this run has given and taken."""
        posts, merged, loaded = self._peer.posts, self._peer.merges, self._peer.takes - self._peer.merges
        received = f"{merged:,} set{'s' * (merged != 1)} of others merged" + f", {loaded:,} loaded" * bool(loaded)
        self._tell("left", f"the peers' training after {posts:,} post{'s' * (posts != 1)}: {received}")

    def _take_over(self, former: Weights) -> None:
        current = self._live.current
        if any(new is not old for new, old in zip(current, former, strict=True)):
            self._progress.weights = current
            if self._progress.version:
                reason = f"the run continues from set {self._peer.last_set} of the server"
                self._tell("replaced", reason)

    def _keep(self) -> None:
        self._progress.keep(STATE, self._peer.state())

    def _say(self, line: str) -> None:
        kind, _, text = line.partition(" ")
        if kind == "posted":  # it has its own event
            return
        with suppress(RuntimeError):  # the program ends
            self._loop.call_soon_threadsafe(self._tell, kind, text.strip())

    def _tell(self, kind: str, text: str) -> None:
        self._app.run_context.emit(PeersTold(what=kind, why=text))
