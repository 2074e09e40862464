"""Tests of parsing a command line. A wrong argument is an error of one sentence."""

import pytest

from ddlf.cli.parsing import Parser, number


@pytest.fixture
def parser():
    """Return the parser of a command with some options."""
    result = Parser(prog="tool")
    result.add("--port", type=number(0, 65535), help="a port")
    result.add("--workers", type=number(1, 1024), help="workers")
    result.add("--seed", type=number(0), help="a seed")
    result.add("--mode", help="a mode")
    result.add("--ui", choices=["rich", "plain"], help="a style")
    return result


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "99999"], "tool: argument --port: must be 0-65535, got 99999"),
        (["--port", "-1"], "tool: argument --port: must be 0-65535, got -1"),
        (["--port", "abc"], "tool: argument --port: not a whole number: 'abc'"),
        (["--port", ""], "tool: argument --port: not a whole number: ''"),
        (["--port"], "tool: argument --port: expected one argument"),
        (["--workers", "0"], "tool: argument --workers: must be 1-1024, got 0"),
        (["--workers", "-3"], "tool: argument --workers: must be 1-1024, got -3"),
        (["--workers", "1e9"], "tool: argument --workers: not a whole number: '1e9'"),
        (["--seed", "-1"], "tool: argument --seed: must be 0 or more, got -1"),
        (["--prot", "1"], "tool: unknown option '--prot', did you mean --port?"),
        (
            ["--ui", "plane"],
            "tool: argument --ui: must be one of rich, plain, got 'plane'; did you mean 'plain'?",
        ),
        (["--ui", "x"], "tool: argument --ui: must be one of rich, plain, got 'x'"),
        (["--xyz"], "tool: unknown option '--xyz'"),
        (["--hiden"], "tool: unknown option '--hiden'"),  # as long as --mode, which has the same first characters
        (["word"], "tool: unexpected argument 'word'"),
        (["--por", "1"], "tool: unknown option '--por', did you mean --port?"),
        (
            ["--token", "secret"],
            "tool: unknown option --token: tokens on the command line are visible to other users; use --token-file",
        ),
        (
            ["--token=secret"],
            "tool: unknown option --token: tokens on the command line are visible to other users; use --token-file",
        ),
    ],
)
def test_wrong_argument_is_one_sentence_and_exit_code_2(parser, capsys, arguments, sentence):
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{sentence}\nSee: tool --help\n"


def test_unknown_option_is_named_before_a_missing_argument(parser, capsys):
    parser.add("app", help="a file")
    with pytest.raises(SystemExit):
        parser.parse_args(["--helo"])
    assert capsys.readouterr().err.startswith("tool: unknown option '--helo', did you mean --help?")
    with pytest.raises(SystemExit):
        parser.parse_args(["--seed", "1"])
    assert capsys.readouterr().err.startswith("tool: the following arguments are required: APP")


def test_token_on_the_command_line_is_never_repeated(parser, capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--token=secret"])
    assert "secret" not in capsys.readouterr().err


def test_numbers_in_range_are_accepted(parser):
    options = parser.parse_args(["--port", "0", "--workers", "1024", "--seed", "12345678901"])
    assert (options.port, options.workers, options.seed) == (0, 1024, 12345678901)


@pytest.mark.parametrize(
    ("arguments", "wait", "files"),
    [
        (["--wait", "a.py"], "for-ever", ["a.py"]),
        (["--wait", "5", "a.py"], "5", ["a.py"]),
        (["a.py", "--wait"], "for-ever", ["a.py"]),
        (["--wait=7", "a.py", ""], "7", ["a.py", ""]),
        (["--wait", "--wait", "8"], "8", []),
        (["a.py"], None, ["a.py"]),
    ],
)
def test_option_with_optional_value_does_not_take_the_next_argument(arguments, wait, files):
    parser = Parser(prog="tool")
    parser.add("--wait", alone="for-ever", help="seconds")
    parser.add("files", nargs="*", help="files")
    options = parser.parse_args(arguments)
    assert (options.wait, options.files) == (wait, files)


def test_unknown_option_explains_how_to_set_an_attribute(parser, capsys):
    parser.add("-p", metavar="KEY=VALUE", help="an attribute")
    with pytest.raises(SystemExit):
        parser.parse_args(["--hidden=2"])
    assert "unknown option '--hidden'; to set an attribute of the app, use -p hidden=VALUE\n" in capsys.readouterr().err
