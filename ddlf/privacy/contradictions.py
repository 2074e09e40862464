"""Settings that contradict noise on updates or secure aggregation, in one table. The checks, their sentences and a page follow from it. Pure.

``Choice`` has the settings that matter, of a training by peers or of a run with private workers. ``check`` refuses the
first row of ``TABLE`` that applies. ``docs/reference/contradictions.md`` is the table for readers.

Settings that only process a release further contradict nothing: outer optimizers, schedules of the learning rate, and
evaluation on the server's own data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ddlf.errors import ConfigError
from ddlf.privacy.release import MOST_STD, Mechanism

Trainers = Literal["peers", "runs", "workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The settings of a training that decide who sees updates, and with how much noise.

    Args:
        trainers: Peers, private workers, or a run with workers that is a peer.
        clip: The clip of updates; None without.
        noise: The noise multiplier; None without.
        trust: ``"server"`` or ``"nobody"``; None by default.
        divisor: The fixed divisor; None by default.
        quorum: Posts that a round needs.
        way: ``"rounds"`` or ``"swap"`` of peers; the mode of a run with workers, such as ``"sync"``.
        merge: The merge rule.
        reveals: A sentence about the parts of single updates that the merge rule passes on; empty if there are none.
        update_policy: The policy for suspicious updates; None by default.
        codec: How weights of peers, or updates of workers travel.
        outward: How weights travel to workers.
        shards: Whether the server gives its data to peers.
        private: Whether the data are private.
        metric: The metric of the workers' training that ends the run; empty without one.
        delta: Delta of the stated epsilon; None by default.
        budget: The privacy budget; None without.
        secure: Whether updates are added up under masks.
        limit: The largest value of an update under masks; None by default.
        states: The setting ``optimizer_state``, if states of optimizers come to the master and tell about updates; empty if
            they do not.
        decay: Whether the server lowers the learning rate of peers.
        longest: The limit of the length of trainings; None by default.
        trial: How much worse than usual a set may be in a test before it counts; 0 without the test.
        shared: Settings that make slots share more than updates, such as ``"local_rule='scaffold'"``.
        unit: The data that the noise of private workers hides: of a ``"worker"``, or a ``"sample"``.
        callbacks: Whether workers call callbacks of the user.
    """

    trainers: Trainers
    clip: float | None = None
    noise: float | None = None
    trust: str | None = None
    divisor: int | None = None
    quorum: int = 1
    way: str = "rounds"
    merge: str = "mean"
    reveals: str = ""
    update_policy: str | None = None
    codec: str = "float32"
    outward: str = "float32"
    shards: bool = False
    private: bool = True
    metric: str = ""
    delta: float | None = None
    budget: float | None = None
    secure: bool = False
    limit: float | None = None
    states: str = ""
    decay: bool = False
    longest: float | None = None
    trial: float = 0.0
    shared: tuple[str, ...] = ()
    unit: str = "worker"
    callbacks: bool = False

    @property
    def has_noise(self) -> bool:
        """Whether updates, or the steps of workers, are clipped and noised."""
        return self.noise is not None

    @property
    def is_loud(self) -> bool:
        """Whether there is more noise than float32 weights can have."""
        return self.clip is not None and self.noise is not None and self.clip * self.noise > MOST_STD

    @property
    def is_too_narrow(self) -> bool:
        """Whether clipped updates with their shares of noise, which three members add, have values beyond the limit."""
        if self.clip is None or self.noise is None or self.limit is None:
            return False
        share = Mechanism(clip=self.clip, noise=self.noise, divisor=1, least=3, trust="nobody")
        return self.limit < share.largest

    @property
    def of_samples(self) -> bool:
        """Whether each worker noises its own steps. Then the master can do anything with its updates."""
        return self.unit == "sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contradiction:
    """A row of the table.

    Args:
        trainers: The trainers whose settings the row is about.
        settings: The settings that contradict each other, in words. ``{name}`` is a field of ``Choice``.
        reason: The reason, as a clause.
        hint: What to do.
        applies: Whether a choice has this contradiction.
    """

    trainers: Trainers
    settings: str
    reason: str
    hint: str
    applies: Callable[[Choice], bool]


TABLE: tuple[Contradiction, ...] = (
    Contradiction(
        trainers="peers",
        settings="a clip without noise",
        reason="a clipped update tells about its data as any other update does",
        hint="add --noise 1, or leave out --clip",
        applies=lambda c: c.clip is not None and c.noise is None,
    ),
    Contradiction(
        trainers="peers",
        settings="noise without a clip",
        reason="noise hides an update only if the length of updates is bounded",
        hint="add --clip with the usual length of an update, such as --clip 1",
        applies=lambda c: c.clip is None and c.noise is not None,
    ),
    Contradiction(
        trainers="peers",
        settings="a clip times a noise above 1e6",
        reason="so much noise fills all digits of a float32 weight",
        hint="lower --clip to the usual length of an update, or lower --noise to 0.5 to 5",
        applies=lambda c: c.is_loud,
    ),
    Contradiction(
        trainers="peers",
        settings="trust without noise",
        reason="it says who adds the noise",
        hint="add --clip and --noise, or leave out --trust",
        applies=lambda c: c.trust is not None and not c.has_noise,
    ),
    Contradiction(
        trainers="peers",
        settings="a divisor without noise",
        reason="without noise, the mean of a round divides by its samples",
        hint="add --clip and --noise, or leave out --divisor",
        applies=lambda c: c.divisor is not None and not c.has_noise,
    ),
    Contradiction(
        trainers="peers",
        settings="a privacy budget without noise",
        reason="without noise, no epsilon is finite",
        hint="add --clip and --noise, or leave out --privacy-budget",
        applies=lambda c: c.budget is not None and not c.has_noise,
    ),
    Contradiction(
        trainers="peers",
        settings="a delta without noise",
        reason="it belongs to the epsilon of noise",
        hint="add --clip and --noise, or leave out --delta",
        applies=lambda c: c.delta is not None and not c.has_noise,
    ),
    Contradiction(
        trainers="peers",
        settings="noise in swaps",
        reason="a peer gets the set of one other peer, and no sum of many",
        hint="add --way rounds",
        applies=lambda c: c.has_noise and c.way == "swap",
    ),
    Contradiction(
        trainers="peers",
        settings="noise without a divisor, and with a quorum of 1",
        reason="the sum of the updates has a divisor that does not depend on the number of posts, and a quorum of 1 says nothing about it",
        hint="add --quorum with the fewest peers of a round, or --divisor with their usual number",
        applies=lambda c: c.has_noise and c.divisor is None and c.quorum == 1,
    ),
    Contradiction(
        trainers="peers",
        settings="noise with the merge {merge}",
        reason="the noise fits a sum of clipped updates, and this rule computes another result",
        hint="leave out --merge",
        applies=lambda c: c.has_noise and c.merge != "mean",
    ),
    Contradiction(
        trainers="peers",
        settings="noise with the update policy {update_policy}",
        reason="it compares updates, so one peer's update would decide whether another one counts",
        hint="leave out --update-policy: clipping bounds each update",
        applies=lambda c: c.has_noise and c.update_policy is not None,
    ),
    Contradiction(
        trainers="peers",
        settings="noise of peers (trust nobody) with the codec {codec}",
        reason="a peer drops its own weights after each round, and so the part that rounding has lost",
        hint="leave out --codec, or choose --trust server",
        applies=lambda c: c.has_noise and c.trust == "nobody" and c.codec != "float32",
    ),
    Contradiction(
        trainers="peers",
        settings="noise of peers (trust nobody) with shards",
        reason="the server has the data of all shards",
        hint="choose --trust server, or leave out --shards",
        applies=lambda c: c.has_noise and c.trust == "nobody" and c.shards,
    ),
    Contradiction(
        trainers="peers",
        settings="secure aggregation in swaps",
        reason="a peer gets the set of one other peer there, and no sum of many",
        hint="add --way rounds",
        applies=lambda c: c.secure and c.way == "swap",
    ),
    Contradiction(
        trainers="peers",
        settings="secure aggregation with the merge {merge}",
        reason="this rule compares single updates, and the server sees their sum only",
        hint="leave out --merge",
        applies=lambda c: c.secure and c.merge != "mean",
    ),
    Contradiction(
        trainers="peers",
        settings="secure aggregation with the update policy {update_policy}",
        reason="it judges single updates, and the server sees their sum only",
        hint="leave out --update-policy",
        applies=lambda c: c.secure and c.update_policy is not None,
    ),
    Contradiction(
        trainers="peers",
        settings="secure aggregation with the codec {codec}",
        reason="masked numbers have 32 random bits each, and a rounded one loses its mask",
        hint="leave out --codec",
        applies=lambda c: c.secure and c.codec != "float32",
    ),
    Contradiction(
        trainers="peers",
        settings="secure aggregation with a quorum below 3",
        reason="with two peers, each can subtract its own update from the sum",
        hint="choose --quorum 3 or more",
        applies=lambda c: c.secure and c.quorum < 3,
    ),
    Contradiction(
        trainers="peers",
        settings="secure aggregation with a quorum above 50",
        reason="a sum has no more members, so no round could begin",
        hint="choose --quorum 50 or less",
        applies=lambda c: c.secure and c.quorum > 50,
    ),
    Contradiction(
        trainers="peers",
        settings="secure aggregation with decay",
        reason="a server could give a tiny learning rate to all peers but one, and see the update of this one",
        hint="leave out --decay",
        applies=lambda c: c.secure and c.decay,
    ),
    Contradiction(
        trainers="peers",
        settings="secure aggregation with shards",
        reason="the server has the data of all shards, so there is nothing to hide from it",
        hint="leave out --shards",
        applies=lambda c: c.secure and c.shards,
    ),
    Contradiction(
        trainers="peers",
        settings="secure aggregation with noise",
        reason="DDLF cannot add noise to a sum under masks yet",
        hint="leave out --secure-aggregation, or --clip and --noise",
        applies=lambda c: c.secure and c.has_noise,
    ),
    Contradiction(
        trainers="peers",
        settings="a longest training with noise",
        reason="the clip already bounds each update",
        hint="leave out --longest",
        applies=lambda c: c.has_noise and c.longest is not None,
    ),
    Contradiction(
        trainers="peers",
        settings="a longest training with secure aggregation",
        reason="the server sees no single update",
        hint="leave out --longest",
        applies=lambda c: c.secure and c.longest is not None,
    ),
    Contradiction(
        trainers="peers",
        settings="a trial of each set with noise",
        reason="the clip and the noise are for sums, and the trial would tell the accuracy of one peer's update",
        hint="leave out --trial",
        applies=lambda c: c.has_noise and c.trial > 0,
    ),
    Contradiction(
        trainers="peers",
        settings="a trial of each set with secure aggregation",
        reason="the server sees no single update",
        hint="leave out --trial",
        applies=lambda c: c.secure and c.trial > 0,
    ),
    Contradiction(
        trainers="runs",
        settings="a run with workers as a peer that trusts nobody",
        reason="a resumed run no longer has the base that its update is the difference to",
        hint="serve with --trust server, or join with ddlf peers join",
        applies=lambda c: c.has_noise and c.trust == "nobody",
    ),
    Contradiction(
        trainers="runs",
        settings="a run with workers as a peer, in a training with secure aggregation,",
        reason="a run of workers keeps no keys between its rounds",
        hint="join with ddlf peers join, or serve without --secure-aggregation",
        applies=lambda c: c.secure,
    ),
    Contradiction(
        trainers="workers",
        settings="update_clip without noise_multiplier",
        reason="a clipped update tells about its data as any other update does",
        hint="set noise_multiplier, too, or leave out update_clip",
        applies=lambda c: c.clip is not None and c.noise is None,
    ),
    Contradiction(
        trainers="workers",
        settings="noise_multiplier without update_clip",
        reason="noise hides an update only if the length of updates is bounded",
        hint="set update_clip to the usual length of an update",
        applies=lambda c: c.clip is None and c.noise is not None,
    ),
    Contradiction(
        trainers="workers",
        settings="update_clip times noise_multiplier above 1e6",
        reason="so much noise fills all digits of a float32 weight",
        hint="lower update_clip to the usual length of an update, or lower noise_multiplier to 0.5 to 5",
        applies=lambda c: c.is_loud,
    ),
    Contradiction(
        trainers="workers",
        settings="privacy_budget without noise_multiplier",
        reason="without noise, no epsilon is finite",
        hint="set update_clip and noise_multiplier, or leave out privacy_budget",
        applies=lambda c: c.budget is not None and not c.has_noise,
    ),
    Contradiction(
        trainers="workers",
        settings="delta without noise_multiplier",
        reason="it belongs to the epsilon of noise",
        hint="set update_clip and noise_multiplier, or leave out delta",
        applies=lambda c: c.delta is not None and not c.has_noise,
    ),
    Contradiction(
        trainers="workers",
        settings="noise_multiplier without private=True",
        reason="the master has the data, so there is nothing to hide from it",
        hint="set private = True, or leave out update_clip and noise_multiplier",
        applies=lambda c: c.has_noise and not c.private,
    ),
    Contradiction(
        trainers="workers",
        settings="noise_multiplier with mode={way!r}",
        reason="the new weights follow from the update of one worker, and from no sum of many",
        hint="train in mode 'sync'",
        applies=lambda c: c.has_noise and c.way != "sync" and not c.of_samples,
    ),
    Contradiction(
        trainers="workers",
        settings="noise_multiplier with merge={merge!r}",
        reason="the noise fits a sum of clipped updates, and this rule computes another result",
        hint="leave out merge",
        applies=lambda c: c.has_noise and c.merge != "mean" and not c.of_samples,
    ),
    Contradiction(
        trainers="workers",
        settings="noise_multiplier with update_policy={update_policy!r}",
        reason="it compares updates, so one worker's update would decide whether another one counts",
        hint="leave out update_policy: clipping bounds each update",
        applies=lambda c: c.has_noise and c.update_policy is not None and not c.of_samples,
    ),
    Contradiction(
        trainers="workers",
        settings="noise_multiplier with {shared[0]}",
        reason="workers would get sums of more than the updates, without noise",
        hint="leave it out",
        applies=lambda c: c.has_noise and bool(c.shared) and not c.of_samples,
    ),
    Contradiction(
        trainers="workers",
        settings="noise_multiplier with converge on the metric {metric!r}",
        reason="metrics of workers have no noise, so they are left out",
        hint="set x_test and y_test in load_test_dataset, and let converge look at test_loss or test_accuracy",
        applies=lambda c: c.has_noise and bool(c.metric),
    ),
    Contradiction(
        trainers="workers",
        settings="privacy_unit='sample' without noise_multiplier",
        reason="it says what the noise hides",
        hint="set update_clip and noise_multiplier, or leave out privacy_unit",
        applies=lambda c: c.of_samples and not c.has_noise,
    ),
    Contradiction(
        trainers="workers",
        settings="privacy_unit='sample' with mode={way!r}",
        reason="DDLF counts the steps of single samples in synchronous rounds only",
        hint="train in mode 'sync'",
        applies=lambda c: c.of_samples and c.way != "sync",
    ),
    Contradiction(
        trainers="workers",
        settings="privacy_unit='sample' with {shared[0]}",
        reason="DDLF makes the steps of single samples by plain local training only",
        hint="leave it out",
        applies=lambda c: c.of_samples and bool(c.shared),
    ),
    Contradiction(
        trainers="workers",
        settings="privacy_unit='sample' with worker_callbacks",
        reason="they look at losses and batches, which have no noise",
        hint="use callbacks, which the master calls, or leave them out",
        applies=lambda c: c.of_samples and c.callbacks,
    ),
    Contradiction(
        trainers="workers",
        settings="update_limit without secure_aggregation",
        reason="it is the largest value of an update under masks",
        hint="set secure_aggregation, too, or leave out update_limit",
        applies=lambda c: c.limit is not None and not c.secure,
    ),
    Contradiction(
        trainers="workers",
        settings="update_limit below the values that update_clip and noise_multiplier lead to",
        reason="a clipped and noised update would have larger values, which end the run",
        hint="leave out update_limit: it then follows from the clip and the noise",
        applies=lambda c: c.secure and c.is_too_narrow,
    ),
    Contradiction(
        trainers="workers",
        settings="secure_aggregation without private=True",
        reason="the master has the data, so there is nothing to hide from it",
        hint="set private = True, or leave out secure_aggregation",
        applies=lambda c: c.secure and not c.private,
    ),
    Contradiction(
        trainers="workers",
        settings="secure_aggregation with mode={way!r}",
        reason="the new weights follow from the update of one worker, and from no sum of many",
        hint="train in mode 'sync'",
        applies=lambda c: c.secure and c.way != "sync",
    ),
    Contradiction(
        trainers="workers",
        settings="secure_aggregation with merge={merge!r}",
        reason="this rule compares single updates, and the master sees their sum only",
        hint="leave out merge",
        applies=lambda c: c.secure and c.merge != "mean",
    ),
    Contradiction(
        trainers="workers",
        settings="secure_aggregation with update_policy={update_policy!r}",
        reason="it judges single updates, and the master sees their sum only",
        hint="leave out update_policy",
        applies=lambda c: c.secure and c.update_policy is not None,
    ),
    Contradiction(
        trainers="workers",
        settings="secure_aggregation with codec={codec!r}",
        reason="masked numbers have 32 random bits each, and a rounded one loses its mask",
        hint="leave out codec",
        applies=lambda c: c.secure and c.codec != "float32",
    ),
    Contradiction(
        trainers="workers",
        settings="secure_aggregation with weights_codec={outward!r}",
        reason="each worker has other rounded weights then, and workers only add up updates of the same weights",
        hint="use weights_codec 'float32', 'float16' or 'bfloat16'",
        applies=lambda c: c.secure and c.outward.startswith("delta:"),
    ),
    Contradiction(
        trainers="workers",
        settings="secure_aggregation with privacy_unit='sample'",
        reason="DDLF counts the steps of single samples in rounds without masks only",
        hint="leave out one of the two: with privacy_unit='worker', each worker adds a share of the noise",
        applies=lambda c: c.secure and c.of_samples,
    ),
    Contradiction(
        trainers="workers",
        settings="secure_aggregation with {shared[0]}",
        reason="workers would send more than their updates to the master, without masks",
        hint="leave it out",
        applies=lambda c: c.secure and bool(c.shared),
    ),
    Contradiction(
        trainers="workers",
        settings="secure_aggregation with optimizer_state={states!r} of an optimizer with momenta",
        reason="momenta are sums of gradients, and the master gets them without masks, for checkpoints at least",
        hint="set optimizer_state = 'fresh', or compile the model with SGD without momentum",
        applies=lambda c: c.secure and bool(c.states),
    ),
    Contradiction(
        trainers="workers",
        settings="secure_aggregation with worker_callbacks",
        reason="their attributes come to the master without masks",
        hint="use callbacks, which the master calls, or leave them out",
        applies=lambda c: c.secure and c.callbacks,
    ),
    Contradiction(
        trainers="workers",
        settings="secure_aggregation with converge on the metric {metric!r}",
        reason="metrics of workers have no masks, so they are left out",
        hint="set x_test and y_test in load_test_dataset, and let converge look at test_loss or test_accuracy",
        applies=lambda c: c.secure and bool(c.metric),
    ),
)
"""All contradictions. The first one that applies is refused."""


def contradiction_of(choice: Choice) -> Contradiction | None:
    """Return the first contradiction of a choice; None if it has none."""
    return next((row for row in TABLE if row.trainers == choice.trainers and row.applies(choice)), None)


def sentence(row: Contradiction, choice: Choice) -> str:
    """Return the text of a refusal: the settings, and the reason."""
    values = {name: getattr(choice, name) for name in choice.__slots__}
    return f"{row.settings.format(**values)} cannot work: {row.reason}"


def check(choice: Choice) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: Has the row's sentence and hint.
    """
    if (row := contradiction_of(choice)) is not None:
        raise ConfigError(sentence(row, choice), hint=row.hint)


def page_rows(trainers: Trainers) -> list[str]:
    """Return a sentence with its advice for each row about these trainers, as Markdown."""
    named = {
        "merge": "median",
        "update_policy": "reject",
        "codec": "bfloat16",
        "way": "async",
        "metric": "loss",
        "states": "kept",
        "outward": "delta:int8",
    }
    choice = Choice(trainers=trainers, shared=("local_rule='scaffold'",), **named)  # type: ignore[arg-type]  # texts only
    values = {name: getattr(choice, name) for name in choice.__slots__}
    rows = [row for row in TABLE if row.trainers == trainers]
    return [f"- **{row.settings.format(**values)}**: {row.reason}. To do: {row.hint}." for row in rows]
