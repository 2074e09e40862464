"""The weight ledger of rounds with secure aggregation: it knows bases only, since nobody can use a masked post alone. Pure.

``SecureRounds`` gathers the masked posts of a round in memory. The journal gets one entry for a finished round, with the
next base. So a server that was killed knows the last base and the posts in it. The open round is void, and its peers post again.
"""

from __future__ import annotations

from ddlf.peers.entries import Summed
from ddlf.peers.ledger import Instruction, LedgerSet, Unfit
from ddlf.peers.rounds import RoundLedger


class SecureLedger(RoundLedger):
    """A weight ledger whose rounds are secure sums."""

    def _admit_summed(self, entry: Summed) -> None:
        for peer, number in zip(entry.peers, entry.numbers, strict=True):
            if peer not in self.members or number <= self.members[peer].number:
                raise Unfit(f"post {number} of peer {peer} does not fit into a sum")

    def _on_summed(self, entry: Summed) -> list[Instruction]:
        for peer, number, updates in zip(entry.peers, entry.numbers, entry.updates, strict=True):
            self._count("posts")
            self._count("merged")
            self.members[peer].count_post(number, updates, entry.at)
        trainings = self.sets[self.base].trainings + 1
        self._take(entry.set, LedgerSet(state="base", trainings=trainings, base=entry.set))
        instructions: list[Instruction] = [self._end_of(self.base, "contained", entry.set)]
        self.base, self.round = entry.set, self.round + 1
        return [
            *instructions,
            *(self._give_base(peer, "replace") for peer in entry.peers if self.members[peer].present),
        ]
