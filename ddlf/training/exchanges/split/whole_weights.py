"""Whole weights from the shares of several parts, in a file: one array at a time is in memory. Runs on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddlf.training.exchanges.split.plan import Part, Plan, bytes_of
from ddlf.training.exchanges.split.state_file import State, optimizer_name, weight_name


def cut_arrays(plan: Plan) -> dict[str, int]:
    """Return the arrays in states that are cut, with the weight that each belongs to."""
    pieces = plan.program.pieces
    weight_of = {weight_name(index): index for index in pieces}
    return weight_of | {
        optimizer_name(i): weight
        for i, weight in enumerate(plan.optimizer.weight_of)
        if weight is not None and weight in pieces
    }


def owners(plan: Plan, index: int) -> list[int]:
    """Return the parts that own shares of a weight, in the order of the shares."""
    return [part.number for part in plan.parts if index in part.weights]


def written(plan: Plan, part: Part) -> list[str]:
    """Return the names of the arrays that a part writes into checkpoints, and their optimizer's variables.

    If a weight is cut, one of the owners of its shares writes it whole. All write about equally many bytes.
    """
    weights, pieces = plan.graph.model.weights, plan.program.pieces
    nbytes_of = dict.fromkeys(range(len(plan.parts)), 0)
    own_indices = {index for index in part.weights if index not in pieces}
    for index in sorted(pieces, key=lambda index: (-bytes_of(weights[index]), index)):
        writer = min(owners(plan, index), key=lambda number: nbytes_of[number])
        nbytes_of[writer] += bytes_of(weights[index])
        own_indices.update({index} if writer == part.number else ())
    variables = [i for i in plan.writes(part) if plan.optimizer.weight_of[i] not in pieces]
    variables += [i for i, weight in enumerate(plan.optimizer.weight_of) if weight in pieces and weight in own_indices]
    return [*map(weight_name, sorted(own_indices)), *map(optimizer_name, sorted(variables))]


def needs(plan: Plan, names: Sequence[str]) -> dict[int, list[str]]:
    """Return for each part the names of the arrays whose shares are needed to make them whole."""
    cut, names_of = cut_arrays(plan), dict[int, list[str]]()
    for name in names:
        for number in owners(plan, cut[name]) if name in cut else ():
            names_of.setdefault(number, []).append(name)
    return names_of


def united(plan: Plan, part: int, states: Mapping[int, State], names: Sequence[str]) -> State:
    """Return a state with whole arrays.

    Args:
        plan: How the model is cut.
        part: Number of the part whose state has the arrays that are not cut.
        states: The states of parts, by number: of this part, and of all that ``needs`` returns.
        names: Names of the arrays.
    """
    cut = cut_arrays(plan)
    layout = {name: (kind, shape) for name, kind, shape in states[part].layout}
    shapes = {name: plan.program.shapes[cut[name]] if name in cut else layout[name][1] for name in names}
    state = State([(name, layout[name][0], shapes[name]) for name in names])
    for name in names:
        if name in cut:
            state.put(name, plan.joined(cut[name], [states[owner].get(name) for owner in owners(plan, cut[name])]))
        else:
            state.put(name, states[part].get(name))
    return state
