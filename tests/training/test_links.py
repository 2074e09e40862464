"""Links between workers that are lost while the master sees both: what goes around them, and who is left out. No process, no Keras."""

import asyncio

import pytest

from ddlf.errors import ConnectError, WorkerLost
from ddlf.training.exchanges.sharded.plan import Unreached
from ddlf.training.links import Links
from ddlf.training.roles.around import Around


class Worker:
    """Takes the ways that it is told."""

    def __init__(self, number):
        self.id, self.name, self.ways, self.answers = number, f"worker {number}", {}, True

    async def call(self, role, verb, ways):
        assert verb == "go_around"
        self.ways = dict(ways)

    async def status(self):
        if not self.answers:
            raise WorkerLost("gone", worker=self.name)
        return {}


class Crew:
    """Keeps what it is told, and leaves out whom it is to."""

    def __init__(self, count):
        self.there = {number: Worker(number) for number in range(1, count + 1)}
        self.told, self.out, self.ended = [], [], []
        self.links = Links(("run", "replica"), self, lambda: self.there)

    def put_out(self, worker, error):
        self.out.append((worker.id, str(error)))
        del self.there[worker.id]

    def emit(self, event):
        self.told.append(event.why)

    def end(self, error):
        self.ended.append(error)

    def changed(self):
        pass


async def test_a_pair_goes_through_the_third_worker_that_fewest_others_go_through():
    crew = Crew(4)
    await crew.links.cut(2, 1, "no heartbeat for 4.0 s")
    assert [worker.ways for worker in crew.there.values()] == [{2: 3}, {1: 3}, {}, {}]
    await crew.links.cut(1, 2, "no heartbeat for 4.0 s")  # the other one says so, too
    await crew.links.cut(3, 4, "no heartbeat for 4.0 s")
    assert [worker.ways for worker in crew.there.values()] == [{2: 3}, {1: 3}, {4: 1}, {3: 1}]
    assert crew.told == [
        "worker 2 does not reach worker 1 any more: no heartbeat for 4.0 s; what they exchange goes through worker 3",
        "worker 3 does not reach worker 4 any more: no heartbeat for 4.0 s; what they exchange goes through worker 1",
    ]
    assert crew.out == []


async def test_who_reaches_nobody_is_left_out_and_named_with_one_that_it_does_not_reach():
    crew = Crew(4)
    for other in (1, 3, 4):
        await crew.links.cut(other, 2, "no answer")
    ((worker, why),) = crew.out
    assert worker == 2
    assert "worker 1 does not reach worker 2 any more: no answer; no third worker reaches both" in why
    assert [worker.ways for worker in crew.there.values()] == [{}, {}, {}]


async def test_of_two_workers_one_goes_on():
    crew = Crew(2)
    await crew.links.cut(1, 2, "no answer")
    assert [worker for worker, _ in crew.out] == [2]


async def test_pairs_without_a_way_at_the_beginning_go_around_or_are_refused():
    crew = Crew(3)
    one, two, three = crew.there.values()
    await crew.links.met([(one, three, "refused"), (three, one, "refused")], first=True)
    assert [worker.ways for worker in crew.there.values()] == [{3: 2}, {}, {1: 2}]
    with pytest.raises(
        ConnectError, match=r"worker 1 has no way to worker 2: refused[^;]*; let a firewall.*--advertise"
    ):
        await crew.links.met([(one, three, "refused"), (one, two, "refused")], first=True)
    assert len(crew.ended) == 1
    assert crew.out == []


async def test_who_joins_and_reaches_nobody_is_left_out():
    crew = Crew(3)
    one, two, three = crew.there.values()
    await crew.links.met([], first=True)
    await crew.links.met([(one, three, "refused"), (two, three, "refused")], first=False)
    assert [worker for worker, _ in crew.out] == [3]


async def test_when_all_meet_again_what_is_healed_goes_directly():
    crew = Crew(3)
    await crew.links.cut(1, 2, "no answer")
    await crew.links.met([], first=False)
    assert [worker.ways for worker in crew.there.values()] == [{}, {}, {}]


@pytest.mark.parametrize("answers", [True, False])
async def test_silence_between_two_is_their_link_only_if_the_master_sees_both(answers):
    crew = Crew(3)
    crew.there[2].answers = answers
    crew.links.silent(1, 2, "no heartbeat for 4.0 s")
    crew.links.silent(1, 9, "no heartbeat for 4.0 s")  # one that is lost meanwhile
    await asyncio.gather(*crew.links._looking)
    assert len(crew.told) == answers
    await crew.links.close()


# --- the workers' end -------------------------------------------------------------------------------------------------


def ways_of(*cut):
    """Ways of three workers, between some of which nothing passes."""
    ways = {}

    def call_of(me):
        async def call(worker, verb, *arguments):
            if {me, worker} in cut:
                raise WorkerLost("silence", worker=f"worker {worker}")
            if verb == "relay":
                return await ways[worker].relay(*arguments)
            return me, worker, verb, arguments

        return call

    ways.update({number: Around(call_of(number)) for number in (1, 2, 3)})
    return ways


async def test_what_does_not_pass_says_that_it_is_the_link():
    with pytest.raises(Unreached) as caught:
        await ways_of({1, 2})[1].ask(2, "values", 7)
    assert (caught.value.worker, caught.value.link, caught.value.by) == (2, True, None)


async def test_a_way_around_brings_the_others_answer():
    ways = ways_of({1, 2})
    ways[1].go_around([(2, 3)])
    assert await ways[1].ask(2, "values", 7) == (3, 2, "values", (7,))
    assert await ways[1].ask(3, "values", 7) == (1, 3, "values", (7,))


@pytest.mark.parametrize(("cut", "worker", "by"), [([{1, 2}, {2, 3}], 2, 3), ([{1, 2}, {1, 3}], 3, None)])
async def test_a_way_around_that_is_broken_says_which_link_it_is(cut, worker, by):
    ways = ways_of(*cut)
    ways[1].go_around([(2, 3)])
    with pytest.raises(Unreached) as caught:
        await ways[1].ask(2, "values", 7)
    assert (caught.value.worker, caught.value.link, caught.value.by) == (worker, True, by)
