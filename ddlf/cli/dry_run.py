"""``ddlf run --dry-run``: print the plan of a run after all its checks, and start nothing. Runs on the master."""

from __future__ import annotations

import argparse
import ast
import inspect
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlf.app import IApp
from ddlf.cli.card_lines import card_lines
from ddlf.cli.config import setting_rows
from ddlf.cli.doctor import HERE, Answer, answer_problems, ask_workers, difference, size, versions
from ddlf.cli.findings import Problem, joined, machine_problems, problem_of_error
from ddlf.cli.options import new_workers, reads_cluster_file
from ddlf.cli.target import needs_of
from ddlf.cluster.config.addresses import find_config
from ddlf.cluster.config.cluster_file import load_config
from ddlf.cluster.link import CONNECT_TIMEOUT_S
from ddlf.cluster.sources import find, script_folder
from ddlf.errors import ConfigError, LeaseError, VersionError
from ddlf.extras import hooks
from ddlf.privacy import visible
from ddlf.privacy.contradictions import Choice
from ddlf.rpc.code import own_modules
from ddlf.training.refusals import privacy_choice
from ddlf.training.registry import spec_of
from ddlf.training.strategy import strategy_and_exchange
from ddlf.worker.assignment import CardWish, cards_for, unused_cards
from ddlf.worker.machine import machine_facts
from ddlf.worker.status import ExecutorInfo

if TYPE_CHECKING:
    from ddlf.cluster.cluster import Cluster


async def plan(target: Any, cluster: Cluster, described: str, options: argparse.Namespace) -> int:
    """Print the plan of a run and return the exit code. If the run could not begin, it is the run's exit code.

    Args:
        target: The app, with its settings checked, or the function.
        cluster: The cluster, not connected. Its workers are guests, so no run is disturbed.
        described: A description of the cluster, for people.
        options: The parsed options.
    """
    text = getattr(target, "notation", None) if getattr(target, "takes_data", False) else None
    file = text.file if text else inspect.getfile(type(target) if isinstance(target, IApp) else target)
    needs = needs_of(target)
    this_machine = machine_facts(needs=needs)
    app = target if isinstance(target, IApp) else None
    print(f"cluster   {described}")
    answers: list[Answer] = []
    starts, timeout_s, enough = _facts_of_cluster_file(cluster, options)
    if options.listen:
        print(f"          {cluster.N} would join here: ddlf-worker --join HOST:{options.listen[1]}")
        await cluster.close()
    elif new_workers(options) or options.launcher or starts:
        print(f"          {cluster.N} would be started, each with {versions(this_machine)}")
        if new_workers(options):  # the run would refuse wrong cards, too
            gpus = cards_for(cluster.N, CardWish(options.gpus, options.gpu_memory))
            for cards in card_lines(gpus, app is not None and app.deterministic):
                print(f"cards     {cards}")
            for reason in unused_cards() if options.gpus is None else ():
                print(f"cards     unused: {reason}")
    else:
        answers = await ask_workers(cluster.workers, timeout_s, print, needs)
        await cluster.close()
        width = max(len(answer.name) for answer in answers)
        for answer in answers:
            print(f"          {answer.name:<{width}}  {_line(this_machine, answer)}")
    named = "the text" if text else f"class {type(app).__name__}" if app else f"function {target.__name__}"
    print(f"loads     {named} of {_short_path(file)}")
    if app:
        where = ", which only workers load," if app.private else ""
        print(
            f"          Keras with {this_machine['keras_backend']}, what load_dataset loads{where} and create_model builds, on every node"
        )
        if folder := os.environ.get("DDLF_DATA"):
            print(f"          data sets from DDLF_DATA={folder} on this machine, and from that of each worker")
        for number, decision in enumerate(text.decisions if text else ()):
            print(
                f"{'' if number else 'decides':<9} {decision.block}:{decision.key} {decision.value}: {decision.reason} ({decision.rule})"
            )
        _print_settings(app, options)
        spec = spec_of(app)
        _print_visible(privacy_choice(spec))
        if spec.peer is not None:
            print("          The run posts its weights as a peer, too: its link opens a page that says who sees those.")
        if preview := await strategy_and_exchange(spec)[1].preview(app, spec):
            print(f"exchange  {spec.exchange.name}: {preview}")
        for preview_plan in hooks("preview_plan"):
            if preview := preview_plan(app, _executors(cluster, this_machine, answers, options)):
                print(f"plan      {preview}")
    _print_files()
    findings = [
        *machine_problems(this_machine, HERE),
        *(finding for answer in answers for finding in answer_problems(this_machine, answer)),
        *(card_findings := list(_wrong_card_problems(cluster, answers))),
    ]
    # The run would refuse this, too.
    lacking = [answer.machine["unmet"] for answer in answers if answer.error is None] or [this_machine["unmet"]]
    refused = VersionError.exit_code if needs and all(lacking) else 0
    for finding in joined(findings):
        print(f"{finding.level:<8}  {', '.join(finding.where)}: {finding.what}\n     try  {finding.do}")
    print("done      --dry-run: nothing was started or trained")
    refused = ConfigError.exit_code if card_findings else refused
    return _exit_code(answers, enough, options) or refused


def _wrong_card_problems(cluster: Cluster, answers: Sequence[Answer]) -> Iterator[Problem]:
    """Yield the problems of workers that were started with other cards than cluster.yaml says."""
    from ddlf.cluster.cluster import check_cards

    for worker, answer in zip(cluster.workers, answers, strict=False):
        if answer.status is not None and answer.error is None:
            try:
                check_cards(cluster, worker, answer.status.gpus, answer.status.gpu_uuids)
            except ConfigError as error:
                yield problem_of_error(error, answer.name)


def _facts_of_cluster_file(cluster: Cluster, options: argparse.Namespace) -> tuple[bool, float, int]:
    """Return three facts of the cluster file: whether the run may start workers, the seconds that each worker may take,
    and the required number of workers.
    """
    path = find_config(options.config) if reads_cluster_file(options) else None
    if path is None:
        return False, CONNECT_TIMEOUT_S, cluster.N
    config = load_config(options.config)
    return config.launcher is not None, config.run.connect_timeout_s, config.run.min_workers or cluster.N


def _executors(
    cluster: Cluster, this_machine: dict[str, Any], answers: Sequence[Answer], options: argparse.Namespace
) -> list[ExecutorInfo]:
    """Return the executor that each worker would have; an unknown one if its machine is unknown."""
    machines = [answer.machine for answer in answers]
    if not machines:
        machines = [this_machine if new_workers(options) else {}] * cluster.N
    # An executor reports the cards that it has got.
    return [
        ExecutorInfo()
        if not machine or machine["gpus"]["cards"]
        else ExecutorInfo(host=machine["host"], python=machine["python"], cores=machine["cores"])
        for machine in machines
    ]


def _line(this_machine: dict[str, Any], answer: Answer) -> str:
    if answer.status is None or answer.error is not None:
        return "no answer, see below"
    lease = answer.status.lease
    used = f"; in use by {lease.holder} since {lease.since}" if lease else ""
    return f"{difference(this_machine, answer.machine)}; {size(answer.machine)}{used}"


def _print_settings(app: IApp, options: argparse.Namespace) -> None:
    rows = list(setting_rows(app, options))
    changed = [row for row in rows if row[2] != "default"]
    names, values = (max((len(row[column]) for row in changed), default=0) for column in (0, 1))
    for number, (name, value, where) in enumerate(changed):
        print(f"{'' if number else 'settings':<9} {name:<{names}}  {value:<{values}}  {where}")
    print(
        f"{'' if changed else 'settings':<9} {len(rows) - len(changed)} others have their defaults; see: ddlf config show"
    )


def _print_visible(choice: Choice) -> None:
    """Print the updates and samples that each party sees."""
    column = visible.column_for(choice)
    rows = [visible.Row(party="who", updates="sees of a worker's updates", samples="of its data"), *column.rows()]
    names, updates = (max(len(getattr(row, name)) for row in rows) for name in ("party", "updates"))
    for number, row in enumerate(rows):
        print(f"{'' if number else 'sees':<9} {row.party:<{names}}  {row.updates:<{updates}}  {row.samples}")
    learns = f"The master also learns {column.also}."
    for sentence in (visible.UPDATE, column.before, learns, *column.remaining(choice)):
        if sentence:
            print(f"          {sentence}")


def _print_files() -> None:
    folder = script_folder()
    at_once = {Path(module.__file__).resolve() for module in own_modules()}
    later = _on_demand(folder, at_once) if folder else set()
    for number, file in enumerate(sorted(at_once)):
        print(f"{'' if number else 'ships':<9} {_short_path(file)}  {file.stat().st_size / 1e3:.1f} kB")
    for file in sorted(later):
        print(f"          {_short_path(file)}  {file.stat().st_size / 1e3:.1f} kB, when a function imports it")
    if not at_once | later:
        print("ships     no file: what is called travels by itself")


def _on_demand(folder: Path, files: set[Path]) -> set[Path]:
    """Return the files below the script's folder that functions in these files import when they run, also indirectly."""
    modules: set[Path] = set()
    todo = list(files)
    while todo:
        for name in _imported(todo.pop()):
            found_module = find(folder, name)
            if (
                found_module is not None
                and found_module[0] != "namespace"
                and (path := found_module[1].resolve()) not in files | modules
            ):
                modules.add(path)
                todo.append(path)
    return modules


def _imported(file: Path) -> Iterator[str]:
    """Return the full names that a file may import; for ``from a import b`` both ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _short_path(path: str | Path) -> str:
    """Return a path relative to the current folder, if it is inside."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _exit_code(answers: list[Answer], enough: int, options: argparse.Namespace) -> int:
    """Return the exit code: 0 if the run could begin."""
    if any(answer.status and answer.status.lease for answer in answers) and not (options.takeover or options.wait):
        return LeaseError.exit_code
    errors = [answer.error for answer in answers if answer.error is not None]
    return max((error.exit_code for error in errors), default=0) if len(answers) - len(errors) < enough else 0
