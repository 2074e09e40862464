"""Tests of the order of passes in a pipeline, and of the cut of a model."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.algorithms.pipeline import balanced, passes, sizes


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 8), (4, 32), (3, 1), (5, 3)])
def test_a_stage_keeps_the_activations_of_at_most_as_many_micro_batches_as_stages_follow_and_one(stages, micro_batches):
    for stage in range(stages):
        order = list(passes(stage, stages, micro_batches))
        assert [step.number for step in order if step.forward] == list(range(micro_batches))
        assert [step.number for step in order if not step.forward] == list(range(micro_batches))
        kept_activations = list(itertools.accumulate(1 if step.forward else -1 for step in order))
        assert max(kept_activations) == min(stages - stage, micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (3, 8), (4, 8)])
def test_idle_time_of_equal_stages_follows_the_formula(stages, micro_batches):
    """Each pass takes one unit of time. It begins when its stage is free and its inputs are ready."""
    end_times, now = {}, [0] * stages
    open_passes = [list(passes(stage, stages, micro_batches)) for stage in range(stages)]
    while any(open_passes):
        for stage, todo in enumerate(open_passes):
            if todo:
                forward, number = todo[0]
                neighbour = stage - 1 if forward else stage + 1
                needed = (neighbour, forward, number) if 0 <= neighbour < stages else None
                if needed is None or needed in end_times:
                    todo.pop(0)
                    now[stage] = max(now[stage], end_times.get(needed, 0)) + 1
                    end_times[stage, forward, number] = now[stage]
    idle = 1 - 2 * micro_batches / max(now)
    assert idle == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@given(st.integers(1, 500), st.integers(1, 40))
def test_micro_batches_have_all_samples_and_differ_by_at_most_one(samples, micro_batches):
    counts = sizes(samples, micro_batches)
    assert (sum(counts), len(counts)) == (samples, min(samples, micro_batches))
    assert 1 <= min(counts) <= max(counts) <= min(counts) + 1


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 8))
def test_the_cut_minimizes_the_cost_of_the_most_expensive_part(costs, parts):
    parts = min(parts, len(costs))
    ends = balanced(costs, [1] * (len(costs) - 1), parts)

    def largest(ends):
        return max(sum(costs[begin:end]) for begin, end in itertools.pairwise([0, *ends]))

    assert (ends, ends[-1], len(ends)) == (sorted(set(ends)), len(costs), parts)
    cuts = itertools.combinations(range(1, len(costs)), parts - 1)
    assert largest(ends) == min(largest([*cut, len(costs)]) for cut in cuts)


def test_the_smaller_border_decides_between_equal_cuts():
    assert balanced([4, 0, 4], [9, 2], 2) == [2, 3]
    assert balanced([4, 0, 4], [2, 9], 2) == [1, 3]
