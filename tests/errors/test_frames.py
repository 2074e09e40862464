"""Tests of the lines of a traceback that a user sees: the user's own lines, wherever the error was raised."""

import asyncio
import contextlib
import traceback

import pytest

from ddlf.errors import tracebacks

MINE = '  File "/home/u/app.py", line 7, in load_dataset\n    check(x)\n'
KERAS = '  File "/opt/v/lib/python3.11/site-packages/keras/src/models/model.py", line 1, in fit\n    return call(x)\n    ^^^^^^^\n'
LOOP = '  File "/usr/lib/python3.11/asyncio/runners.py", line 118, in run\n    return self._loop.run_until_complete(task)\n'
AGAIN = "  [Previous line repeated 96 more times]\n"
HEAD = "Traceback on the worker (most recent call last):\n"


@pytest.mark.parametrize(
    ("file", "machinery"),
    [
        (tracebacks.__file__, True),
        ("<frozen runpy>", True),
        (asyncio.__file__, True),
        (contextlib.__file__, True),
        ("/usr/lib/python3.13/concurrent/futures/thread.py", True),
        ("/home/u/asyncio/app.py", False),
        ("/home/u/threading.py", False),
        ("/tmp/ipykernel_7/123.py", False),
    ],
)
def test_machinery_is_distinguished_from_user_code(file, machinery):
    assert tracebacks.is_machinery(file) is machinery


@pytest.mark.parametrize(
    ("frames", "shown"),
    [
        (LOOP + MINE + KERAS + AGAIN + MINE + KERAS, MINE + MINE),
        (MINE + AGAIN, MINE + AGAIN),
        (LOOP + KERAS, KERAS),  # without a user's own line, the lines of libraries stay
        (LOOP, LOOP),
    ],
)
def test_frames_of_libraries_are_hidden_if_a_user_has_frames(frames, shown):
    assert (
        tracebacks.hide_library_frames(f"no labels\n\n{HEAD}{frames}ValueError: no labels")
        == f"no labels\n\n{HEAD}{shown}ValueError: no labels"
    )


def test_each_traceback_of_a_text_is_shortened_alone_and_other_text_stays():
    text = f"{HEAD}{KERAS}KeyError: 1\n\nThe above exception was the direct cause:\n\n{HEAD}{KERAS}{MINE}ValueError: 2"
    assert tracebacks.hide_library_frames(text) == text.replace(f"{HEAD}{KERAS}{MINE}", f"{HEAD}{MINE}")
    for other in ("", "one line", "two\nlines\n", '  File "half a frame"'):
        assert tracebacks.hide_library_frames(other) == other


def test_frames_of_a_graph_without_source_lines_are_shortened():
    text = "Graph execution error:\n\nDetected at node (most recent call last):\n" + "\n".join(
        frame.splitlines(keepends=True)[0] for frame in (LOOP, MINE, KERAS)
    )
    assert tracebacks.hide_library_frames(text).splitlines()[3:] == [MINE.splitlines()[0]]


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_error_is_shown_with_the_users_lines_of_its_causes_and_members():
    async def fail(number):
        raise ValueError(f"number {number}")

    async def several():
        async with asyncio.TaskGroup() as tasks:
            for number in (1, 2):
                tasks.create_task(fail(number))

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(several())
    text, hidden = tracebacks.format_for_user(caught.value)
    assert hidden
    assert "/asyncio/" not in text
    assert text.count("in fail\n") == 2
    assert tracebacks.format_for_user(raised(KeyError(5))) == (
        "".join(traceback.format_exception(raised(KeyError(5)))),
        False,
    )


def test_an_error_that_is_its_own_cause_is_shown_once():
    error = raised(ValueError("round and round"))
    error.__context__ = other = raised(KeyError("other"))
    other.__context__ = error
    assert tracebacks.format_for_user(error)[0].count("ValueError: round and round") == 1


def test_syntax_error_is_shown_without_the_lines_of_the_import(tmp_path):
    (tmp_path / "app.py").write_text("def f(:\n")
    error = raised(SyntaxError("invalid syntax", ("app.py", 1, 7, "def f(:\n")))
    error.__traceback__ = None
    assert tracebacks.format_for_user(error)[0].startswith('  File "app.py", line 1\n    def f(:\n')
