"""The parts of a slot's state: ``SlotPart``, and each part. ``PARTS`` lists them.

A different worker may carry each round of a slot. So a slot keeps everything that one round passes to the next in
parts. Each part is a list of arrays. A part has two halves. On the worker it begins and ends each round. On the master
it says whether the slots of a run keep it, and where it is between two rounds. Tasks, replies and checkpoints contain
it under the part's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NotRequired, TypedDict

import numpy as np

from ddlf.algorithms.codec import Outward, Payload, codec_named
from ddlf.algorithms.encoding import (
    EncodedUpdate,
    apply_delta,
    decode_update,
    encode_update,
    relative_error,
    without_zeros,
)
from ddlf.algorithms.local_rules import mean_control
from ddlf.algorithms.outer import Streaming, tensors_of, with_values_at
from ddlf.algorithms.weights import Weights, is_float, mean_of
from ddlf.errors import ConfigError, ProtocolError
from ddlf.training.callbacks.states import CallbackStates, check_of_workers
from ddlf.training.context import App
from ddlf.training.registry import MODE, SETTINGS
from ddlf.training.slot.model import TrainableModel
from ddlf.training.slot.task import APART, CALLBACKS, CONTROL, HELD, OPTIMIZER, OWN, RESIDUAL, SlotState, Task
from ddlf.training.spec import RunSpec

Left = list[Any]
"""The arrays that a part leaves for the slot's next round; None for a tensor without a value."""


@dataclass(slots=True)
class SlotRound:
    """One round of a slot (a share of the training, which any worker can do) while a worker trains it.

    Args:
        task: The round to train, with the slot and its samples.
        model: The model that is trained.

    Attributes:
        exact: Whether each tensor must travel exactly.
        weights: Global weights of the round, as the worker received them.
        begun: Weights that local training begins with.
        stopped: Whether local training was ended early.
        tensors: Numbers of the tensors whose updates travel back; None for all.
        encoded: The update as it travels.
        codec_error: Relative L2 error of the update as it travels.
    """

    task: Task
    model: TrainableModel
    exact: list[bool] = field(init=False)
    weights: Weights = field(default_factory=list)
    begun: Weights = field(default_factory=list)
    stopped: bool = False
    tensors: Sequence[int] | None = None
    encoded: EncodedUpdate | None = None
    codec_error: float = 0.0

    def __post_init__(self) -> None:
        self.exact = [flag or i in self.task.apart for i, flag in enumerate(self.model.lossless)]

    @property
    def trains(self) -> bool:
        """Whether the round has steps of local training."""
        return bool(len(self.task.indices)) and self.model.gradient is None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotPlan:
    """Facts about a run. A part of slot state uses them to decide whether the slots keep it.

    Args:
        spec: The spec of the run.
        optimizer: The optimizer of the compiled model, as ``describe_optimizer`` returns it.
        differences: Whether weights travel as differences.
        callbacks: Whether the app has ``worker_callbacks``.
    """

    spec: RunSpec
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    differences: bool = False
    callbacks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Where a part of a slot's state is between two rounds of training, and how the master uses it.

    A part always stays on the worker that left it. If it does not come back, the master fetches it when another worker
    needs it, for a checkpoint, and at the end of the run.

    Args:
        back: Whether it also comes back with each reply.
        copied: Whether another worker keeps a copy if it does not come back, because losing it is expensive.
        large: Whether it is as large as the weights. Then it does not come back if the weights are on the workers.
        mean: Computes the mean of this part over the slots, weighted by samples; receives None for a slot without the
            part. None if slots need no mean.
        shared: Whether each slot begins its next round with that mean instead of its own part.
        part: The class of the part, which ``kept_parts`` sets.
    """

    back: bool = False
    copied: bool = False
    large: bool = False
    mean: Callable[[Sequence[Any], Sequence[int]], Left] | None = None
    shared: bool = False
    part: type[SlotPart] | None = None


class SlotPart:
    """The interface of one part of a slot's state, such as the optimizer's variables.

    A slot is a share of the training, which a different worker may train in each round. So its state moves between
    workers in parts. To add a part, write a subclass, and list it in ``PARTS``.

    Args:
        app: The app on this worker.
        model: Its model.

    Attributes:
        name: Name of the part in tasks, replies and checkpoints.
        travels: Whether it travels between master and workers. False if the master can compute it itself.
        finite: Whether workers refuse arrays that are not finite when they compute the mean of this part, as they do
            in the sharded exchange. Arrays that come back to the master are only checked by ``check``.
        setting: Name of the setting that makes slots keep this part; "" if no setting does. ``kept_with`` has its
            values. They are refused with ``BackupAndRestore``, which stores only weights and optimizer. Strategies and
            exchanges refuse them, too, if their ``slot_parts`` do not name the part.
    """

    name: ClassVar[str]
    travels: ClassVar[bool] = True
    finite: ClassVar[bool] = False
    setting: ClassVar[str] = ""

    def __init__(self, app: App, model: TrainableModel) -> None: ...

    # -- on the worker ------------------------------------------------------------------------------------------------

    def is_needed(self, task: Task, state: SlotState) -> bool:
        """Return whether this part has something to do in a round. Otherwise the round does not call it.

        The answer may depend on the run, and on the names in ``state``, but not on the round.

        Args:
            task: The round to train, with the slot and its samples.
            state: State of the slot that the round begins with.
        """
        return self.name in task.keep or self.name in state

    def begin(self, round: SlotRound, weights: Weights, arrays: Left | None) -> Weights:
        """Let this part prepare a round of training. Parts are called in the order of the list.

        Args:
            round: The round that is trained.
            weights: Weights that local training would begin with.
            arrays: The arrays that this part left after the slot's round before; None in its first round.

        Returns:
            Weights that local training begins with.
        """
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        """Let this part finish a round of training. Parts are called in the reverse order of the list.

        Args:
            round: The round that is trained.
            update: Weights before minus weights after.

        Returns:
            The update that goes to the master, and the arrays that this part leaves for the slot's next round.
        """
        return update, None

    def fit_begins(self) -> Callable[[], None] | None:
        """Let this part prepare a call of ``fit``.

        Return a function that the caller must call after ``on_train_begin`` of all callbacks.
        """

    def epoch_begins(self) -> None:
        """Let this part prepare an epoch, before the epoch's learning rate is set."""

    # -- on the master ------------------------------------------------------------------------------------------------

    @classmethod
    def kept_with(cls, value: Any) -> bool:
        """Return whether a value of ``setting`` makes slots keep this part. By default, all but the default value do.

        Args:
            value: The value in the user's form or in the form that the run uses.
        """
        setting = SETTINGS[cls.setting]
        return bool(setting.check(setting.name, value) != setting.check(setting.name, setting.value))

    @classmethod
    def retention(cls, plan: SlotPlan) -> Kept | None:
        """Return how the slots of a run keep this part between rounds; None if they do not keep it."""
        return None

    @classmethod
    def can_continue(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        """Return whether a training that continues an earlier one can use this part of the slots' states.

        Args:
            before: Settings of the earlier training.
            now: Settings of this one.
            same: Whether both merge by the same rules.
        """
        return True

    @classmethod
    def begins_with(cls, mean: Left, slots: int, like: Weights) -> dict[str, Any]:
        """Return the entries that a task needs to begin with the mean of this part over all slots, by name.

        Args:
            mean: The mean, or the sum over the slots.
            slots: Number of slots in the sum; 0 for a mean.
            like: Arrays with the types of the model's weights.
        """
        return {"shared": {cls.name: mean}}

    @classmethod
    def check(cls, arrays: Left, like: Weights, worker: str) -> None:
        """Check the arrays of this part that came back from a worker.

        Args:
            arrays: The arrays.
            like: Arrays with the shapes and types of the model's weights.
            worker: Name of the worker.

        Raises:
            ProtocolError: The arrays cannot be used.
        """


class OptimizerState(SlotPart):
    """The part with the variables of the model's optimizer, in Keras's order: iterations, learning rate, momenta.

    With ``optimizer_state="averaged"``, all slots begin a round with the mean of the states after the last round.
    """

    name = OPTIMIZER

    def is_needed(self, task: Task, state: SlotState) -> bool:
        """Return True, since even a slot without a state needs this part, which gives it a fresh optimizer."""
        return True

    def begin(self, round: SlotRound, weights: Weights, arrays: Left | None) -> Weights:
        round.model.begin(round.task, arrays)
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        return update, round.model.optimizer_state(round.task) if self.name in round.task.keep else None

    @classmethod
    def retention(cls, plan: SlotPlan) -> Kept | None:
        """Return how the slots of a run keep the optimizer's state between rounds; None if they do not.

        Return None with the gradient exchange, whose optimizer is on the master, and in Downpour, whose replicas have
        another optimizer.
        """
        kind = plan.spec.local.optimizer_state
        if kind == "fresh" or plan.spec.exchange.one_step or not plan.spec.train.keeps_optimizer:
            return None
        averaged = kind == "averaged"
        return Kept(
            back=kind != "stays",
            copied=kind != "stays",
            large=averaged or not keeps_little(plan.optimizer),
            mean=mean_of if averaged else None,
            shared=averaged,
        )

    @classmethod
    def can_continue(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        return bool(now["optimizer_state"] != "fresh" and MODE.kind(now["mode"]).keeps_optimizer)


def keeps_little(optimizer: Mapping[str, Any]) -> bool:
    """Return whether an optimizer's state is only a few numbers, rather than as large as the weights.

    Args:
        optimizer: The optimizer of the compiled model, as ``describe_optimizer`` returns it.
    """
    more = ("momentum", "use_ema", "gradient_accumulation_steps")
    return optimizer.get("optimizer") in ("SGD", None, "NoneType") and not any(
        optimizer.get(f"optimizer {name}") not in (None, False, 0, "None") for name in more
    )


class WorkerCallbacks(SlotPart):
    """The part with the attributes of the slot's ``worker_callbacks``, which move with the slot.

    Raises:
        AppError: ``fit`` cannot call a callback, or an attribute of one cannot move with the slot.
    """

    name = CALLBACKS

    def __init__(self, app: App, model: TrainableModel) -> None:
        check_of_workers(app.worker_callbacks)
        self._states = CallbackStates(app.worker_callbacks).checked()

    def is_needed(self, task: Task, state: SlotState) -> bool:
        return self._states.any or super().is_needed(task, state)

    def begin(self, round: SlotRound, weights: Weights, arrays: Left | None) -> Weights:
        self._states.begin(arrays)
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        return update, self._states.read()

    def fit_begins(self) -> Callable[[], None]:
        return self._states.go_on()

    @classmethod
    def retention(cls, plan: SlotPlan) -> Kept | None:
        return Kept(back=True) if plan.callbacks else None


class ReceivedWeights(SlotPart):
    """The part with the global weights that the slot received for its round.

    The next weights may come as a difference to them. The master knows them, so they never travel.
    """

    name = HELD
    travels = False

    def is_needed(self, task: Task, state: SlotState) -> bool:
        """Return True, since each round must decode the weights that it received."""
        return True

    def begin(self, round: SlotRound, weights: Weights, arrays: Left | None) -> Weights:
        round.weights = read_weights(round.task.weights, arrays, round.model.like)
        return round.weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        return update, round.weights

    @classmethod
    def retention(cls, plan: SlotPlan) -> Kept | None:
        return Kept() if plan.differences else None

    @classmethod
    def can_continue(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        return Outward.read(now["weights_codec"]).delta or str(now["outer"]).startswith("streaming")


class Residual(SlotPart):
    """The part with the residual: the sum of the codec's errors in the slot's updates so far, for each tensor.

    It is added to the next update (error feedback).
    """

    name = RESIDUAL

    def __init__(self, app: App, model: TrainableModel) -> None:
        self._residual: Left | None = None

    def is_needed(self, task: Task, state: SlotState) -> bool:
        """Return True, since each round must encode its update."""
        return True

    def begin(self, round: SlotRound, weights: Weights, arrays: Left | None) -> Weights:
        self._residual = arrays
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        """Encode the update for the network.

        If the codec is exact now and was not before, the old residual is sent in full.
        """
        round.encoded, residual, round.codec_error = send_update(
            round.task.codec, update, round.exact, self._residual, round.tensors
        )
        return update, residual

    @classmethod
    def retention(cls, plan: SlotPlan) -> Kept | None:
        return Kept() if plan.spec.exchange.codec.biased else None


class WeightsMessage(TypedDict):
    """The weights in a message, whole or as a difference. At run time this is a plain dict, so that no array is copied.

    ``delta`` says whether ``encoded`` is the difference to the weights that the slot received last. ``tensors`` has the
    numbers of the encoded tensors of a difference, if these are only some.
    """

    delta: bool
    encoded: EncodedUpdate
    tensors: NotRequired[Sequence[int]]


def read_weights(message: WeightsMessage, previous: Weights | None, like: Weights) -> Weights:
    """Return the weights in a message, which are whole or a difference to the weights that the slot received last.

    Args:
        message: The result of ``StarWeights.encode``.
        previous: The weights that the slot holds here, if any.
        like: The model's weights, for shapes and types.
    """
    if not message["delta"]:
        return decode_update(message["encoded"], like)
    if previous is None:
        raise ConfigError("a difference of weights came before any weights")
    tensors = message.get("tensors")
    if tensors is None:
        return apply_delta(previous, message["encoded"])
    return with_values_at(previous, tensors, apply_delta([previous[i] for i in tensors], message["encoded"]))


def message_of_whole(weights: Weights, *, copy: bool = False) -> WeightsMessage:
    """Return local weights in the form of a message with whole weights, which ``read_weights`` accepts.

    Args:
        weights: The weights.
        copy: Whether to copy them, because the receiver may change them.
    """
    payloads: list[Payload] = [{"raw": w.copy() if copy else w} for w in weights]
    return {"delta": False, "encoded": {"codec": "float32", "payloads": payloads}}


def as_sent(update: Any) -> Any:
    """Return an encoded update without tensors that are all zero, such as frozen ones, which need not travel.

    Return any other value unchanged.
    """
    return without_zeros(update) if isinstance(update, dict) and "payloads" in update else update  # type: ignore[arg-type]


def send_update(
    name: str,
    update: Weights,
    lossless: Sequence[bool],
    residual: Left | None,
    tensors: Sequence[int] | None = None,
) -> tuple[EncodedUpdate, Left, float]:
    """Encode a slot's update for the network, and return what the codec lost.

    Args:
        name: Name of the codec.
        update: One array for each tensor.
        lossless: For each tensor, whether it must arrive exactly.
        residual: The codec's residual of the slot's earlier updates, which is added.
        tensors: Numbers of the tensors that travel; None for all. The residuals of the others stay.

    Returns:
        The encoded update; the new residual; and the relative error: the L2 norm of the difference to the update,
        divided by the update's.
    """
    chosen = range(len(update)) if tensors is None else tensors
    sent = [update[i] for i in chosen]
    # A residual has one or more groups of arrays, each with an array for each tensor: the error, and for some codecs a
    # start value.
    groups = len(residual or ()) // max(len(update), 1)
    owed = [residual[group * len(update) + i] for group in range(groups) for i in chosen] if residual else None
    encoded, lost = encode_update(codec_named(name), sent, [lossless[i] for i in chosen], owed)
    error = 0.0 if name == "float32" else relative_error(sent, decode_update(encoded, sent))
    if tensors is None:
        return encoded, lost, error
    groups = len(lost) // max(len(tensors), 1)  # a codec that has changed may keep another number of groups
    new_residual: Left = list(residual or ())[: groups * len(update)]
    new_residual += [None] * (groups * len(update) - len(new_residual))
    return (
        encoded,
        with_values_at(new_residual, [group * len(update) + i for group in range(groups) for i in tensors], lost),
        error,
    )


def changed_tensors(task: Task, since: int, like: Weights, lossless: Sequence[bool]) -> list[int]:
    """Return the numbers of the tensors whose global values have changed since an earlier round.

    Args:
        task: A task that exchanges fragments.
        since: Number of the round, from 0.
        like: Arrays with the shapes of the model's weights.
        lossless: For each tensor, whether it is untrained. Untrained tensors travel with every fragment.
    """
    parts = [part for part, number in enumerate(task.merged) if number >= since]
    return tensors_of(parts, like, [not exact for exact in lossless], len(task.merged))


def exchanged_tensors(task: Task, like: Weights, lossless: Sequence[bool]) -> list[int] | None:
    """Return the numbers of the tensors whose updates come back to the master; None for all."""
    if not task.merged:
        return None
    return tensors_of(task.wanted, like, [not exact for exact in lossless], len(task.merged))


class OwnFragments(SlotPart):
    """The part for streaming: the slot's own weights, and the number of the round that left them.

    A round exchanges one fragment of the weights; ``ddlf.algorithms.outer`` has the rule. A task has the last round
    that merged each fragment, and the fragments that come back from its round. From this, master and workers compute
    the tensors that travel.
    """

    name = OWN
    setting = "outer"

    def begin(self, round: SlotRound, weights: Weights, arrays: Left | None) -> Weights:
        """Begin with the slot's own weights.

        Fragments (parts of the weights) that were merged since its last round are mixed with their global values.

        Untrained weights have the global values.
        """
        task, exact = round.task, round.exact
        if not task.merged or not arrays:
            return weights
        *values, number = arrays
        fresh, begun = set(changed_tensors(task, int(number), weights, exact)), []
        for i, (value, w) in enumerate(zip(values, weights, strict=True)):
            if i in fresh and task.alpha and not exact[i]:
                value = np.asarray(task.alpha * value + (1 - task.alpha) * w, w.dtype)
            begun.append(w if i in fresh and (not task.alpha or exact[i]) else value)
        return begun

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        """Return the slot's update: the global weights minus the slot's own."""
        task, weights, begun = round.task, round.weights, round.begun
        if not task.merged:
            return update, []
        round.tensors = exchanged_tensors(task, weights, round.exact)
        floats = [is_float(w) for w in weights]
        # This difference is exactly zero if the slot began with the global values, so the update then stays unchanged.
        behind = [
            np.asarray(u + (w - b), w.dtype) if f else u
            for w, b, u, f in zip(weights, begun, update, floats, strict=True)
        ]
        own_weights = [np.asarray(b - u, b.dtype) if f else b for b, u, f in zip(begun, update, floats, strict=True)]
        return behind, [*own_weights, np.asarray(task.round)]

    @classmethod
    def kept_with(cls, value: Any) -> bool:
        return str(value).startswith("streaming")

    @classmethod
    def retention(cls, plan: SlotPlan) -> Kept | None:
        return Kept() if isinstance(plan.spec.outer, Streaming) else None

    @classmethod
    def can_continue(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        return same


class LocalBatchNorm(SlotPart):
    """The part with the slot's own batch normalization weights (``batchnorm="local"``); None for each other weight.

    A slot begins its round with its own values from its last round. Its update is the global values minus its own
    values after the round. So the mean of the updates makes the global values the mean of the slots' values. The global
    values are evaluated and saved.
    """

    name = APART
    setting = "batchnorm"

    def begin(self, round: SlotRound, weights: Weights, arrays: Left | None) -> Weights:
        return [
            w if own_weight is None else own_weight
            for w, own_weight in zip(weights, arrays or [None] * len(weights), strict=True)
        ]

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        arrays = [
            np.asarray(b - u, b.dtype) if i in round.task.apart else None
            for i, (b, u) in enumerate(zip(round.begun, update, strict=True))
        ]
        sent = [
            u if own_weight is None else np.asarray(w - own_weight, w.dtype)
            for w, u, own_weight in zip(round.weights, update, arrays, strict=True)
        ]
        return sent, arrays

    @classmethod
    def kept_with(cls, value: Any) -> bool:
        return bool(value == "local")

    @classmethod
    def retention(cls, plan: SlotPlan) -> Kept | None:
        return Kept(back=True) if plan.spec.batchnorm == "local" else None

    @classmethod
    def can_continue(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        return bool(now["batchnorm"] == "local")


class Controls(SlotPart):
    """The part with the slot's control variate: an estimate of its gradients, which corrects its steps.

    It is None for untrained weights.

    ``ddlf.algorithms.local_rules`` has the formulas. A task has the mean of all slots' control variates
    (``Task.control``).
    """

    name = CONTROL
    finite = True
    setting = "local_rule"

    def __init__(self, app: App, model: TrainableModel) -> None:
        self._rule = model.rule
        self._control: Left | None = None

    def is_needed(self, task: Task, state: SlotState) -> bool:
        """Return whether the run has a local rule, since this part also applies rules without control variates."""
        return task.local != "plain" or super().is_needed(task, state)

    def begin(self, round: SlotRound, weights: Weights, arrays: Left | None) -> Weights:
        self._control = arrays
        if round.trains:
            self._rule.begin(round.task.local, weights, arrays, round.task.control)
        return weights

    def end(self, round: SlotRound, update: Weights) -> tuple[Weights, Left | None]:
        """Compute the slot's new control variate (estimate of its gradients).

        A round that was ended early keeps the old one, since it may have made no step.
        """
        if round.trains and not round.stopped:
            self._control = self._rule.new_control(update)
        return update, self._control or [None] * len(update)

    def epoch_begins(self) -> None:
        self._rule.count_steps()

    @classmethod
    def kept_with(cls, value: Any) -> bool:
        return str(value).startswith("scaffold")

    @classmethod
    def retention(cls, plan: SlotPlan) -> Kept | None:
        if not plan.spec.local.rule.steers:
            return None
        return Kept(back=True, copied=True, large=True, mean=_mean)

    @classmethod
    def can_continue(cls, before: Mapping[str, Any], now: Mapping[str, Any], same: bool) -> bool:
        return bool(before.get("local_rule") == now["local_rule"])

    @classmethod
    def begins_with(cls, mean: Left, slots: int, like: Weights) -> dict[str, Any]:
        of_slots = zip(mean, like, strict=True)
        return {
            "control": [
                np.asarray(control / slots, w.dtype) if slots and control is not None else control
                for control, w in of_slots
            ]
        }

    @classmethod
    def check(cls, arrays: Left, like: Weights, worker: str) -> None:
        pairs = [(array, weight) for array, weight in zip(arrays, like, strict=False) if array is not None]
        fits = (
            isinstance(array, np.ndarray) and (array.shape, array.dtype) == (weight.shape, weight.dtype)
            for array, weight in pairs
        )
        if len(arrays) != len(like) or not all(fits) or not all(np.isfinite(array).all() for array, _ in pairs):
            raise ProtocolError("left a control that does not fit the model, or is not finite", worker=worker)


def _mean(controls: Sequence[Left | None], samples: Sequence[int]) -> Left:
    return mean_control(controls) or []


PARTS: tuple[type[SlotPart], ...] = (
    OptimizerState,
    WorkerCallbacks,
    Residual,
    ReceivedWeights,
    OwnFragments,
    LocalBatchNorm,
    Controls,
)
"""The parts, in the order in which they begin a round. They end it in reverse order.

- ``ReceivedWeights`` decodes the global weights. Only later parts get these from ``begin``.
- ``OwnFragments`` and ``LocalBatchNorm`` replace weights by the slot's own values. When the round ends, they turn the
  update of local training into the difference to the global weights.
- ``Controls`` needs the weights that local training begins with, and the update of local training itself. So it is
  last: it begins after all other parts, and ends before them.
- ``Residual`` encodes the update. It is before all parts that change the update, so it ends after them.

Insert a part that changes weights or updates between ``ReceivedWeights`` and ``Controls``. The place of a part that
changes neither has no effect.
"""


def parts_named(names: Collection[str] | None) -> tuple[type[SlotPart], ...]:
    """Return the parts with these names, in the order of ``PARTS``; None returns all parts."""
    return tuple(part for part in PARTS if names is None or part.name in names)


def kept_parts(plan: SlotPlan) -> dict[str, Kept]:
    """Return how the slots of a run keep each part of their state between rounds, by the part's name."""
    parts = ((part, part.retention(plan)) for part in PARTS if plan.spec.uses(part.name))
    return {part.name: replace(retention, part=part) for part, retention in parts if retention is not None}
