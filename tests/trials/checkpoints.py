"""Kill writers of checkpoints while they write, flip bits and truncate files.

    python -m tests.trials.checkpoints [--json FILE]

Every kill is a SIGKILL to a real process at a random moment. The trial repeats kills until the wanted number has
interrupted a write. After each kill, the newest checkpoint must be complete, and must contain exactly the state of its
round. It must be at least as new as the last checkpoint whose ``save`` had returned. DDLF must refuse every damaged
checkpoint with the name of the damaged file, and use the checkpoint before it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.measure import table
from ddlf.errors import CheckpointCorrupt, CheckpointError
from ddlf.training.checkpoints.checkpoint import REMOVING, REPLACED, WRITING, Checkpoint, CheckpointFolder
from tests.trials.options import read_options

WAIT_S = 30.0  # for a message of a child, which comes within milliseconds


def state(round: int, megabytes: float = 0.5) -> Checkpoint:
    """Return a simulated training state after a round. It depends only on the arguments."""
    random_ = np.random.default_rng(round)
    count = max(1, int(megabytes * 1e6 / 4 / 10))
    return Checkpoint(
        round=round,
        arrays={
            "weights": {f"layer{number}/kernel": random_.random(count, np.float32) for number in range(10)},
            "optimizer": {"momentum": random_.random(100), "iterations": np.asarray(round)},
            "ledger": {"trained": np.arange(round, dtype=np.uint32)},
        },
        facts={"seed": 7, "rng": int(random_.integers(2**62)), "settings": {"learning_rate": 1e-5, "note": "Größe"}},
    )


def same(left: Checkpoint, right: Checkpoint) -> bool:
    """Return whether two checkpoints have the same bits, types and names in the same order."""

    def bits(checkpoint: Checkpoint) -> list[Any]:
        return [
            (group, name, array.dtype, array.shape, array.tobytes())
            for group, arrays in checkpoint.arrays.items()
            for name, array in arrays.items()
        ]

    return left.round == right.round and dict(left.facts) == dict(right.facts) and bits(left) == bits(right)


# Killed writers


def write_until_killed(path: Path, keep: int, megabytes: float, says: Connection) -> None:
    """Open the folder in a child, continue after the newest round, and save rounds until killed, each third one twice."""
    says.send(("opens", 0))
    folder = CheckpointFolder(path, keep=keep)
    folder.open("a writer that will be killed")
    newest = folder.newest()
    number = newest.round if newest else 0
    while True:
        number += 1
        for _ in range(2 if number % 3 == 0 else 1):
            checkpoint = state(number, megabytes)
            says.send(("saves", number))
            folder.save(checkpoint)
            says.send(("saved", number))


def kills(path: Path, target: int, seed: int, megabytes: float = 0.5) -> dict[str, Any]:
    """Kill writers until ``target`` kills have interrupted a write. Each writer continues in the folder of the killed one.

    Returns:
        The numbers of all kills and of interrupted writes, the remaining files, and the problems afterwards.
    """
    draw = random.Random(seed)
    processes = multiprocessing.get_context("forkserver")  # it starts a process with NumPy within milliseconds
    processes.set_forkserver_preload(["ddlf.training.checkpoints.checkpoint", "safetensors.numpy", "filelock"])
    reader = CheckpointFolder(path)
    usual_s = 0.02  # the time of one save, which the loop below measures
    hit, total, promised = 0, 0, 0
    interrupted: Counter[str] = Counter()
    wrong: list[str] = []
    while hit < target:
        parent_end, child_end = processes.Pipe()
        child = processes.Process(target=write_until_killed, args=(path, draw.choice((1, 2, 3)), megabytes, child_end))
        child.start()
        child_end.close()
        try:
            # Some writers die while they open the folder and clean up, most die in their first or second save.
            for _ in range(draw.choice((1, 2, 4))):
                if not parent_end.poll(WAIT_S):
                    raise RuntimeError("the writer does not write")
                action, number = parent_end.recv()
                if action == "saves":
                    began = time.perf_counter()
                elif action == "saved":
                    promised = number
                    usual_s += 0.2 * (time.perf_counter() - began - usual_s)
            time.sleep(draw.uniform(0, 1.1 * usual_s))
        finally:
            child.kill()
            child.join()
        total += 1
        with parent_end, contextlib.suppress(EOFError):  # messages from just before the kill
            while True:
                action, number = parent_end.recv()
                promised = number if action == "saved" else promised
        leftovers = _leftovers(path)
        interrupted.update(leftovers or ["nothing"])
        hit += bool(leftovers)
        wrong += _judge(reader, promised, megabytes)
    return {"kills": total, "in_mid_write": hit, "left": dict(interrupted), "wrong": wrong, "last_round": promised}


def _leftovers(path: Path) -> list[str]:
    """Return the step that the kill of a writer interrupted. Its temporary files show it."""
    interrupted = []
    for name in os.listdir(path):
        if name.startswith(WRITING):
            files = sum(not file.startswith(".") for file in os.listdir(path / name))
            interrupted.append(f"a new one with {files} of 4 files")
        elif name.startswith(REMOVING):
            interrupted.append("an old one, partly removed")
        elif name.endswith(REPLACED):
            interrupted.append("one beside the one that replaces it")
        elif name.startswith(".owner.json-"):
            interrupted.append("a new owner.json")
    return interrupted


def _judge(folder: CheckpointFolder, promised: int, megabytes: float) -> list[str]:
    """Return the problems in a folder whose writer was killed."""
    wrong: list[str] = []
    wrong += [entry.problem for entry in folder.entries() if entry.round is not None and not entry.complete]
    try:
        newest = folder.newest()
    except CheckpointError as error:
        return [*wrong, str(error)]
    if promised and newest is None:
        wrong.append(f"nothing to load, though round {promised} was saved")
    elif newest is not None:
        if newest.round < promised:
            wrong.append(f"round {newest.round} is the newest, though {promised} was saved")
        if not same(newest, state(newest.round, megabytes)):
            wrong.append(f"round {newest.round} differs from the saved one")
    return wrong


def every_step(path: Path) -> dict[str, Any]:
    """Kill a writer before each of its calls of the file system, also before calls that random moments seldom hit.

    The writer opens a folder that keeps one checkpoint, saves the next round, saves it again, and closes the folder. Then
    the newest checkpoint must be as good as in ``kills``. The next writer must work, and must remove all temporary files.

    Returns:
        The number of steps, and the problems.
    """
    wrong: list[str] = []
    steps = 0
    with mock.patch("os.fsync"):  # unsynced data survives a killed process, and the loop is quick without fsync
        while True:
            folder = CheckpointFolder(path / str(steps), keep=1)
            folder.open("before")
            folder.save(state(1, 0.01))
            folder.close()
            promised, killed = _killed_at(steps, folder)
            wrong += [f"step {steps}: {problem}" for problem in _judge(folder, max(1, promised), 0.01)]
            folder.open("after")
            wrong += [f"step {steps}, next writer: {problem}" for problem in _judge(folder, max(1, promised), 0.01)]
            folder.save(state(3, 0.01))
            if (remaining := sorted(os.listdir(folder.path))) != [".lock", "owner.json", "round-000003"]:
                wrong.append(f"step {steps}: {remaining} in the folder after the next writer")
            if not killed:
                return {"steps": steps, "wrong": wrong}
            steps += 1


def _killed_at(step: int, folder: CheckpointFolder) -> tuple[int, bool]:
    """Let a child write until it is killed before a step. Return the last saved round, and whether it reached the step."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        steps_left = step

        def audit(event: str, _: object) -> None:
            nonlocal steps_left
            if event == "open" or event.startswith(("os.", "shutil.")):
                steps_left -= 1
                if steps_left == -1:
                    os.kill(os.getpid(), signal.SIGKILL)  # this call is a step, too, so compare with -1 exactly

        status = 1
        try:
            sys.addaudithook(audit)
            folder.open("a writer that will be killed")
            for _ in range(2):
                folder.save(state(2, 0.01))
                os.write(write_end, b"2")
            folder.close()
            status = 0
        finally:
            os._exit(status)
    os.close(write_end)
    _, status = os.waitpid(child, 0)
    with open(read_end, "rb") as pipe:
        promised = 2 if pipe.read() else 0
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"the writer failed before step {step}")
    return promised, os.WIFSIGNALED(status)


# Damage


def damages(path: Path, times: int, seed: int, kind: str) -> dict[str, Any]:
    """Damage a complete checkpoint many times: flip one bit, or truncate one file.

    Args:
        path: A new folder.
        times: Number of damages.
        seed: Seed of the choice of file and place. All files have the same chance, although the manifest is short.
        kind: ``"flip"`` or ``"cut"``.

    Returns:
        The number of damages to each file, the number that DDLF detected with the file's name, and the number of times
        that it used the checkpoint before.
    """
    draw = random.Random(seed)
    folder = CheckpointFolder(path)
    folder.open("the benchmark")
    folder.save(state(1, 0.02))
    newest = folder.save(state(2, 0.02))
    folder.close()
    files = sorted(newest.iterdir())
    done: Counter[str] = Counter()
    named = fell_back = 0
    for _ in range(times):
        file = draw.choice(files)
        content = file.read_bytes()
        done[file.name] += 1
        if kind == "flip":
            bit = draw.randrange(8 * len(content))
            file.write_bytes(content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :])
        else:
            file.write_bytes(content[: draw.randrange(len(content))])
        try:
            folder.load(newest)
        except CheckpointCorrupt as error:
            named += error.file == str(file) and str(file) in str(error)
        reports: list[str] = []
        loaded = folder.newest(report=reports.append)
        fell_back += (
            loaded is not None and same(loaded, state(1, 0.02)) and len(reports) == 1 and str(file) in reports[0]
        )
        file.write_bytes(content)
    if not same(folder.load(newest), state(2, 0.02)):
        raise RuntimeError("the checkpoint is not whole again: the benchmark is wrong")
    return {"times": times, "files": dict(done), "named": named, "fell_back": fell_back}


# The command


def main(arguments: list[str] | None = None) -> int:
    """Run the trial and print its report. Return 0 if every promise was kept, else 1."""
    options = read_options(__doc__, arguments, kills=200, flips=2000, cuts=200, seed=1, folder=Path, json=Path)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path = Path(name)
        results: dict[str, Any] = {
            "kills": kills(path / "kills", options.kills, options.seed),
            "every_step": every_step(path / "steps"),
            "flips": damages(path / "flips", options.flips, options.seed, "flip"),
            "cuts": damages(path / "cuts", options.cuts, options.seed, "cut"),
        }
    print(report(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    is_kept = not results["kills"]["wrong"] + results["every_step"]["wrong"] and all(
        results[kind]["named"] == results[kind]["fell_back"] == results[kind]["times"] for kind in ("flips", "cuts")
    )
    return 0 if is_kept else 1


def report(results: dict[str, Any]) -> str:
    """Return the tables as text."""
    killed = results["kills"]
    lines = [
        f"{killed['kills']} kills, {killed['in_mid_write']} of them in mid-write; {killed['last_round']} rounds saved; "
        f"{len(killed['wrong'])} times something was wrong afterwards",
        f"killed before each of {results['every_step']['steps']} steps of opening, saving, replacing and closing; "
        f"{len(results['every_step']['wrong'])} times something was wrong afterwards",
        *(f"  wrong: {problem}" for problem in killed["wrong"] + results["every_step"]["wrong"]),
        "",
        table([["left behind", "times"], *([step, str(times)] for step, times in sorted(killed["left"].items()))]),
        "",
        table(
            [
                ["damage", "times", "detected and named", "the one before used"],
                *(
                    [name, *(str(results[kind][part]) for part in ("times", "named", "fell_back"))]
                    for kind, name in (("flips", "one bit flipped"), ("cuts", "one file truncated"))
                ),
            ]
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
