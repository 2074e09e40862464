"""Judges the updates and the new weights of a run, by its update policy. Runs on the master.

With the update policy ``"stop"``, each update is checked when it arrives, and an unusable one ends the run. The other
policies compare all updates of a round (``ddlf.algorithms.update_check``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ddlf.algorithms.update_check import Verdict, judge, scaled
from ddlf.algorithms.weights import Fault, Weights, fault
from ddlf.errors import BadUpdate
from ddlf.events import UpdateClipped
from ddlf.training.crew.crew import Crew
from ddlf.training.progress import WeightsRef
from ddlf.training.slot.task import Reply


class UpdateJudge:
    """Judges the updates of one run.

    Args:
        policy: The update policy.
        names: Paths of the weights.
        trainable: For each weight, whether it is trained.
        crew: The workers of the run, which it trusts or distrusts.
        weights: Returns the global weights.
        note: Receives a sentence about each suspicious update, for the record of the round.

    Attributes:
        policy: The argument of this name.
    """

    def __init__(
        self,
        policy: str,
        names: Sequence[str],
        trainable: Sequence[bool],
        crew: Crew,
        weights: Callable[[], Weights],
        note: Callable[[str], None],
    ) -> None:
        self.policy = policy
        self._names, self._trainable, self._crew, self._weights, self._note = names, trainable, crew, weights, note

    def check(self, reply: Reply) -> None:
        """Raise an error if an update is unusable by itself, whatever the other updates are.

        Raises:
            BadUpdate: Names the worker, the tensor and the number of wrong values.
        """
        problem = reply.update if stays(reply) else fault(reply.update, reply.samples, self._weights(), self._names)
        if problem is not None:
            raise problem.error(reply.slot + 1, f"worker {reply.worker}")

    def compare(self, replies: Mapping[int, Reply]) -> dict[int, Verdict]:
        """Return whether each of these slots' updates is usable, by slot. Messages number slots from 1."""
        verdicts = judge(
            {slot + 1: (reply.update, reply.weight) for slot, reply in replies.items()},
            self._weights(),
            self.policy,
            names=self._names,
            trainable=self._trainable,
        )
        return {number - 1: verdict for number, verdict in verdicts.items()}

    def judge_arrival(self, reply: Reply, latest: Mapping[int, Reply], *, singly: bool) -> Reply | None:
        """Judge an update of asynchronous training.

        Args:
            reply: The reply with the update.
            latest: The last accepted reply of each slot, to compare it with.
            singly: Whether updates cannot be compared, so that the update is only checked by itself.

        Returns:
            The reply, with its update scaled if it was too long; None if the update is rejected.

        Raises:
            BadUpdate: The update is unusable, and is judged by itself.
        """
        if singly or self.policy == "stop":
            self.check(reply)
            return reply
        verdict = self.compare({**latest, reply.slot: reply})[reply.slot]
        if verdict.action == "reject":
            self._crew.distrust(reply.slot, reply.worker, str(verdict))
            return None
        self._crew.trust(reply.worker)
        if verdict.action == "clip":
            self._note(str(verdict))
            self.report_clipped(reply, verdict)
        return as_merged(reply, verdict)

    def report_clipped(self, reply: Reply, verdict: Verdict) -> None:
        """Emit the event that says that an update was too long and was scaled down."""
        self._crew.emit(
            UpdateClipped(
                round=reply.task.round + 1,
                slot=reply.slot + 1,
                worker=reply.worker,
                factor=verdict.factor,
                why=str(verdict),
            )
        )

    def check_weights(self, weights: Weights | WeightsRef, number: int) -> None:
        """Raise an error if new global weights contain NaN or infinity after a round, numbered from 0.

        The updates were usable, so the merge rule or outer optimizer went too far. Weights on the workers were checked
        there.

        Raises:
            BadUpdate: Names the round, the tensor and the number of wrong values.
        """
        if not isinstance(weights, WeightsRef) and (problem := fault(weights, 1, weights, self._names)) is not None:
            raise unusable_weights(problem, number)


def stays(reply: Reply) -> bool:
    """Return whether an update stays on its worker. Then the worker has checked it and reported any fault."""
    return reply.update is None or isinstance(reply.update, Fault)


def as_merged(reply: Reply, verdict: Verdict) -> Reply:
    """Return a reply in the form that is merged: its update is scaled if it was too long and is on the master."""
    if verdict.factor == 1 or stays(reply):
        return reply
    return dataclasses.replace(reply, update=scaled(reply.update, verdict.factor))


def unusable_weights(fault: Fault, number: int) -> BadUpdate:
    """Return the error for unusable weights after a round, numbered from 0."""
    return BadUpdate(
        f"the weights after round {number + 1} cannot be used: {fault.reason}, and no update was",
        hint="lower the learning rate of the rule that applies updates: that of outer, or of the model's optimizer",
        tensor=fault.tensor,
        count=fault.count,
    )
