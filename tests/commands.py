"""Run several commands one after another in one fork of a process that has imported Keras: the import takes seconds.

Their workers are forks of one template. Other tests run single commands in their own processes
(``tests.processes.command``).
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddlf.cluster.launch import local
from tests.forks import Fork
from tests.templates import Standing


def several(
    commands: Sequence[Sequence[object]],
    cwd: Path,
    template: Standing | None = None,
    env: Mapping[str, str] | None = None,
    *,
    with_errors: bool = False,
    codes: Sequence[int] = (),
) -> list[str]:
    """Run commands, and return the standard output of each.

    Args:
        commands: The words of each command: ``ddlf``, ``pytest`` or a script, then its arguments.
        cwd: The current folder of the commands.
        template: A process to fork the executors of local workers from, if it has the environment of the commands. Otherwise
            the commands start another one.
        env: The environment. By default it is the environment of this process.
        with_errors: Whether to append the text that each command printed to stderr.
        codes: The exit code of each command. By default all are 0.

    Raises:
        AssertionError: A command ended with another exit code.
    """
    suits = template is not None and template.suits(os.environ if env is None else env)
    shared = [template.fileno()] if template is not None and suits else []
    with tempfile.TemporaryFile() as results:
        program = [__file__, json.dumps([[str(word) for word in words] for words in commands])]
        process = Fork(program, cwd, os.environ if env is None else env, [results.fileno(), *shared])
        with process.stdout:
            output = process.stdout.read()
        code = process.wait()
        results.seek(0)
        ended = subprocess.CompletedProcess(program, code, results.read().decode(), output)
    assert ended.returncode == 0, ended.stderr
    printed = []
    results = zip(commands, codes or [0] * len(commands), json.loads(ended.stdout), strict=True)
    for words, expected, (code, out, err) in results:
        assert code == expected, f"{words}: {out}{err}"
        printed.append(out + err if with_errors else out)
    return printed


def main(commands: list[list[str]], results: int, shared: Sequence[int]) -> None:
    """Run commands, and write the exit code and both outputs of each as JSON to the descriptor ``results``."""
    standing = [Standing(socket.socket(fileno=fd)) for fd in shared]

    def template(modules: Sequence[str]) -> Standing:
        standing[:] = standing or [Standing.of_keras()]
        return standing[0]

    local.start_template = template
    local.start_template_early = lambda modules: None
    saved_descriptors = os.dup(1), os.dup(2)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    done = []
    for words in commands:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            code = _run(words)
            sys.stdout.flush()
            sys.stderr.flush()
            out.seek(0)
            err.seek(0)
            done.append((code, out.read().decode(errors="replace"), err.read().decode(errors="replace")))
    for number, fd in enumerate(saved_descriptors, 1):
        os.dup2(fd, number)
    with open(results, "w") as file:
        json.dump(done, file)
    for server in standing:
        server.end()


def _run(words: list[str]) -> int:
    from ddlf.cli.main import main as ddlf

    sys.argv = words
    try:
        if words[0] == "ddlf":
            ddlf(words[1:])
        elif words[0] == "pytest":
            import pytest

            return int(pytest.main(words[1:]))
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    results, *shared = map(int, sys.argv[2:])
    main(json.loads(sys.argv[1]), results, shared)
