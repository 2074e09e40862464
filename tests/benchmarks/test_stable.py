"""What stabilisers cost and do, in the shortest form."""

import math

import pytest

from benchmarks import stable

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_template")]


@pytest.mark.parametrize("part", stable.PARTS)
def test_each_part_says_what_was_found(part, capsys):
    short = ["--quick", "--sizes", "1e20", "--workers", "1"]
    found = stable.main(stable.parser().parse_args([*short, "--parts", part]))[part]
    if part == "steps":
        assert set(found["ratios"]) == set(stable.KINDS) - {"adam", "lion", "two outputs"}
        assert all(0.1 < ratio < 10 for ratio in found["ratios"].values())
    elif part == "outliers":
        # Samples whose squares are no numbers any more: the one thing that holds whatever the seed.
        (((clipped, plain),), *_) = (found["pairs"][f"1e+20 {kind}"] for kind in (stable.ADAM, stable.SGD))
        assert math.isfinite(clipped)
        assert math.isnan(plain)
    elif part == "frozen":
        assert all(all(each) for each in found["kept"].values())
        # Of so small a model in int8 a good part is what says what it is.
        assert all(share < (0.4 if way == "int8" else 0.3) for way, each in found["shares"].items() for share in each)
    else:
        assert set(found["points"]) == {"own", "sum", "from 0", "uncertainty"}
    assert capsys.readouterr().out.count("|") > 20
