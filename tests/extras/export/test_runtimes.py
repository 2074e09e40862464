"""Tests of matching the inputs and outputs of each runtime to Keras, by name or by order."""

import pytest

from ddlf.extras.export.formats import ALL
from ddlf.extras.export.runtimes import RUNTIMES, match_names, packed, unpacked


@pytest.mark.parametrize(
    ("layout", "structure", "flat"),
    [
        (0, "a", "a"),
        ([0, 1], ["a", "b"], "ab"),
        ({"x": 1, "y": 0}, {"x": "b", "y": "a"}, "ab"),
        ({"x": [0, 2], "y": 1}, {"x": ["a", "c"], "y": "b"}, "abc"),
    ],
    ids=["one", "list", "dict", "nested"],
)
def test_unpacked_inverts_packed(layout, structure, flat):
    assert packed(layout, flat) == structure
    assert unpacked(layout, structure) == list(flat)


@pytest.mark.parametrize(
    ("names", "available", "matches"),
    [
        (["left", "right"], ["right", "left"], ["left", "right"]),
        (["left", "right"], ["serve_right:0", "serve_left:0"], ["serve_left:0", "serve_right:0"]),
        (["left", "right"], ["args_0", "args_1"], ["args_0", "args_1"]),
        (["x", "xx"], ["xx", "x"], ["x", "xx"]),
        (["a", "b"], ["arga_a", "a_b"], ["arga_a", "a_b"]),
        (["", ""], ["output_0", "output_1"], ["output_0", "output_1"]),
    ],
)
def test_matched_uses_clear_names_or_the_order(names, available, matches):
    assert match_names(names, available) == matches


def test_every_runtime_of_a_format_exists():
    assert {runtime.name for kind in ALL for runtime in kind.runtimes} == set(RUNTIMES)
