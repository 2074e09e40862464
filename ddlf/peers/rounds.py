"""The weight ledger of rounds: the posts of a round become the next base. Pure.

A round begins with a base, which all peers train. It closes when all present peers have posted, or at its deadline if
enough have. It does not wait for a peer whose post was rejected. The server merges the updates, weighted by samples.
Each peer that has posted gets the new base then. A peer that is gone delays no round, and its post counts. If peers add
the noise, a round never closes with fewer posts than its quorum, not even at the end: its release would have too little
noise. A post that began with an earlier base is rejected: its round is over, and the peer begins again with the base of
the current round.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddlf.peers.entries import NO_SET, Closed, Entry, Merged, Posted
from ddlf.peers.ledger import Answer, Fate, Instruction, LedgerSet, Mean, Member, Reply, WeightLedger
from ddlf.peers.plan import Plan


class RoundLedger(WeightLedger):
    """A weight ledger whose peers work in rounds.

    Attributes:
        round: Number of the round, from 1.
        began_at: Time of its first post; 0 before.
        closed: Whether the round has closed at its deadline.
        refused: Peers whose post of this round was rejected. The round does not wait for another one.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.round = 1
        self.began_at = 0.0
        self.closed = False
        self.refused: list[int] = []

    def due_entries(self, now: float, last_signs: Mapping[int, float]) -> list[Entry]:
        entries = super().due_entries(now, last_signs)
        waiting = self._numbers_in("waiting")
        is_late = waiting and now - self.began_at >= self.plan.deadline_s
        if not self.ended and is_late and not self.closed and len(waiting) >= self.plan.quorum:
            entries.append(Closed(at=now, base=self.base))
        return entries

    @property
    def posts(self) -> int:
        """Number of posts of the open round."""
        return len(self._states["waiting"])

    @property
    def missing_posts(self) -> int:
        posted = {self.sets[number].peer for number in self._numbers_in("waiting")}
        expected = set(self.present) - set(self.refused)
        return max(0, self.plan.quorum - self.posts) if posted and posted >= expected else 0

    @property
    def _base_of_mean(self) -> int:
        return self.base

    def repeat(self, peer: int) -> Reply | None:
        """Return the answer to the peer's last post once more; None while its round is open.

        It is the newest base, even if the peer was gone when its round closed: with an older one its next post would be
        rejected.
        """
        is_open = any(ledger_set.peer == peer and ledger_set.state != "base" for ledger_set in self.sets.values())
        return None if is_open else self._reply(peer, "replace", self.base)

    def _begin_again(self, peer: int, answer: Answer, reason: str) -> Reply:
        return self._give_base(peer, answer, reason)

    def _on_posted(self, entry: Posted, member: Member) -> list[Instruction]:
        peer = entry.peer
        member.handed = NO_SET
        if entry.base != self.base or self._numbers_in("merging"):
            # The set has no place in any round: it never enters the ledger.
            self.next_set = entry.set + 1
            self._count("late")
            fate = Fate(set=entry.set, state="rejected")
            return [fate, self._begin_again(peer, "rejected", "its round is over")]
        member.trainings += entry.updates > 0
        earlier = [number for number in self._numbers_in("waiting") if self.sets[number].peer == peer]
        instructions: list[Instruction] = [
            self._end_of(number, "contained" if self.sets[number].base == self.base else "rejected", entry.set)
            for number in earlier
        ]
        ledger_set = LedgerSet(
            state="waiting",
            peer=peer,
            trainings=member.trainings,
            accuracy=entry.accuracy,
            samples=member.samples,
            base=self.base,
            length=entry.length,
            share=entry.share,
        )
        self._take(entry.set, ledger_set)
        self.began_at = self.began_at or entry.at
        return instructions

    def _on_left(self, peer: int) -> list[Instruction]:
        self.members[peer].handed = NO_SET
        return []

    def _on_lost(self, peer: int) -> list[Instruction]:
        for number in self._numbers_in("waiting"):
            if self.sets[number].peer == peer:  # it counts in its round unless the peer posts another one
                self.sets[number].base = NO_SET
        return self._on_left(peer)

    def _on_merge_asked(self) -> list[Instruction]:
        self.closed = len(self._numbers_in("waiting")) >= self.plan.least_posts
        return []

    def _on_refused(self, peer: int) -> list[Instruction]:
        self.refused = sorted({*self.refused, peer})
        return []

    def _on_closed(self, entry: Closed) -> list[Instruction]:
        self.closed = entry.base == self.base and len(self._numbers_in("waiting")) >= self.plan.least_posts
        return []

    def _next_instructions(self) -> list[Instruction]:
        """Merge the posts of the round if it is complete."""
        waiting = self._numbers_in("waiting")
        if self._numbers_in("merging") or not waiting:
            return []
        posted = {self.sets[number].peer for number in waiting}
        complete = posted >= set(self.present) - set(self.refused) and len(waiting) >= self.plan.quorum
        if not (complete or self.closed):
            return []
        for number in waiting:
            self._move(number, "merging", self.sets[number].peer)
        return [Mean(of=tuple(waiting), base=self.base)]

    def _on_merged(self, entry: Merged) -> list[Instruction]:
        posted = [self.sets[number].peer for number in entry.of]
        trainings = max(self.sets[number].trainings for number in entry.of)
        self._take(entry.set, LedgerSet(state="base", trainings=trainings, base=entry.set))
        instructions = self._ends_of(entry)
        instructions.append(self._end_of(self.base, "contained", entry.set))
        self.base, self.round, self.began_at, self.closed = entry.set, self.round + 1, 0.0, False
        self.refused = [peer for peer in self.present if self.members[peer].out_until > entry.at]
        present = [peer for peer in posted if self.members[peer].present and not self.ended]
        return [*instructions, *(self._give_base(peer, "replace") for peer in present)]
