"""The weight ledger of swaps: peers exchange sets when they like, and nobody waits. Pure.

| a post arrives | answer | what happens |
|---|---|---|
| the poster is alone, or the only waiting set is its own | continue | its set waits; its earlier sets are contained in it |
| another peer's set waits | merge that set | its set waits; the other set is outstanding with the poster until its next post |
| the poster has missed a set that it was given | the same set again | its set waits |
| a validation is due | validate yours | its set waits |
| its first post after a merge-all | replace your weights by the merged set | its set waits |

If several sets wait, because a peer has gone or got another answer, the server merges them by their trainings. Posts
continue meanwhile: a post that finds no waiting set of another peer gets "continue".

Source:
    Goin, Cotton, Zhao 2018, WebNN. There, posts that trigger a validation, and first posts after a merge-all, are
    dropped, and a merge-all takes means in turn, so that the last set counts half.
"""

from __future__ import annotations

from ddlf.algorithms.set_merge import SET_MERGE
from ddlf.peers.entries import NO_SET, Merged, Posted
from ddlf.peers.ledger import Instruction, LedgerSet, Mean, Member, WeightLedger
from ddlf.peers.plan import Plan


class SwapLedger(WeightLedger):
    """A weight ledger whose peers swap sets.

    Attributes:
        merging_all: Whether the mean that the server computes now becomes the next base.
        all_asked: Whether a merge-all waits until the server has computed another mean.
        owed: Peers that have not got the newest base yet.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._rule = SET_MERGE.read(plan.merge)
        self.merging_all = False
        self.all_asked = False
        self.owed: list[int] = []

    def start(self) -> int:
        """Return the set that an arriving peer begins with, and that the server tests.

        It is the newest waiting set. While the server merges all of them, none waits: it is the newest of these then,
        because the base can be untrained. It is the base if there are no other sets.
        """
        candidates = self._numbers_in("waiting") or self._numbers_in("merging") or self._numbers_in("outstanding")
        return candidates[-1] if candidates else self.base

    def all_sets(self) -> list[int]:
        numbers = sorted([*self._numbers_in("waiting"), *self._numbers_in("outstanding"), *self._numbers_in("merging")])
        if not numbers or all(self.sets[number].base < self.base for number in numbers):  # nobody has posted since
            return [self.base, *numbers]
        return numbers

    def _on_posted(self, entry: Posted, member: Member) -> list[Instruction]:
        peer = entry.peer
        instructions: list[Instruction] = []
        handed = member.handed
        if handed != NO_SET and entry.contains == handed:
            if member.how == "merge":
                member.trainings = self._rule.trainings(member.trainings, self.sets[handed].trainings)
                member.base = max(member.base, self.sets[handed].base)
                instructions.append(self._end_of(handed, "contained", entry.set))
            member.handed = handed = NO_SET
        # A post counts once, whatever the peer says about its updates.
        member.trainings += entry.updates > 0
        # The peer's live weights, and so this set, contain its earlier sets.
        earlier = [number for number in self._numbers_in("waiting") if self.sets[number].peer == peer]
        instructions += [self._end_of(number, "contained", entry.set) for number in earlier]
        waiting = self._numbers_in("waiting")
        ledger_set = LedgerSet(
            state="waiting",
            peer=peer,
            trainings=member.trainings,
            accuracy=entry.accuracy,
            samples=member.samples,
            base=member.base,
            length=entry.length,
            share=entry.share,
        )
        self._take(entry.set, ledger_set)
        if handed != NO_SET:
            if member.how != "merge":  # the peer will replace its weights, so they will not contain this set
                ledger_set.peer, ledger_set.base = 0, NO_SET
            return [*instructions, self._reply(peer, "merge" if member.how == "merge" else "replace", handed)]
        if peer in self.owed:
            self.owed.remove(peer)
            ledger_set.peer = 0
            return [*instructions, self._give_base(peer, "replace")]
        if self._asks_for_validation(peer, entry.at):
            return [*instructions, self._reply(peer, "validate", entry.set)]
        if waiting:
            chosen = waiting[0]
            self._move(chosen, "outstanding", peer)
            member.handed, member.how = chosen, "merge"
            return [*instructions, self._reply(peer, "merge", chosen)]
        return [*instructions, self._reply(peer, "continue")]

    def _on_left(self, peer: int) -> list[Instruction]:
        member = self.members[peer]
        if member.handed != NO_SET and member.how == "merge":
            self._move(member.handed, "waiting", 0)
        elif member.handed == self.base:  # its weights lack the base, until it comes back for the answer
            return []
        member.handed = NO_SET
        return []

    def _on_lost(self, peer: int) -> list[Instruction]:
        self._on_left(peer)
        self.members[peer].handed = NO_SET
        for ledger_set in self.sets.values():
            if ledger_set.peer == peer:
                ledger_set.peer = 0
        return []

    def _on_merge_asked(self) -> list[Instruction]:
        self.all_asked = True
        return []

    def _next_instructions(self) -> list[Instruction]:
        """Merge all sets if somebody has asked, or the waiting sets if there are several. One mean at a time."""
        if self._numbers_in("merging"):
            return []
        waiting = self._numbers_in("waiting")
        if self.all_asked:
            self.all_asked = False
            of = self.all_sets()
            if of == [self.base]:
                return []
            self.merging_all = True
            for member in self.members.values():
                if member.how == "merge":
                    member.handed = NO_SET
        elif len(waiting) > 1:
            of = waiting
        else:
            return []
        for number in of:
            self._move(number, "merging", 0)
        return [Mean(of=tuple(of), base=self._base_of_mean)]

    def _on_merged(self, entry: Merged) -> list[Instruction]:
        parts = [self.sets[number] for number in entry.of if number not in entry.left_out]
        trainings = max(part.trainings for part in parts)
        base = entry.set if self.merging_all else max(part.base for part in parts)
        self._take(
            entry.set, LedgerSet(state="base" if self.merging_all else "waiting", trainings=trainings, base=base)
        )
        instructions = self._ends_of(entry)
        if self.merging_all:
            self.merging_all = False
            if self.base in self.sets:
                instructions.append(self._end_of(self.base, "contained", entry.set))
            for member in self.members.values():
                if member.handed == self.base:
                    member.handed = NO_SET
            self.base, self.owed = entry.set, self.present
            if self.validated not in self.sets:
                self._validate_as(entry.set)
        return instructions
