"""Test of the table of ``benchmarks.scout`` about the speed of searches."""

from benchmarks.scout import Timed, speed_rows


def test_ratios_and_shares_are_from_the_same_repeats():
    trials = {"one worker": [6.0, 9.0, 10.0], "two workers": [3.0, 5.0, 5.0], "run": []}
    seconds = {"one worker": [7.0, 10.0, 11.0], "two workers": [4.0, 6.0, 6.0], "run": [40.0, 40.0, 60.0]}
    _, row = speed_rows({"digits": Timed(trials, seconds, {"one"})})
    assert row[0] == "digits"
    assert row[3] == "2.00 (1.80-2.00)"
    assert row[6] == "10% (10%-15%)"
    assert row[7] == "yes"
    assert speed_rows({"digits": Timed(trials, seconds, {"one", "other"})})[1][7] == "no"
