"""Tests of the options that a script adds to its command line."""

import argparse

import pytest

import ddlf
from ddlf.cli.options import add_options
from ddlf.cli.parsing import Parser
from ddlf.cli.script import as_parameters, settable


class Base(ddlf.IApp):
    width = 8
    curve = None
    batch_size = 4  # a setting, which has an option

    def load_dataset(self):
        """Do nothing."""


class Own(Base):
    width = 16
    network = "dense"
    _hidden = 1


async def measure(cluster, calls: int = 3, name="a", more=None, *, fast=False):
    """Measure."""


def test_help_lists_parameters_with_default_values():
    assert settable(Own).splitlines() == [
        "attributes of this app, with their default values:",
        "  -p width=16",
        "  -p network=dense",
    ]
    assert settable(measure).splitlines()[1:] == ["  -p calls=3", "  -p name=a", "  -p fast=False"]
    assert settable(lambda cluster: None) == ""


def own_of():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--width", type=int, help="units")
    parser.add_argument("--network", choices=["dense", "lstm"])
    return parser


def test_author_option_sets_the_attribute_and_is_in_the_help(capsys):
    parser = Parser(prog="app.py", parents=[own_of()], epilog=settable(Own))
    add_options(parser)
    options = as_parameters(parser.parse_args(["--width", "2", "--seed", "3"]), parser)
    assert options.parameters == ["width=2"]
    assert options.seed == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    help_text = capsys.readouterr().out
    assert "--width WIDTH" in help_text
    assert "--network {dense,lstm}" in help_text
    assert "-p width=16" in help_text
    with pytest.raises(SystemExit):
        parser.parse_args(["--network", "lstmm"])
    assert "argument --network: invalid choice: 'lstmm' (choose from 'dense', 'lstm')" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_args(["--netwrok", "lstm"])
    assert "did you mean --network?" in capsys.readouterr().err
