"""Repeat the experiment of WebNN: how soon one to four peers reach an accuracy on MNIST, for each merge of two sets.

    python -m benchmarks.webnn [--peers 1,2,3,4] [--rules average,weighted] [--repeats 4] [--target 0.97] [--pace 15]
    python -m benchmarks.webnn --quick          # one repeat of two rules, one and two peers, a low target

The server is ``ddlf peers serve`` in its own process. Each peer is a process with its own connection, too, and trains
all runs one after another, so that Keras compiles once. A peer trains ``--pace`` batches per second at most. The pace is
reached if the table has it in the last column: so peers are equally fast, however many share the cores.

Model, batches of 64, plain SGD at 0.2 and criterion are those of WebNN (Goin, Cotton, Zhao 2018). Each peer draws from
all training images. The server validates with the same test images each ``--validate-s`` seconds; the target is reached when the mean
of the last 5 validations reaches it. All numbers are read from the journal of the run. A peer that trains alone never
merges, so one peer is the baseline of all rules. Runs take turns, repeat by repeat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Protocol

from benchmarks.measure import mean_and_deviation, table

RULES = ("average", "weighted", "mimic", "copy", "elastic")
ONE = "one peer"
ERRORS = "errors.log"
LAST = 5
Run = dict[str, Any]
"""Facts of a run: ``rule``, ``peers``, ``seed``, ``reached``, ``seconds``, ``updates``, ``best``, ``pace``."""


# -- a peer ---------------------------------------------------------------------------------------------------------------


def be_a_peer(pace: float, samples: int | None) -> None:
    """Take part in one run for each line of the input. Prints ``ready``, then a line for each run."""
    from ddlf.data.datasets import load_mnist
    from ddlf.peers.link import Offer
    from ddlf.peers.model import Trained, trained_from_text
    from ddlf.peers.peer import Peer
    from ddlf.peers.training_folders import WEBNN

    (x, y), (x_test, y_test) = load_mnist()
    data = {"x_train": x[:samples], "y_train": y[:samples], "x_test": x_test[:64], "y_test": y_test[:64]}
    first = trained_from_text(WEBNN, data, "mnist", lambda line: None, 0)
    first.batch(64)  # Keras compiles now
    print("ready", flush=True)

    class Paced(Trained):
        """Trains at most ``pace`` batches per second."""

        due = 0.0

        def batch(self, size: int) -> None:
            now = time.monotonic()
            time.sleep(max(0.0, self.due - now))
            self.due = max(self.due, now - 1.0 if self.due else now) + 1 / pace  # makes up for at most a second
            super().batch(size)

    for line in sys.stdin:
        request = json.loads(line)

        def make(offer: Offer, seed: int = request["seed"]) -> Trained:
            peer_model = Paced(first.model, first._data, seed)
            peer_model.set_rate(offer.plan.rate)
            return peer_model

        peer = Peer(request["link"], make, say=lambda line: None)
        peer.run()
        print(json.dumps({"updates": peer.updates, "merges": peer.merges}), flush=True)


# -- runs -----------------------------------------------------------------------------------------------------------------


class Process(Protocol):
    """A process of ``subprocess`` with text pipes."""

    stdin: Any
    stdout: Any


@contextlib.contextmanager
def started(words: Sequence[object], folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a command of Python, and kill it at the end."""
    with (folder / ERRORS).open("a") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"DDLF_RUN_DIR": str(folder / "runs"), "CUDA_VISIBLE_DEVICES": ""},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


@contextlib.contextmanager
def errors_of(folder: Path) -> Iterator[None]:
    """Print the errors of all processes if the measurement fails."""
    try:
        yield
    except BaseException:
        print((folder / ERRORS).read_text()[-4_000:], file=sys.stderr)
        raise


def until(process: Process, pattern: str) -> re.Match[str]:
    """Read lines of a process until one matches, and return the match."""
    for line in process.stdout:
        if match := re.search(pattern, line):
            return match
    raise RuntimeError(f"the process ended before a line with {pattern!r}")


def run(folder: Path, rule: str, peers: Sequence[Process], seed: int, options: argparse.Namespace) -> Run:
    """Train once, until the target or the last second, and return facts of the run."""
    from ddlf.peers.running_server import SERVER, read_server

    out = folder / f"{rule}-{len(peers)}-{seed}"
    words = ["ddlf.cli.main", "peers", "serve", folder / "webnn.nnm", "--data", folder / "test.npz"]
    words += ["--merge", rule, "--updates", options.updates, "--batch-size", 64, "--end", options.target]
    words += ["--validate-s", options.validate_s, "--invite", len(peers), "--port", 0, "--seed", seed, "--out", out]
    with started(words, folder) as server:
        links = [until(server, r"link +(\S+)")[1] for _ in peers]
        [path] = out.glob("*-peers-webnn")
        for number, (peer, link) in enumerate(zip(peers, links, strict=True)):
            peer.stdin.write(json.dumps({"link": link, "seed": 100 * seed + number}) + "\n")
            peer.stdin.flush()
        begun = time.monotonic()
        while server.poll() is None and time.monotonic() < begun + options.most_seconds:
            time.sleep(0.1)
        if server.poll() is None:
            read_server(path / SERVER).stop()
        for peer in peers:
            until(peer, "updates")
        server.wait()
    return {"rule": rule, "peers": len(peers), "seed": seed, **facts_of(path, options.target)}


def facts_of(path: Path, target: float) -> Run:
    """Return whether and when the target was reached, from the journal of a run."""
    from ddlf.peers.entries import Arrived, Ended, Posted, Validated
    from ddlf.peers.journal import history

    entries = list(history(path))
    begun = next(entry.at for entry in entries if isinstance(entry, Arrived))
    ended = next((entry.at for entry in entries if isinstance(entry, Ended)), entries[-1].at)
    tests = [entry.accuracy for entry in entries if isinstance(entry, Validated)]
    posts = [entry for entry in entries if isinstance(entry, Posted)]
    peers, seconds = len({entry.peer for entry in posts}), ended - begun
    updates = sum(entry.updates for entry in posts)
    reached = len(tests) >= LAST and statistics.fmean(tests[-LAST:]) >= target
    pace = updates / max(peers, 1) / seconds
    return {
        "reached": reached,
        "seconds": seconds,
        "updates": updates,
        "best": max(tests, default=0.0),
        "pace": pace,
    }


# -- results --------------------------------------------------------------------------------------------------------------


def rows(runs: Sequence[Run], target: float) -> list[list[str]]:
    """Return the table: mean and standard deviation over the repeats that reached the target."""
    cells_of_rows = [
        ["rule", "peers", f"reached {target:.0%}", "batches of all", "of each", "seconds", "best", "batches/s of each"]
    ]
    for rule, peers in dict.fromkeys((run["rule"], run["peers"]) for run in runs):
        own_runs = [run for run in runs if (run["rule"], run["peers"]) == (rule, peers)]
        reached_runs = [run for run in own_runs if run["reached"]]
        cells = ["-"] * 3
        if reached_runs:
            cells = [
                mean_and_deviation([run["updates"] for run in reached_runs], ".0f"),
                f"{statistics.fmean(run['updates'] for run in reached_runs) / peers:.0f}",
                mean_and_deviation([run["seconds"] for run in reached_runs], ".1f"),
            ]
        best = mean_and_deviation([run["best"] for run in own_runs], ".3f")
        pace = mean_and_deviation([run["pace"] for run in own_runs], ".1f")
        cells_of_rows.append([rule, str(peers), f"{len(reached_runs)} of {len(own_runs)}", *cells, best, pace])
    return cells_of_rows


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds to the target of one rule and number of peers.

    Args:
        seconds: Mean; infinity if a repeat has not reached the target.
        spread: Standard deviation.
    """

    seconds: float
    spread: float = 0.0

    def __str__(self) -> str:
        return "not each time" if self.seconds == inf else f"{self.seconds:.1f} s"

    def compared(self, other: Measured) -> int:
        """Return -1 if it took less time than the other, 1 if more, and 0 if they differ by less than a deviation."""
        if self.seconds == other.seconds:
            return 0
        is_clear = abs(self.seconds - other.seconds) > max(self.spread, other.spread)
        return 0 if not is_clear else -1 if self.seconds < other.seconds else 1


def claims(runs: Sequence[Run]) -> list[str]:
    """Return a sentence on each published claim that the runs can answer.

    Rules are compared at the largest number of peers. Two of them differ if their means are more than the larger
    standard deviation apart. A rule whose repeats did not all reach the target is the slowest.
    """
    measured_of = measured(runs)
    most = max(peers for _, peers in measured_of)
    rules = {rule: value for (rule, peers), value in measured_of.items() if peers == most > 1}
    averages = {peers: value for (rule, peers), value in measured_of.items() if rule == "average"}
    alone = measured_of.get((ONE, 1))
    ranked = ", ".join(f"{rule} {rules[rule]}" for rule in sorted(rules, key=lambda rule: rules[rule].seconds))
    sentences = []

    def say(claim: str, answer: str, explanation: str) -> None:
        sentences.append(f"published: {claim}. measured: {answer}: {explanation}")

    for rule, claim, sign in (("weighted", "weighted is the best", -1), ("mimic", "mimic is the worst", 1)):
        if rule in rules and len(rules) > 1:
            orders = [rules[rule].compared(other) for name, other in rules.items() if name != rule]
            answer = "yes" if set(orders) == {sign} else "no" if -sign in orders else "not clear"
            say(claim, answer, f"with {most} peers {ranked}")
    if "copy" in rules and alone:
        order = rules["copy"].compared(alone)
        answer = {-1: "no, it is faster", 0: "yes", 1: "no, it is slower"}[order]
        say("copy equals one peer", answer, f"copy {rules['copy']} with {most} peers, one peer {alone}")
    if len(averages) > 1:
        few, many = averages[min(averages)], averages[max(averages)]
        shown = ", ".join(f"{peers} peers {value}" for peers, value in sorted(averages.items()))
        say("average suffers from many peers", "yes" if many.compared(few) > 0 else "no", shown)
    if alone and rules:
        orders = [alone.compared(other) for other in rules.values()]
        answer = "yes" if set(orders) == {-1} else "no" if 1 in orders else "not clear"
        say("one peer looks faster than all", answer, f"one peer {alone}; with {most} peers {ranked}")
    return sentences


def measured(runs: Sequence[Run]) -> dict[tuple[str, int], Measured]:
    """Return the time to the target by rule and number of peers."""
    result = {}
    for key in dict.fromkeys((run["rule"], run["peers"]) for run in runs):
        own_runs = [run for run in runs if (run["rule"], run["peers"]) == key]
        times = [run["seconds"] for run in own_runs]
        spread = statistics.stdev(times) if len(times) > 1 else 0.0
        all_there = all(run["reached"] for run in own_runs)
        result[key] = Measured(seconds=statistics.fmean(times), spread=spread) if all_there else Measured(seconds=inf)
    return result


def main(options: argparse.Namespace, peer: Sequence[object] = ()) -> list[Run]:
    """Measure in turns, print the table and a sentence on each claim, and return the runs.

    Args:
        options: The options.
        peer: Command of Python that is a peer, like ``benchmarks.webnn --peer``; empty for that command.
    """
    import numpy as np

    from ddlf.data.datasets import load_mnist
    from ddlf.peers.training_folders import WEBNN

    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as temporary, errors_of(Path(temporary)), contextlib.ExitStack() as stack:
        folder = Path(temporary)
        (folder / "webnn.nnm").write_text(WEBNN, encoding="utf-8")
        _, (x, y) = load_mnist()
        np.savez(folder / "test.npz", x=x[:: options.every], y=y[:: options.every])
        python = ["benchmarks.webnn", "--peer", "--pace", options.pace]
        python += ["--samples", options.samples] if options.samples else []
        processes = [stack.enter_context(started(peer or python, folder)) for _ in range(max(options.peers))]
        for process in processes:
            until(process, "ready")
        for seed in range(options.repeats):
            for peers in options.peers:
                for rule in options.rules if peers > 1 else (ONE,):
                    name = "weighted" if rule == ONE else rule
                    runs.append(run(folder, name, processes[:peers], seed, options) | {"rule": rule})
                    print(json.dumps(runs[-1]), flush=True)
    print(table(rows(runs, options.target)))
    print("\n".join(claims(runs)))
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    return runs


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rules", type=lambda text: text.split(","), default=list(RULES), help=f"of {', '.join(RULES)}"
    )
    parser.add_argument("--peers", type=lambda text: [int(number) for number in text.split(",")], default=[1, 2, 3, 4])
    parser.add_argument("--repeats", type=int, default=4, help="each with its own seed")
    parser.add_argument("--target", type=float, default=0.97, help="test accuracy, mean of the last 5")
    parser.add_argument("--pace", type=float, default=15.0, help="most batches per second of each peer")
    parser.add_argument("--updates", type=int, default=10, help="batches between two posts of a peer")
    parser.add_argument("--every", type=int, default=10, help="validate with each N-th test image")
    parser.add_argument("--validate-s", type=float, default=0.5, help="seconds between two validations")
    parser.add_argument("--most-seconds", type=float, default=180.0, help="end of a run that does not reach the target")
    parser.add_argument("--samples", type=int, default=None, help="training images of a peer (default: all)")
    parser.add_argument("--quick", action="store_true", help="the short form")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    return parser


QUICK: dict[str, Any] = {
    "rules": ["weighted", "copy"],
    "peers": [1, 2],
    "repeats": 1,
    "target": 0.8,
    "samples": 3_000,
    "every": 20,
    "most_seconds": 60.0,
}

if __name__ == "__main__":
    arguments = parser()
    if "--quick" in sys.argv:
        arguments.set_defaults(**QUICK)
    chosen = arguments.parse_args()
    if chosen.peer:
        be_a_peer(chosen.pace, chosen.samples)
    else:
        main(chosen)
