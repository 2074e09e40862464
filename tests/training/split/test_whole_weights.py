"""Tests of uniting: shares of weights become whole weights in checkpoints."""

import numpy as np

from ddlf.training.exchanges.split.state_file import State, optimizer_name, weight_name
from ddlf.training.exchanges.split.whole_weights import needs, united, written
from tests.training.split.test_layer_plan import dense, plan_of


def states_of(plan, weights, variables):
    """Return the state of each part, with its shares of the whole arrays."""
    states = {}
    for part in plan.parts:
        arrays = {weight_name(index): plan.piece(part.number, index, weights[index]) for index in part.all_weights}
        for index, of in enumerate(plan.optimizer.weight_of):
            if of is None or of in part.weights:
                arrays[optimizer_name(index)] = plan.piece(part.number, of, variables[index])
        state = State([(name, array.dtype.name, array.shape) for name, array in arrays.items()])
        for name, array in arrays.items():
            state.put(name, array)
        states[part.number] = state
    return states


def test_each_array_is_written_once_and_whole():
    model = dense(6, 60, 6, optimizer="adam")
    plan, weights = plan_of(model, "within:3"), model.get_weights()
    of, shapes = plan.optimizer.weight_of, plan.program.shapes
    variables = [np.full(() if array is None else shapes[array], index, "f4") for index, array in enumerate(of)]
    states, united_arrays = states_of(plan, weights, variables), {}
    written_bytes = []
    for part in plan.parts:
        names = written(plan, part)
        state = united(plan, part.number, states, names)
        assert not {*names} & {*united_arrays}
        assert set(needs(plan, names)) <= {0, 1, 2}
        united_arrays |= state.views()
        written_bytes.append(state.nbytes)
    assert all(np.array_equal(united_arrays[weight_name(index)], array) for index, array in enumerate(weights))
    assert all(np.array_equal(united_arrays[optimizer_name(index)], array) for index, array in enumerate(variables))
    assert min(written_bytes) > 1000, "all parts write some of the weights"


def test_parts_without_cut_layers_need_no_other_part():
    plan = plan_of(dense(6, 4), "stages:2")
    names = [written(plan, part) for part in plan.parts]
    assert names[0][:2] == ["weight 0", "weight 1"]
    assert [needs(plan, names_of_part) for names_of_part in names] == [{}, {}]
