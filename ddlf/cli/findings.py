"""Derives the findings of ``ddlf doctor`` from facts: each problem, and how to repair it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from ddlf.errors import ConfigError, DDLFError
from ddlf.worker.cards import REPAIR
from ddlf.worker.machine import TENSORFLOWS

LITTLE_MEMORY = 10**9
"""An executor with TensorFlow takes about as much."""
LITTLE_DISK = 10**9
LITTLE_CARD_MEMORY = 10**9
"""CUDA and the kernels of a framework take about as much."""
OLDEST_CUDA = 12
"""The earliest CUDA that current versions of the frameworks are built for."""
CLOCK_S = 2.0
"""Largest difference of two clocks that does not make times in logs and records misleading."""
SLOW_MBS = 15.0
"""A link that is slower than this may have a cable or a switch port of 100 Mbit/s."""
SLOW_SHARE = 0.6
"""A link with less than this share of the usual speed is reported."""
FAST_MBS = 100.0
"""A link that is faster than this does not count as slow, however fast the other links are."""
COMPARED = {"keras": 2, "tensorflow": 2, "jax": 2, "torch": 2, "numpy": 1}
"""How many numbers of a version have to be equal."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A finding of ``ddlf doctor``: a problem, and how to repair it.

    Args:
        level: ``"error"``, a run would end with it; ``"warning"``, a run would be slow, or may fail later.
        where: The machines, as ``("this machine", "worker 2 (pc02)")``.
        what: The problem.
        do: The repair.
        exit_code: The exit code of a run with this problem; 1 for a warning.
    """

    level: Literal["error", "warning"]
    where: tuple[str, ...]
    what: str
    do: str
    exit_code: int = 1


def joined(findings: Iterable[Problem]) -> list[Problem]:
    """Sort findings, errors first, and join the same problem on several machines to one finding."""
    machines_of: dict[Problem, list[str]] = {}
    for finding in findings:
        machines = machines_of.setdefault(replace(finding, where=()), [])
        machines += [machine for machine in finding.where if machine not in machines]
    rows = [replace(finding, where=tuple(machines)) for finding, machines in machines_of.items()]
    return sorted(rows, key=lambda finding: finding.level != "error")


def problem_of_error(error: DDLFError, where: str) -> Problem:
    """Return the finding for an error that occurred when ``ddlf doctor`` asked a worker."""
    do = error.hint or (
        "correct it, and run this command again" if isinstance(error, ConfigError) else "check the worker's terminal"
    )
    return Problem("error", (where,), error.message, do, error.exit_code)


def machine_problems(facts: dict[str, Any], where: str) -> Iterator[Problem]:
    """Yield the problems that the facts about one machine show.

    Args:
        facts: The result of ``ddlf.worker.machine.machine_facts``.
        where: Name of the machine, for people.
    """

    def warning(sentence: str, do: str) -> Problem:
        return Problem("warning", (where,), sentence, do)

    packages = facts["packages"]
    if unmet := facts["unmet"]:
        requirements = " ".join(f"'{text.partition(' (')[0]}'" for text in unmet)
        yield warning(f"needed, and not there: {', '.join(unmet)}", f"python -m pip install {requirements}")
    installed = [name for name in TENSORFLOWS if name in packages]
    if len(installed) > 1:
        extra = "tensorflow-gpu" if facts.get("gpus", {}).get("cards") else "tensorflow"
        yield warning(
            f"{' and '.join(f'{name} {packages[name]}' for name in installed)} are both installed; they have the same files, and each has "
            "overwritten some",
            f"python -m pip uninstall -y {' '.join(installed)} && python -m pip install 'ddlf[{extra}]'",
        )
    yield from card_problems(facts.get("gpus", {}), where)
    if "keras" in packages and not facts["has_backend"]:
        yield warning(
            f"Keras would use {facts['keras_backend']}, which is not installed",
            "install it, or say which to use with KERAS_BACKEND",
        )
    if facts["without_bytecode"]:
        forbidden = (
            "" if facts["may_write_bytecode"] else ", and PYTHONDONTWRITEBYTECODE is set, so that none is written"
        )
        yield warning(
            f"there is no bytecode of {' and '.join(facts['without_bytecode'])}{forbidden}: each start takes seconds longer",
            f"python -m compileall -q -j 0 {facts['libraries']}"
            + " (and unset PYTHONDONTWRITEBYTECODE)" * bool(forbidden),
        )
    free = facts["memory_free"]
    if free is not None and free < LITTLE_MEMORY:
        yield warning(
            f"{_gb(free)} of {_gb(facts['memory'])} memory is free, a worker with TensorFlow takes about 1 GB",
            "end other programs there, or use fewer workers on it",
        )
    for disk in facts["disks"]:
        if disk["free"] < LITTLE_DISK:
            yield warning(
                f"the disk of {disk['folder']} has {_gb(disk['free'])} of {_gb(disk['size'])} left",
                f"free some space: du -xh {disk['folder']} | sort -h | tail",
            )


def card_problems(gpus: dict[str, Any], where: str) -> Iterator[Problem]:
    """Yield the problems that the facts about the cards of one machine show.

    Args:
        gpus: The result of ``ddlf.worker.cards.facts_of_cards``; empty for a worker of an earlier release.
        where: Name of the machine, for people.
    """

    def warning(sentence: str, do: str) -> Problem:
        return Problem("warning", (where,), sentence, do)

    if gpus.get("problem"):
        yield warning(gpus["problem"], gpus["do"])
    if not gpus.get("cards"):
        return
    package, cuda, extra = gpus["package"], gpus["build_cuda"], gpus["extra"]
    install = f"python -m pip install 'ddlf[{extra}]'" if extra else "choose another backend with KERAS_BACKEND"
    if package and not cuda:
        remove = f"python -m pip uninstall -y {package.partition(' ')[0]} && " * package.startswith("tensorflow-cpu")
        yield warning(f"{package} computes on CPUs only, and the machine has cards", remove + install)
    elif is_driver_old(gpus):
        older = f", or a {package.partition(' ')[0]} for CUDA {_major(gpus['cuda'])}"
        yield warning(
            f"{package} is built for CUDA {cuda}, and the driver {gpus['driver']} supports CUDA up to {gpus['cuda']}",
            f"install a driver for CUDA {_major(cuda)}" + older * (_major(gpus["cuda"]) >= OLDEST_CUDA),
        )
    if gpus["wrong"]:
        yield warning(gpus["wrong"], "change CUDA_VISIBLE_DEVICES, or unset it")
    for card in gpus["cards"]:
        if card["number"] not in gpus["seen"]:
            continue
        if card.get("lost"):  # daemons of earlier releases do not know it
            yield warning(
                f"no worker takes the card {card['number']} ({card['name']}), because it {card['lost']}", REPAIR
            )
        elif card["free"] < LITTLE_CARD_MEMORY:
            users = ", ".join(map(str, card["processes"])) or "that this machine does not show"
            yield warning(
                f"the card {card['number']} ({card['name']}) has {_gb(card['free'])} of {_gb(card['memory'])} memory free",
                f"end what uses it (processes {users}), or choose another card with --gpus",
            )
        elif programs := _foreign_processes(card["processes"], gpus.get("programs", {})):
            yield warning(
                f"the card {card['number']} ({card['name']}) is busy with {', '.join(programs)}: a worker would be slow there",
                "wait for it, end it, or choose another card with --gpus",
            )


def is_driver_old(gpus: dict[str, Any]) -> bool:
    """Return whether the framework is built for a later CUDA than the driver supports, so that no card can be used."""
    return bool(gpus["build_cuda"]) and _major(gpus["build_cuda"]) > _major(gpus["cuda"])


def check_problems(problems: Iterable[tuple[str, str, str]], where: str) -> Iterator[Problem]:
    """Yield a finding for each problem of cards in use. Cards with the same one are in one finding.

    Args:
        problems: For each card that failed: its number and name, the problem, and the repair.
        where: Name of the machine, for people.
    """
    cards: dict[tuple[str, str], list[str]] = {}
    for card, problem, do in problems:
        cards.setdefault((problem, do), []).append(card)
    for (problem, do), names in cards.items():
        yield Problem("warning", (where,), f"the card{'s' * (len(names) > 1)} {', '.join(names)}: {problem}", do)


def _foreign_processes(processes: Iterable[int], programs: dict[str, str]) -> list[str]:
    """Return the processes on a card that do not belong to DDLF, for people."""
    names = {pid: programs.get(str(pid), "") for pid in processes}
    return [f"process {pid}" + f" ({name})" * bool(name) for pid, name in names.items() if not name.startswith("ddlf")]


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def version_problems(this_machine: dict[str, Any], worker_machine: dict[str, Any], where: str) -> Iterator[Problem]:
    """Yield the findings about a worker's packages whose versions do not fit this machine's packages."""
    python = _first(this_machine["python"], 2)
    if _first(worker_machine["python"], 2) != python:
        yield Problem(
            "error",
            (where,),
            f"Python {worker_machine['python']} there, {this_machine['python']} here: functions travel between equal minor versions only",
            f"install Python {python} there",
            4,
        )
    if worker_machine["ddlf"] != this_machine["ddlf"]:
        yield Problem(
            "warning",
            (where,),
            f"DDLF {worker_machine['ddlf']} there, {this_machine['ddlf']} here",
            f"install the same on both, as with: python -m pip install ddlf=={this_machine['ddlf']}",
        )
    elif has_other_source(this_machine, worker_machine):
        yield Problem(
            "warning",
            (where,),
            f"other source of DDLF {this_machine['ddlf']} there than here: results may differ",
            "install the same there, or update that checkout, and start the worker again",
        )
    for name, count in COMPARED.items():
        version_here, version_there = (_version(facts, name) for facts in (this_machine, worker_machine))
        if version_here and version_there and _first(version_here, count) != _first(version_there, count):
            yield Problem(
                "warning",
                (where,),
                f"{name} {version_there} there, {version_here} here: results may differ, or what one writes the other cannot read",
                f"python -m pip install '{name}=={version_here}' there",
            )
    version_here, version_there = (_version(facts, "keras") for facts in (this_machine, worker_machine))
    if bool(version_here) != bool(version_there):
        yield Problem(
            "error",
            (where,),
            f"Keras is {'here, but not there' if version_here else 'there, but not here'}: training needs it on both",
            f"python -m pip install 'ddlf[tensorflow]' {'there' if version_here else 'here'}",
        )


def has_other_source(this_machine: dict[str, Any], worker_machine: dict[str, Any]) -> bool:
    """Return whether a worker's DDLF has other source files. A worker of an earlier release does not say it."""
    return bool(worker_machine.get("source", this_machine["source"]) != this_machine["source"])


def clock_problems(offset_s: float, where: str) -> Iterator[Problem]:
    """Yield a finding if a worker's clock is wrong. It is ahead of this machine's clock by this number of seconds."""
    if abs(offset_s) > CLOCK_S:
        yield Problem(
            "warning",
            (where,),
            f"its clock is {abs(offset_s):.0f} s {'ahead of' if offset_s > 0 else 'behind'} this machine's: times of logs "
            "and records mislead",
            "set it by the network: sudo timedatectl set-ntp true",
        )


def problem_of_pair(caller: str, called: str, reason: str) -> Problem:
    """Return the finding that one worker cannot reach another."""
    return Problem(
        "warning",
        (caller,),
        f"it cannot reach {called}: {reason}",
        "let a firewall pass that, or say where others reach it: ddlf-worker --advertise HOST:PORT; else train with exchange='star'",
    )


def speed_problems(speeds: dict[str, tuple[float, float]]) -> Iterator[Problem]:
    """Return the findings about slow links: slow by themselves, or slower than the others if there are three or more.

    Args:
        speeds: Speeds to and from each worker, in MB/s, by the worker's name for people.
    """
    usual = [statistics.median(column) if len(column) > 2 else 0.0 for column in zip(*speeds.values(), strict=True)]
    for where, pair in speeds.items():
        odd = [
            speed / usual_speed
            for speed, usual_speed in zip(pair, usual, strict=True)
            if speed < min(SLOW_SHARE * usual_speed, FAST_MBS)
        ]
        if min(pair) < SLOW_MBS or odd:
            yield Problem(
                "warning",
                (where,),
                f"{pair[0]:.1f} MB/s to it, {pair[1]:.1f} MB/s from it"
                + (f": {min(odd):.0%} of the usual speed" if odd else ""),
                "check its cable, its switch port and its wireless; else send less: --codec int8 --weights-codec float16",
            )


def _version(facts: dict[str, Any], name: str) -> str:
    names = TENSORFLOWS if name == "tensorflow" else (name,)
    return next((facts["packages"][package] for package in names if package in facts["packages"]), "")


def _first(version: str, count: int) -> str:
    return ".".join(version.split(".")[:count])


def _gb(size: int | None) -> str:
    return "?" if size is None else f"{size / 1e9:.1f} GB"
