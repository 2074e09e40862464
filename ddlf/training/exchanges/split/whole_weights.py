"""Whole weights from the shares of several parts, in a file: one array at a time is in memory. Runs on both sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddlf.training.exchanges.split.plan import Part, Plan, bytes_of
from ddlf.training.exchanges.split.state_file import State, optimizer_name, weight_name


def cut_arrays(plan: Plan) -> dict[str, int]:
    """Return the arrays in states that are cut, with the weight that each belongs to."""
    pieces = plan.program.pieces
    found = {weight_name(place): place for place in pieces}
    return found | {optimizer_name(i): of for i, of in enumerate(plan.optimizer.of) if of is not None and of in pieces}


def owners(plan: Plan, place: int) -> list[int]:
    """Return the parts that own shares of a weight, in the order of the shares."""
    return [part.number for part in plan.parts if place in part.weights]


def written(plan: Plan, part: Part) -> list[str]:
    """Return the names of the arrays that a part writes into checkpoints, and their optimizer's variables.

    If a weight is cut, one of the owners of its shares writes it whole. All write about equally many bytes.
    """
    weights, pieces = plan.graph.model.weights, plan.program.pieces
    done, mine = dict.fromkeys(range(len(plan.parts)), 0), {place for place in part.weights if place not in pieces}
    for place in sorted(pieces, key=lambda place: (-bytes_of(weights[place]), place)):
        writer = min(owners(plan, place), key=lambda number: done[number])
        done[writer] += bytes_of(weights[place])
        mine.update({place} if writer == part.number else ())
    variables = [i for i in plan.writes(part) if plan.optimizer.of[i] not in pieces]
    variables += [i for i, of in enumerate(plan.optimizer.of) if of in pieces and of in mine]
    return [*map(weight_name, sorted(mine)), *map(optimizer_name, sorted(variables))]


def needs(plan: Plan, names: Sequence[str]) -> dict[int, list[str]]:
    """Return for each part the names of the arrays whose shares are needed to make them whole."""
    cut, found = cut_arrays(plan), dict[int, list[str]]()
    for name in names:
        for number in owners(plan, cut[name]) if name in cut else ():
            found.setdefault(number, []).append(name)
    return found


def united(plan: Plan, part: int, states: Mapping[int, State], names: Sequence[str]) -> State:
    """Return a state with whole arrays.

    Args:
        plan: How the model is cut.
        part: Number of the part whose state has the arrays that are not cut.
        states: The states of parts, by number: of this part, and of all that ``needs`` returns.
        names: Names of the arrays.
    """
    cut = cut_arrays(plan)
    known = {name: (kind, shape) for name, kind, shape in states[part].layout}
    whole = {name: plan.program.shapes[cut[name]] if name in cut else known[name][1] for name in names}
    state = State([(name, known[name][0], whole[name]) for name in names])
    for name in names:
        if name in cut:
            state.put(name, plan.joined(cut[name], [states[one].get(name) for one in owners(plan, cut[name])]))
        else:
            state.put(name, states[part].get(name))
    return state
