"""Tables of a run, of several runs, or of a run's workers, as CSV, LaTeX and text."""

from __future__ import annotations

import csv
import io
import re
import time
import unicodedata
from collections.abc import Sequence
from math import isfinite

from ddlf.events.record import size
from ddlf.monitor.dashboard.board import Board
from ddlf.monitor.runs.run_reader import Past
from ddlf.monitor.state import Portions, State, Sums, WorkerLane

Rows = list[list[str]]
"""Rows of cells. The first row has the names of the columns."""
TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"} | {
    c: f"\\{c}" for c in "&%$#_{}"
}

NUMBER = re.compile(r"|NaN|-?inf|-?\d[\d.,:/]*(e[-+]?\d+)?( [kMGT]?B| s)?")


def run_rows(pasts: Sequence[Past]) -> Rows:
    """Return a table that compares runs, with a row for each quantity and a column for each run. Quantities that no run
    has are left out.
    """
    columns = [_quantities(past) for past in pasts]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "") for column in columns)] for name in names]
    return [["quantity", *(past.path.name for past in pasts)], *(row for row in rows if any(row[1:]))]


def _quantities(past: Past) -> dict[str, str]:
    began, built, data = (past.facts.get(name) for name in ("RunBegan", "ModelBuilt", "DataLoaded"))
    facts = {
        "application": past.status.app,
        "state": past.status.state,
        "restarts": f"{past.status.restarts or ''}",
        "mode": began.mode if began else "",
        "model": built.name if built else "",
        "parameters": f"{built.parameters}" if built else "",
        "training samples": f"{data.samples}" if data else "",
        **(_of_peers(past) if peer_count(past) else _of_workers(past)),
        "samples per round": f"{began.round_samples}" if began and began.round_samples else "",
        "batches per round": f"{began.worker_steps}" if began and began.worker_steps else "",
        "seed": f"{began.seed}" if began else "",
    }
    for name in ("merge", "outer", "codec", "weights_codec", "precision", "optimizer_state"):
        facts[name.replace("_", " ")] = str(past.setting(name) or "")
    return facts | _measured(past)


def _of_workers(past: Past) -> dict[str, str]:
    began, training = past.facts.get("RunBegan"), past.facts.get("TrainingBegan")
    return {
        "workers": f"{training.workers}" if training else "",
        "slots": f"{past.records[-1].slots or (training.slots if training else 0)}" if past.records else "",
        "batch size per worker": f"{began.batch_size}" if began else "",
        "local epochs per round": f"{began.worker_epochs}"
        if began and not (began.worker_steps or began.round_samples)
        else "",
    }


def _of_peers(past: Past) -> dict[str, str]:
    began = past.facts.get("RunBegan")
    return {"peers": f"{peer_count(past)}", "batch size of peers": f"{began.batch_size}" if began else ""}


def peer_count(past: Past) -> int:
    """Return the number of peers with private data that have taken part; 0 in a run of workers."""
    return sum(lane.is_peer for lane in past.board.state.lanes.values())


def _measured(past: Past) -> dict[str, str]:
    records = past.records
    if not records:
        return {"total time (s)": number(past.seconds)}
    last, count = records[-1], len(records)
    spent = max(past.times[-1] - past.times[0] + records[0].seconds, 1e-9)
    trained = sum(record.samples * record.epochs for record in records)
    unit = "rounds" if last.slot is None else "updates"
    speed = {
        "training time (s)": number(spent),
        "total time (s)": number(past.seconds),
        "samples per second": number(trained / spent),
    }
    if peer_count(past):  # a record has the posts of a short time, and nobody measures the work of peers
        sent, received = (sum(getattr(record, name) for record in records) for name in ("bytes_out", "bytes_back"))
        facts = {"posts": f"{last.version}", **speed, "sent": size(sent), "received": size(received)}
        return facts | _results(past)
    facts = {
        unit: f"{count}",
        **speed,
        f"seconds per {unit[:-1]}": number(sum(record.seconds for record in records) / count),
        "computing, slowest worker (s)": number(sum(record.compute_s for record in records) / count),
        "transfer, slowest worker (s)": number(sum(record.transfer_s for record in records) / count),
        "waiting, mean of workers (s)": number(sum(record.wait_s for record in records) / count),
        f"sent per {unit[:-1]} (MB)": number(sum(record.bytes_out for record in records) / count / 1e6),
        f"received per {unit[:-1]} (MB)": number(sum(record.bytes_back for record in records) / count / 1e6),
    }
    if last.slot is not None:
        facts["mean staleness"] = number(sum(record.staleness for record in records) / count)
        facts["largest staleness"] = f"{max(record.staleness for record in records)}"
    if recomputed := sum(record.recomputed for record in records):
        facts["slots computed again"] = f"{recomputed}"
    return facts | _results(past)


def _results(past: Past) -> dict[str, str]:
    facts = {}
    for name, value in newest(past).items():
        facts[f"final {name.replace('_', ' ')}"] = number(value)
    if (best := best_test(past)) is not None:
        facts["best test accuracy"] = number(best)
    git = past.summary.get("git")
    if git:
        facts["commit"] = git["commit"][:12] + ("" if git["clean"] else " (with changes)")
    facts["ddlf"] = past.summary.get("versions", {}).get("ddlf", "")
    return facts


def newest(past: Past) -> dict[str, float]:
    """Return the newest value of each metric, with ``test_loss`` and so on for the test data."""
    values: dict[str, float] = {}
    for record in past.records[-1:]:
        values |= record.metrics
    for record in reversed(past.records):
        if record.test:
            values |= {f"test_{name}": value for name, value in record.test.items()}
            break
    for record in reversed(past.records):
        values |= {name: value for name, value in record.metrics.items() if name not in values}
        if any(name.startswith("val_") for name in record.metrics):
            break
    return values | {f"test_{name}": value for name, value in past.test.items()}


def best_test(past: Past) -> float | None:
    """Return the best test accuracy during training; None if the run was tested less than twice."""
    accuracies = [
        value for record in past.records for name, value in record.test.items() if "acc" in name and isfinite(value)
    ]
    return max(accuracies) if len(accuracies) > 1 else None


def worker_rows(past: Past) -> Rows:
    """Return a table with a row for each worker of a run, and its share of the work."""
    head = [
        "worker",
        "updates",
        "samples per second",
        "computing (s)",
        "transfer (s)",
        "waiting (s)",
        "lost (s)",
        "sent",
        "received",
        "times lost",
    ]
    rows = [
        [
            share.name,
            f"{share.updates}",
            number(share.trained / share.compute_s) if share.compute_s else "",
            *(number(value) for value in (share.compute_s, share.transfer_s, share.wait_s, share.away_s)),
            size(share.bytes_out),
            size(share.bytes_back),
            f"{share.lost}",
        ]
        for share in past.shares.values()
    ]
    return [head, *rows]


def stay_rows(past: Past) -> Rows:
    """Return a table with a row for each time that a worker was connected: where it was, and why it left."""
    head = ["worker", "host", "in its engine", "incarnation", "came", "left", "cause", "reason"]
    rows = [
        [
            stay.name,
            stay.host,
            stay.engine,
            f"{stay.incarnation or ''}",
            _clock(stay.came),
            "" if stay.left is None else _clock(stay.left),
            stay.cause,
            stay.reason.partition("\n")[0],
        ]
        for stay in past.stays
    ]
    return [head, *rows]


def place_rows(state: State) -> Rows:
    """Return a table with a row for each worker of a run: with its present place and work."""
    rows = [
        [
            lane.name,
            lane.host,
            lane.engine,
            f"{lane.incarnation or ''}",
            _doing(state, lane),
        ]
        for _, lane in sorted(state.lanes.items())
    ]
    return [["worker", "host", "in its engine", "incarnation", "does"], *rows]


def _doing(state: State, lane: WorkerLane) -> str:
    if not lane.is_there or lane.is_gone:
        status = "excluded" if lane.is_gone else "lost"
        return f"{status}: {(lane.refused or lane.reason).partition(chr(10))[0]}"
    if not lane.slot or not state.is_training:
        return "idle"
    unit = "part" if state.parts else "slot"
    return f"{unit} {lane.slot}, round {lane.round}"


def part_rows(state: State) -> Rows:
    """Return a table with a row for each part of a model that spans workers."""
    names = {lane.worker: lane.name for lane in state.lanes.values()}
    rows = [
        [
            f"{number}",
            " ".join(part.layers),
            names.get(part.worker, ""),
            size(part.nbytes),
            "" if part.idle is None else f"{part.idle:.0%}",
        ]
        for number, part in enumerate(state.parts, 1)
    ]
    return [["part", "layers", "worker", "memory", "idle"], *rows]


def portion_rows(state: State) -> Rows:
    """Return a table with a row for each worker, and its work in all passes of L-BFGS."""
    rows = [
        [lane.name, f"{lane.portions.done:,}", f"{lane.portions.backup:,}", f"{lane.portions.dropped:,}"]
        for _, lane in sorted(state.lanes.items())
        if lane.portions != Portions()
    ]
    return [["worker", "portions", "backup", "dropped"], *rows]


def peer_rows(board: Board) -> Rows:
    """Return a table with a row for each peer with private data, and its work."""
    rows = []
    for number, lane in sorted(board.state.lanes.items()):
        if lane.is_peer:
            sums = board.sums.get(number, Sums())
            loss = "" if lane.loss is None else f"{lane.loss:.4f}"
            rows.append([lane.name, f"{sums.updates:,}", f"{sums.trained:,}", size(sums.bytes_back), loss, lane.reason])
    return [["peer", "posts", "samples trained", "received", "last loss", "left"], *rows]


def _clock(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def number(value: float) -> str:
    """Return a number as text with four digits, or with all digits of its integer part."""
    if not isfinite(value):
        return str(value).replace("nan", "NaN")
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def as_csv(rows: Rows) -> str:
    """Return a table as CSV, for a spreadsheet."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def as_latex(rows: Rows) -> str:
    r"""Return a table for ``\input``, with rules of ``booktabs`` and columns of numbers aligned to the right."""
    columns = "".join("r" if _are_numbers(column) else "l" for column in zip(*rows[1:], strict=True)) or "l" * len(
        rows[0]
    )
    head, *body = ["  " + " & ".join(_tex(cell) for cell in row) + r" \\" for row in rows]
    begin = [r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"  \toprule", head, r"  \midrule"]
    return "\n".join([*begin, *body, r"  \bottomrule", r"\end{tabular}"]) + "\n"


def as_text(rows: Rows) -> str:
    """Return a table for a terminal, with aligned columns and numbers to the right."""
    right = [_are_numbers(column) for column in zip(*rows[1:], strict=True)] or [False] * len(rows[0])
    widths = [max(_columns(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_number else cell + " " * (width - _columns(cell))
            for cell, width, is_number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    )


def _columns(text: str) -> int:
    """Return the width of a text in a terminal: Chinese, Japanese and Korean characters have two columns."""
    return sum(1 + (unicodedata.east_asian_width(sign) in "WF") for sign in text)


def _are_numbers(cells: Sequence[str]) -> bool:
    return all(NUMBER.fullmatch(cell) for cell in cells)


def _tex(cell: str) -> str:
    return "".join(TEX.get(character, character) for character in cell)
