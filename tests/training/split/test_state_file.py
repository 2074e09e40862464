"""Tests of the states of parts: how they are kept in files, and how they travel."""

import numpy as np
import pytest

from ddlf.errors import AppMissing, ProtocolError
from ddlf.training.exchanges.split import state_file
from ddlf.training.exchanges.split.state_file import State, StateFiles, fetched, in_slice

ARRAYS = {"weight 0": np.arange(6, dtype="f4").reshape(2, 3), "weight 3": np.ones((), "f8"), "optimizer 0": np.array(7)}


def state():
    new_state = State([(name, array.dtype.name, array.shape) for name, array in ARRAYS.items()])
    for name, array in ARRAYS.items():
        new_state.put(name, array)
    return new_state


def test_a_state_returns_the_arrays_that_it_received():
    received = state()
    for name, array in ARRAYS.items():
        assert np.array_equal(received.get(name), array)
        assert np.array_equal(received.views()[name], array)
        assert not received.views()[name].flags.writeable
    assert "weight 1" not in received


def test_views_outlive_their_state():
    original = state()
    views = original.views()
    original.close()
    assert np.array_equal(views["weight 0"], ARRAYS["weight 0"])


@pytest.mark.parametrize("value", [np.ones((2, 3), "f8"), np.ones((3, 2), "f4")])
def test_an_array_of_another_shape_or_type_is_refused(value):
    with pytest.raises(ProtocolError, match=r"weight 0 is .* instead of float32 \(2, 3\)"):
        state().put("weight 0", value)


async def test_a_state_travels_in_pieces(monkeypatch):
    monkeypatch.setattr(state_file, "PIECE_BYTES", 50)
    remote, verbs = state(), []

    async def ask(verb, part, version, *extent):
        verbs.append(verb)
        return remote.layout if verb == "layout" else remote.read(*extent)

    copy = await fetched(ask, 1, 5)
    assert all(np.array_equal(copy.get(name), array) for name, array in ARRAYS.items())
    assert verbs == ["layout", *["piece"] * 3]


async def test_some_arrays_of_a_state_travel_alone(monkeypatch):
    monkeypatch.setattr(state_file, "PIECE_BYTES", 5)
    remote, lengths = state(), []

    async def ask(verb, part, version, *extent):
        lengths.extend(extent[1:])
        return remote.layout if verb == "layout" else remote.read(*extent)

    copy = await fetched(ask, 1, 5, ["weight 3"])
    assert np.array_equal(copy.get("weight 3"), ARRAYS["weight 3"])
    assert "weight 0" not in copy
    assert lengths == [5, 3]


@pytest.mark.parametrize("piece", [np.zeros(3, "u1"), np.zeros(200, "f4")])
async def test_a_piece_of_another_size_is_refused(piece):
    async def ask(verb, *of):
        return state().layout if verb == "layout" else piece

    with pytest.raises(ProtocolError, match="a piece of part 2 has"):
        await fetched(ask, 1, 5)


def test_states_of_earlier_versions_are_freed():
    states = StateFiles()
    for version in (1, 2, 3):
        states.put(0, version, state())
    states.drop_before(3)
    assert (0, 3) in states
    with pytest.raises(AppMissing, match="the state of part 1 in version 2"):
        states.of(0, 2)


def test_weights_are_flat_in_slices():
    arrays = in_slice(ARRAYS, {"weight 0": "weights 0 0000 dense/kernel", "optimizer 0": "slots 0 slot 0000 0000"})
    assert {name: array.shape for name, array in arrays.items()} == {
        "weights 0 0000 dense/kernel": (6,),
        "slots 0 slot 0000 0000": (),
    }
