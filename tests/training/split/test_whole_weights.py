"""Tests of uniting: shares of weights become whole weights in checkpoints."""

import numpy as np

from ddlf.training.exchanges.split.state_file import State, optimizer_name, weight_name
from ddlf.training.exchanges.split.whole_weights import needs, united, written
from tests.training.split.test_layer_plan import dense, plan_of


def states_of(plan, weights, variables):
    """Return the state of each part, with its shares of the whole arrays."""
    found = {}
    for part in plan.parts:
        arrays = {weight_name(place): plan.piece(part.number, place, weights[place]) for place in part.all_weights}
        for place, of in enumerate(plan.optimizer.of):
            if of is None or of in part.weights:
                arrays[optimizer_name(place)] = plan.piece(part.number, of, variables[place])
        state = State([(name, one.dtype.name, one.shape) for name, one in arrays.items()])
        for name, one in arrays.items():
            state.put(name, one)
        found[part.number] = state
    return found


def test_each_array_is_written_once_and_whole():
    model = dense(6, 60, 6, optimizer="adam")
    plan, weights = plan_of(model, "within:3"), model.get_weights()
    of, shapes = plan.optimizer.of, plan.program.shapes
    variables = [np.full(() if one is None else shapes[one], place, "f4") for place, one in enumerate(of)]
    states, found = states_of(plan, weights, variables), {}
    written_bytes = []
    for part in plan.parts:
        names = written(plan, part)
        state = united(plan, part.number, states, names)
        assert not {*names} & {*found}
        assert set(needs(plan, names)) <= {0, 1, 2}
        found |= state.views()
        written_bytes.append(state.nbytes)
    assert all(np.array_equal(found[weight_name(place)], one) for place, one in enumerate(weights))
    assert all(np.array_equal(found[optimizer_name(place)], one) for place, one in enumerate(variables))
    assert min(written_bytes) > 1000, "all parts write some of the weights"


def test_parts_without_cut_layers_need_no_other_part():
    plan = plan_of(dense(6, 4), "stages:2")
    names = [written(plan, part) for part in plan.parts]
    assert names[0][:2] == ["weight 0", "weight 1"]
    assert [needs(plan, one) for one in names] == [{}, {}]
