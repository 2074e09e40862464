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
from ddlf.peers.ledger import Held, Instruction, Mean, Member, WeightLedger
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
        found = self._in("waiting") or self._in("merging") or self._in("outstanding")
        return found[-1] if found else self.base

    def all_sets(self) -> list[int]:
        found = sorted([*self._in("waiting"), *self._in("outstanding"), *self._in("merging")])
        if not found or all(self.sets[number].base < self.base for number in found):  # nobody has posted since
            return [self.base, *found]
        return found

    def _posted(self, entry: Posted, member: Member) -> list[Instruction]:
        peer = entry.peer
        made: list[Instruction] = []
        given = member.handed
        if given != NO_SET and entry.contains == given:
            if member.how == "merge":
                member.trainings = self._rule.trainings(member.trainings, self.sets[given].trainings)
                member.base = max(member.base, self.sets[given].base)
                made.append(self._end_of(given, "contained", entry.set))
            member.handed = given = NO_SET
        # A post counts once, whatever the peer says about its updates.
        member.trainings += entry.updates > 0
        # The peer's live weights, and so this set, contain its earlier sets.
        own = [number for number in self._in("waiting") if self.sets[number].peer == peer]
        made += [self._end_of(number, "contained", entry.set) for number in own]
        others = self._in("waiting")
        mine = Held(
            state="waiting",
            peer=peer,
            trainings=member.trainings,
            accuracy=entry.accuracy,
            samples=member.samples,
            base=member.base,
            length=entry.length,
            share=entry.share,
        )
        self._take(entry.set, mine)
        if given != NO_SET:
            if member.how != "merge":  # the peer will replace its weights, so they will not contain this set
                mine.peer, mine.base = 0, NO_SET
            return [*made, self._reply(peer, "merge" if member.how == "merge" else "replace", given)]
        if peer in self.owed:
            self.owed.remove(peer)
            mine.peer = 0
            return [*made, self._give_base(peer, "replace")]
        if self._asks_for_validation(peer, entry.at):
            return [*made, self._reply(peer, "validate", entry.set)]
        if others:
            other = others[0]
            self._move(other, "outstanding", peer)
            member.handed, member.how = other, "merge"
            return [*made, self._reply(peer, "merge", other)]
        return [*made, self._reply(peer, "continue")]

    def _left(self, peer: int) -> list[Instruction]:
        member = self.members[peer]
        if member.handed != NO_SET and member.how == "merge":
            self._move(member.handed, "waiting", 0)
        elif member.handed == self.base:  # its weights lack the base, until it comes back for the answer
            return []
        member.handed = NO_SET
        return []

    def _lost(self, peer: int) -> list[Instruction]:
        self._left(peer)
        self.members[peer].handed = NO_SET
        for held in self.sets.values():
            if held.peer == peer:
                held.peer = 0
        return []

    def _merge_asked(self) -> list[Instruction]:
        self.all_asked = True
        return []

    def _further(self) -> list[Instruction]:
        """Merge all sets if somebody has asked, or the waiting sets if there are several. One mean at a time."""
        if self._in("merging"):
            return []
        waiting = self._in("waiting")
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

    def _merged(self, entry: Merged) -> list[Instruction]:
        parts = [self.sets[number] for number in entry.of if number not in entry.left_out]
        trainings = max(part.trainings for part in parts)
        base = entry.set if self.merging_all else max(part.base for part in parts)
        self._take(entry.set, Held(state="base" if self.merging_all else "waiting", trainings=trainings, base=base))
        made = self._ends_of(entry)
        if self.merging_all:
            self.merging_all = False
            if self.base in self.sets:
                made.append(self._end_of(self.base, "contained", entry.set))
            for member in self.members.values():
                if member.handed == self.base:
                    member.handed = NO_SET
            self.base, self.owed = entry.set, self.present
            if self.validated not in self.sets:
                self._validate_as(entry.set)
        return made
