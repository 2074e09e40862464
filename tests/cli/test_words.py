"""Tests of turning parsed options back into words of a command line."""

from ddlf.cli.words import command_line
from ddlf.extras.scout.command import SCOUT


def test_a_found_parameter_replaces_the_given_one_and_keeps_all_other_options():
    words = ["wr 0.py", "--local", "2", "--batch-size", "16", "-p", "seed=3", "-p", "learning_rate=9", "--steps", "50"]
    options = SCOUT.parser("ddlf scout").parse_args(words)
    assert command_line("ddlf run", options.app, options, parameters={"learning_rate": "0.05"}) == (
        "ddlf run 'wr 0.py' --batch-size 16 --local 2 -p seed=3 -p learning_rate=0.05"
    )


def test_a_command_without_options_is_its_file():
    options = SCOUT.parser("ddlf scout").parse_args(["app.py"])
    assert command_line("ddlf plan", options.app, options) == "ddlf plan app.py"
