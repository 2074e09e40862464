"""All checks of a posted set before its entry is written: its shape, its training, its clipped norm, a trial. Runs on the server.

Small sets are checked on the event loop, large ones and the trial on threads. While a check runs, the ledger and the base may
change: the ledger decides again when it takes the entry. A post that comes again by a new connection may be in two checks at
once, and the ledger takes it once. Nothing here changes the ledger or the sets.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from statistics import fmean

from ddlf.peers.checks import Finding, SetCheck
from ddlf.peers.frames import Post
from ddlf.peers.journal_writer import INLINE_BYTES
from ddlf.peers.kept_sets import KeptSets
from ddlf.peers.ledger import WeightLedger
from ddlf.peers.merging import too_long
from ddlf.peers.served_model import Model
from ddlf.peers.server_validation import Validator
from ddlf.peers.sketches import Sketch, is_finite
from ddlf.peers.wire import Wire


class PostChecks:
    """Judges posts.

    Args:
        ledger: The ledger, with the last validations. It is only read.
        model: The model.
        wire: Reads sets.
        sets: The sets, with the base that a peer has received.
        check: Knows which trainings are usual.
        validator: Tests weights on the server's test data; None without such data.
    """

    def __init__(
        self,
        ledger: WeightLedger,
        model: Model,
        wire: Wire,
        sets: KeptSets,
        check: SetCheck,
        validator: Validator | None,
    ) -> None:
        self._ledger, self._model, self._wire = ledger, model, wire
        self._sets, self._check, self._validator = sets, check, validator

    async def judge(self, peer: int, post: Post) -> tuple[Finding, Sketch]:
        """Return what the checks have found, and the sketch of the set. The set has the right length (``Wire.fault``)."""
        plan, inline = self._ledger.plan, len(post.set) <= INLINE_BYTES
        sketch = self._sets.sketch(post.set) if inline else await asyncio.to_thread(self._sets.sketch, post.set)
        finding = self._check.judge(peer, sketch, post.updates, post.contains, post.base)
        if finding.reason and not is_finite(sketch):
            reason = self._model.layout.not_finite(self._wire.decode(post.set))
            finding = replace(finding, reason=reason or finding.reason)
        if plan.mechanism is not None and not finding.reason:
            reason = self._beyond_clip(post) if inline else await asyncio.to_thread(self._beyond_clip, post)
            finding = replace(finding, reason=reason, strike="yes" if reason else "no")
        if plan.trial and not finding.reason:
            finding = replace(finding, reason=await self._trial_problem(post.set))
        return finding, sketch

    def _beyond_clip(self, post: Post) -> str:
        """Return why a set cannot come from a peer that clips its update; empty if it can."""
        received, mechanism = self._sets.travelling.get(post.base), self._ledger.plan.mechanism
        if received is None or mechanism is None:
            return ""
        return too_long(mechanism, self._wire.decode(received), self._wire.decode(post.set), self._model.trainable)

    async def _trial_problem(self, data: bytes) -> str:
        """Test a set on the server's data, and return why it is rejected; empty if it is not."""
        accuracies = [validation.accuracy for validation in self._ledger.validations]
        if self._validator is None or not accuracies:
            return ""
        weights = await asyncio.to_thread(self._wire.decode, data)
        accuracy, _, _ = await asyncio.to_thread(self._validator, weights)
        usual = fmean(accuracies)
        if accuracy >= usual - self._ledger.plan.trial:
            return ""
        return f"its accuracy on the server's data is {accuracy:.4f}, and that of the last validations {usual:.4f}"
