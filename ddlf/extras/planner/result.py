"""The result of ``ddlf plan``, and the lines that show it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ddlf.events.record import size
from ddlf.extras.planner.choice import Choice, Verdict, Wish, can_balance
from ddlf.extras.planner.memory import Largest, MemoryModel
from ddlf.extras.planner.model import Measured, Predicted, TimeModel

LEFT = ("way", "codec")
"""Columns of words in the table; the others are numbers."""
INTERVAL, UNMEASURED = "(80 %)", " not measured"
"""The last column, and the end of its cells for more slots than were measured."""
SPARE = ("s/update", "memory", "batch", INTERVAL)
"""Columns that a narrow terminal leaves out, in this order. The batch size stays if rows differ in it."""
MOST_ROWS = 6
"""Predictions in the table beside the best and the present one."""
USUAL = {"mode": "sync", "exchange": "star", "codec": "float32", "balance": "equal"}
"""Settings of most apps, which no line names."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """Predictions for the training of an app on a cluster. Its text has the lines that ``ddlf plan`` prints.

    Args:
        measured: The measured rounds.
        spent_s: Seconds of all measurements.
        workers: Workers of the cluster.
        samples: n, the training samples.
        now: The prediction for the app's own settings.
        best: The best choice with the app's own batch size.
        fit: Seconds of an epoch of ``fit`` on one machine.
        choices: All predictions, the fastest first.
        step_s: Seconds of a step of one slot, without an exchange.
        exchange_s: Seconds of an exchange of the app's own settings.
        model: Predicts other settings.
        wish: The goal of the best choice.
        memory: Predicts the memory of a worker; None if it was not measured.
        largest: The largest batch that fits into the memory; None without a limit.
        hosts: The machines of workers, by their numbers.
        in_other_order: The best choice of a cluster that lists the fastest worker first, if it is clearly faster.
    """

    measured: tuple[Measured, ...]
    spent_s: float
    workers: int
    samples: int
    now: Choice
    best: Choice
    fit: Predicted
    choices: tuple[Choice, ...]
    step_s: float
    exchange_s: float
    model: TimeModel
    wish: Wish = field(default_factory=Wish)
    memory: MemoryModel | None = None
    largest: Largest | None = None
    hosts: dict[int, str] = field(default_factory=dict)
    in_other_order: Choice | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether several workers pay. If one slot is the cheapest choice, they do not: it trains as ``fit`` does, and
        exchanges besides.
        """
        is_one = self.wish.goal == "cost" and self.best.setting.slots == 1
        return "no gain" if is_one else self.best.verdict

    @property
    def is_taken(self) -> bool:
        """Whether to train with the best choice. An unclear one may only be noise, and its codec or mode may cost accuracy:
        so it must surely be faster than the present settings.
        """
        return self.verdict != "unclear" or self.best.epoch.high < self.now.epoch.low

    @property
    def training(self) -> Predicted:
        """The prediction for all epochs of the training with the best choice, without validation and test data."""
        return self.best.epoch.times(self.wish.epochs)

    @property
    def is_beyond(self) -> bool:
        """Whether even the best choice is surely too late, or needs too much memory."""
        return not (self.wish.may_meet(self.best) and self.wish.may_fit(self.best))

    def __str__(self) -> str:
        """Return the plan as the text that ``ddlf plan`` prints."""
        return "\n".join(lines(self))

    def __repr__(self) -> str:
        """Return the verdict and the best choice."""
        return f"<Plan {self.verdict}: {' '.join(option_words(self.best))} is {speed_text(self.best)}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # a notebook calls this for the last line of a cell
        printer.text(str(self))

    def to_data(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        epochs = self.wish.epochs
        return {
            "spent_s": self.spent_s,
            "speeds": {number: 1.0 / slowness for number, slowness in self.model.slowness.items()},
            "workers": self.workers,
            "samples": self.samples,
            "verdict": self.verdict,
            "step_s": self.step_s,
            "exchange_s": self.exchange_s,
            "wish": asdict(self.wish),
            "in_time": self.wish.meets(self.best),
            "in_memory": self.wish.fits(self.best),
            "beyond": self.is_beyond,
            "memory": None if self.memory is None else asdict(self.memory.peaks),
            "largest": None if self.largest is None else asdict(self.largest),
            "link": None if self.model.link is None else asdict(self.model.link),
            "epochs": epochs,
            "training": {
                "best": asdict(self.training),
                "now": asdict(self.now.epoch.times(epochs)),
                "fit": asdict(self.fit.times(epochs)),
            },
            "fit": asdict(self.fit),
            "best": asdict(self.best),
            "now": asdict(self.now),
            "all": [asdict(choice) for choice in self.choices],
            "measured": [asdict(rounds) for rounds in self.measured],
        }


def lines(plan: Plan, run: str = "", longer: str = "", width: int | None = None) -> list[str]:
    """Return the plan as lines to print.

    Args:
        plan: The plan.
        run: The command that trains as the best choice does; in a program, the lines name its settings instead.
        longer: The command that measures longer; in a program, the lines say it in general.
        width: Columns of the terminal, which the table fits; None without one. Other lines may be longer.
    """
    head = ["", "slots", "way", "batch", "codec", "s/epoch", "s/update"]
    rows = [[*head, *["memory"] * (plan.memory is not None), "of fit", INTERVAL]]
    shown = [("nearest" if plan.is_beyond else "best", plan.best), ("now", plan.now)]
    shown += [("", choice) for choice in plan.choices if choice not in (plan.best, plan.now)][:MOST_ROWS]
    for label, choice in shown:
        setting = choice.setting
        rows.append(
            [
                label,
                str(setting.slots),
                setting.description,
                str(setting.batch),
                setting.way.codec,
                number(choice.epoch.seconds),
                number(choice.update_s),
                *([] if choice.memory is None else [size(round(choice.memory.count))]),
                f"{factor(choice.factor)}x",
                f"({factor(choice.low)}-{factor(choice.high)})" + ("" if choice.epoch.within else UNMEASURED),
            ]
        )
    table, left_out = fitting(rows, width)
    return [
        f"measured  {len(plan.measured)} settings in {plan.spent_s:.0f} s: a step takes {number(plan.step_s * 1e3)} ms, "
        f"an exchange {number(plan.exchange_s * 1e3)} ms; fit on one machine takes {number(plan.fit.seconds)} s an epoch"
        + seconds_by_batch(plan),
        *slowest_worker_line(plan),
        *assumed_link_line(plan),
        *table,
        *left_out,
        *memory_lines(plan),
        *wish_lines(plan),
        f"{plan.verdict}: {verdict_sentence(plan)}",
        last_line(plan, run, longer),
    ]


def fitting(rows: list[list[str]], width: int | None) -> tuple[list[str], list[str]]:
    """Return the lines of a table that fits a terminal, and a line about the columns that are left out.

    Args:
        rows: The cells. The first row has the names of columns.
        width: Columns of the terminal; None without one.
    """
    lines, left_out = aligned(rows, gap=2), list[str]()
    if width is None or max(map(len, lines)) <= width:
        return lines, []
    for name in SPARE:
        if max(map(len, lines := aligned(rows, gap=1))) <= width:
            break
        index = rows[0].index(name) if name in rows[0] else None
        if index is None or (name == "batch" and len({row[index] for row in rows[1:]}) > 1):
            continue
        left_out.append(name)
        marks = ["", *(" ?" if row[index].endswith(UNMEASURED) else "" for row in rows[1:])]
        rows = [[*row[:index], *row[index + 1 :]] for row in rows]
        if name == INTERVAL:
            rows = [[*row[:-1], row[-1] + mark] for row, mark in zip(rows, marks, strict=True)]
    else:
        lines = aligned(rows, gap=1)
    marked = "; ? means not measured" if any(row[-1].endswith("?") for row in rows) else ""
    return lines, [f"left out  {', '.join(left_out)}, because the terminal is narrow{marked}"] if left_out else []


def aligned(rows: list[list[str]], gap: int) -> list[str]:
    """Return the lines of a table. Its first column has labels, and its last one is as long as its texts."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    alignments = ["<" if rows[0][column] in LEFT else ">" for column in range(len(widths))]
    alignments[-1], widths[-1] = "<", 0
    space = " " * gap
    return [
        f"{row[0]:<10}"
        + space.join(
            f"{cell:{alignment}{width or ''}}"
            for cell, alignment, width in list(zip(row, alignments, widths, strict=True))[1:]
        )
        for row in rows
    ]


def seconds_by_batch(plan: Plan) -> str:
    """Return the end of a line about ``fit``: its seconds with each batch size, because a row of the table compares with
    ``fit`` with the same one; empty for one batch size.
    """
    best_batch = plan.best.setting.batch
    fit_seconds = {
        choice.setting.batch: choice.factor * choice.epoch.seconds
        for choice in plan.choices
        if choice.setting.batch != best_batch
    }
    comparisons = [f"{number(seconds)} s with {batch}" for batch, seconds in sorted(fit_seconds.items())]
    return f" with batch {best_batch}, {', '.join(comparisons)}" if comparisons else ""


def slowest_worker_line(plan: Plan) -> list[str]:
    """Return a line about the slowest worker; none if all are about equally fast."""
    if not plan.model.slowness:
        return []
    number_of_slowest, slowness = max(plan.model.slowness.items(), key=lambda item: item[1])
    host = plan.hosts.get(number_of_slowest, "")
    lines = [f"slowest   worker {number_of_slowest}{f' on {host}' * bool(host)} ({1 / slowness:.2g}x)"]
    if (other := plan.in_other_order) is not None:
        lines[0] += (
            f": if the cluster lists it last, {other.setting.slots} slot{'s' * (other.setting.slots != 1)} take "
            f"{number(other.epoch.seconds)} s an epoch"
        )
    return lines


def assumed_link_line(plan: Plan) -> list[str]:
    """Return a line about the assumed link; none without one."""
    if (link := plan.model.link) is None:
        return []
    parts = [f"{number(link.bandwidth * 8 / 1e6)} Mbit/s"] if link.bandwidth else []
    parts += [f"{number(link.latency * 1e3)} ms more each way"] * bool(link.latency)
    return [f"assumed   {' and '.join(parts)} at the master: this link was not measured"]


def memory_lines(plan: Plan) -> list[str]:
    """Return lines about memory; none if it was not measured."""
    if plan.memory is None:
        return []
    peaks, best = plan.memory.peaks, plan.best.memory
    assert best is not None
    parts = ", ".join(f"{name} {size(round(count))}" for name, count in plan.memory.parts.items() if count)
    master = f"; the master {size(peaks.master)}" if peaks.master else ""
    lines = [
        f"memory    a worker needs {size(round(best.count))} ({size(round(best.low))} to {size(round(best.high))}): {parts},"
        f" and {size(round(plan.memory.sample))} for a sample of the batch{master}"
    ]
    if (limit := plan.wish.max_memory) is not None:
        fits, none = "fits into", ""
        if not plan.wish.fits(plan.best):
            fits, none = "may not fit into", ", and no choice surely does"
        if not plan.wish.may_fit(plan.best):
            fits, none = "does not fit into", ", and no choice does"
        lines.append(f"limit     batch {plan.best.setting.batch} {fits} {size(limit)}{none}")
    if (largest := plan.largest) is not None:
        place_text = f"into {size(largest.limit)} of worker {peaks.worker}"
        failed_text = f"; not {', '.join(map(str, largest.failed))}" if largest.failed else ""
        how = "a process there trained with it" if largest.confirmed else "no time was left to confirm it"
        lines.append(
            f"largest   batch {largest.batch:,} fits {place_text}: {how}{failed_text}"
            if largest.batch
            else f"largest   no batch was found that fits {place_text}{failed_text}"
        )
    return lines


def wish_lines(plan: Plan) -> list[str]:
    """Return a line about the whole training, and lines about the cost and the deadline if somebody asked for them."""
    wish, best, training = plan.wish, plan.best, plan.training
    takes = "1 epoch takes" if wish.epochs == 1 else f"all {wish.epochs} epochs take"
    lines = [
        f"training  {takes} {number(training.seconds)} s ({number(training.low)}-{number(training.high)}); fit on one machine needs "
        f"{number(plan.fit.times(wish.epochs).seconds)}"
    ]
    if wish.goal == "cost":
        lines.append(
            f"cost      {number(best.cost)} worker-seconds an epoch; fit on one machine needs {number(plan.fit.seconds)}"
        )
    if wish.deadline_s is not None:
        verdict = "in time" if wish.meets(best) else "not surely in time" if wish.may_meet(best) else "not in time"
        none = "" if any(wish.meets(choice) for choice in (best, *plan.choices)) else ", and no choice is"
        lines.append(f"deadline  {number(wish.deadline_s)} s: {verdict}{none}")
    return lines


def verdict_sentence(plan: Plan) -> str:
    """Return why the verdict is so."""
    best, is_one_slot = plan.best, plan.best.setting.slots == 1
    slots, are = ("1 slot", "is") if is_one_slot else (f"{best.setting.slots} slots", "are")
    fast = speed_text(best)
    match plan.verdict:
        case "no gain" if plan.wish.goal == "cost":
            return (
                f"{slots} {are} {fast}; several cost more worker-seconds." if is_one_slot else f"{slots} {are} {fast}."
            )
        case "pays off":
            return f"{slots} {are} {fast}."
        case "no gain":
            return f"no setting is faster than fit on one machine by 5 %; the best, {slots}, is {fast}."
        case _ if plan.is_taken:
            return f"{slots} may be {fast}, and {are} surely faster than your settings."
        case _:
            return f"{slots} may be {fast}{': measure longer, or on idle machines' * (not plan.is_beyond)}."


def last_line(plan: Plan, run: str, longer: str) -> str:
    """Return the line that says what to do."""
    if plan.is_beyond:
        return f"help      {'; '.join(limits_advice(plan))}"
    match plan.verdict:
        case "no gain":
            return (
                "fit       train with fit on one machine, which needs no exchange: an epoch takes about "
                f"{number(plan.fit.seconds)} s there"
            )
        case _ if plan.is_taken:
            return f"run       {run or setting(plan)}"
        case _:
            return f"longer    {longer or 'plan again with more time: ddlf plan APP --again --budget 2m'}"


def limits_advice(plan: Plan) -> list[str]:
    """Return what would keep the limits that no choice with the app's batch size keeps."""
    wish, batch = plan.wish, plan.best.setting.batch
    if (
        other := next((choice for choice in plan.choices if wish.meets(choice) and wish.fits(choice)), None)
    ) is not None:
        return [f"within the limits are {' '.join(option_words(other))} --batch-size {other.setting.batch}"]
    advice = []
    if not wish.may_fit(plan.best):
        assert plan.memory is not None
        without_batch, largest = sum(plan.memory.parts.values()), 0 if plan.largest is None else plan.largest.batch
        advice.append(
            f"--batch-size {largest} fits"
            if largest
            else f"allow more memory, because a worker needs {size(round(without_batch))} without any sample of a batch"
            if wish.max_memory is not None and without_batch > wish.max_memory
            else f"a batch smaller than {batch}, or more memory"
        )
    if not wish.may_meet(plan.best):
        advice.append("fewer epochs, more or faster workers, another batch size (--batches), or a later deadline")
    return advice


def setting(plan: Plan) -> str:
    """Return how a program trains as the best choice does."""
    best, now = settings_of(plan.best), settings_of(plan.now)
    changed = [f"{name} = {value!r}" for name, value in best.items() if value != now.get(name)]
    return f"set {', '.join(changed)} in the app, and train" if changed else "train with the present settings"


def speed_text(choice: Choice) -> str:
    """Return how fast training is, beside ``fit``."""
    return (
        f"{factor(choice.factor)} times as fast as fit on one machine ({factor(choice.low)} to {factor(choice.high)})"
    )


def settings_of(choice: Choice) -> dict[str, int | str]:
    """Return the settings of an app that trains so."""
    way, slots = choice.setting.way, choice.setting.slots
    settings: dict[str, int | str] = {"slots": slots, "mode": way.mode, "exchange": way.exchange, "codec": way.codec}
    if can_balance(way, slots):
        settings["balance"] = "speed" if choice.setting.balanced else "equal"
    return settings


def option_words(choice: Choice) -> list[str]:
    """Return the options of ``ddlf run`` that train so."""
    return [f"--{name} {value}" for name, value in settings_of(choice).items() if value != USUAL.get(name)]


def factor(value: float) -> str:
    """Return how many times as fast something is, with two digits at least."""
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"


def number(value: float) -> str:
    """Return a number with three digits."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
