"""A run's state as a picture in a terminal, drawn with rich, which is imported when this is."""

from __future__ import annotations

from rich.text import Text

from ddlf.monitor.observe.phrases import SILENT_S, doing, duration, number, place, rate, trouble
from ddlf.monitor.observe.state import Lane, Phase, State

NAME = 10
"""Columns of the first word, as in the lines above."""
LONGEST_NAME = 20
MARGIN = 2
"""Columns that stay empty: a terminal writes ``^C`` where the cursor is, behind the last line, and it must not wrap."""
FEWEST_LANES = 3
"""Rows for workers, that of those that are too many among them."""
SHORTEST_BAR, LONGEST_BAR = 5, 20
METRICS = 3
"""Shown of training; the line of the round has all of them."""
BARS = {False: "━╸─", True: "=>-"}
"""Full, half and empty; of ASCII where the terminal's encoding has no others."""


def draw(state: State, now: float, width: int, height: int, *, ascii_only: bool = False) -> Text:
    """The picture.

    Args:
        state: State of the run.
        now: Time of now, by the clock that it was folded with.
        width: Columns of the terminal.
        height: Rows; the picture has at most half of them, and at least what there is without workers.
        ascii_only: Whether only ASCII can be written.
    """
    pen = _Pen(now, max(width - MARGIN, 20), BARS[ascii_only])
    mine = [phase for phase in list(state.phases.values()) if not phase.worker]
    theirs = {phase.worker: phase for phase in list(state.phases.values()) if phase.worker}
    lanes = sorted(state.lanes.values(), key=lambda lane: lane.worker)
    pen.names = max([NAME, *(min(len(lane.name), LONGEST_NAME) + 2 for lane in lanes)])
    rows = pen.run(state) if state.is_training else []
    rows += [pen.phase("master", phase) for phase in mine]
    if state.waiting_until is not None:
        left = max(0.0, state.waiting_until - now)
        rows.append(pen.row("waiting", f"no worker is left; the run ends in {left:.0f} s", style="red"))
    if state.is_training or theirs:
        most = max(FEWEST_LANES, height // 2 - len(rows))
        rows += _lanes(pen, lanes, theirs, most, rounds=state.mode != "sync")
    for row in rows:
        row.truncate(pen.width, overflow="ellipsis")
    return Text("\n").join(rows)


def _lanes(pen: _Pen, lanes: list[Lane], phases: dict[int, Phase], most: int, *, rounds: bool) -> list[Text]:
    """A row for each worker; when there are too many, first those that something is wrong with."""
    shown = lanes
    if len(lanes) > most:
        shown = sorted(lanes, key=lambda lane: not trouble(lane, pen.now))[: most - 1]
        shown.sort(key=lambda lane: lane.worker)
    rows = [pen.lane(lane, phases.get(lane.worker), rounds=rounds) for lane in shown]
    rest = [lane for lane in lanes if lane not in shown]
    if rest:
        together = sum(lane.rate for lane in rest if lane.is_there)
        rows.append(pen.row(f"+ {len(rest)} more", rate(together) if together else "", style="dim"))
    return rows


class _Pen:
    """Writes rows of one picture."""

    def __init__(self, now: float, width: int, bars: str) -> None:
        self.now = now
        self.width = width
        self.bars = bars
        self.names = NAME

    def row(self, name: str, *parts: str | Text, style: str = "") -> Text:
        name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
        return Text(f"{name:<{self.names}}", style=style, no_wrap=True, end="").append_text(
            Text("  ").join(Text(part, style) if isinstance(part, str) else part for part in parts if part)
        )

    def bar(self, share: float, columns: int, style: str = "cyan") -> Text:
        full, half, empty = tuple(self.bars)
        halves = int(min(max(share, 0.0), 1.0) * columns * 2)
        drawn = full * (halves // 2) + half * (halves % 2)
        return Text(drawn, style).append(empty * (columns - len(drawn)), "dim")

    def run(self, state: State) -> list[Text]:
        """How far the run is, and what it has come to."""
        left = state.left_s(self.now)
        ends = [place(state), f"{duration(left)} left" if left is not None else ""]
        taken = self.names + sum(len(end) + 2 for end in ends if end) + len(" 100 %")
        room = self.width - taken
        bar = self.bar(state.done, room, "green").append(" ") if room >= SHORTEST_BAR else Text()
        first = self.row("training", bar.append(f"{state.done * 100:3.0f} %"), *ends)
        metrics = [f"{name} {number(value)}" for name, value in list(state.metrics.items())[:METRICS]]
        total = rate(state.rate, "samples") if state.rate else ""
        return [first, self.row("", *metrics, total)] if metrics or total else [first]

    def phase(self, name: str, phase: Phase) -> Text:
        since = f"{self.now - phase.since:.0f} s"
        if not phase.done:
            return self.row(name, doing(phase), since)
        return self.row(name, doing(phase, amount=False), self.bar(phase.done / phase.total, 10), since)

    def lane(self, lane: Lane, phase: Phase | None, *, rounds: bool) -> Text:
        if wrong := trouble(lane, self.now):
            return self.row(lane.name, wrong, style="dim" if lane.is_gone else "red")
        if phase is not None:
            return self.phase(lane.name, phase)
        silent = lane.quiet_s(self.now)
        heard = Text(f"{silent:.0f} s ago" if silent >= 1 else "now", "yellow" if silent >= SILENT_S else "dim")
        if not lane.slot:
            return self.row(lane.name, Text(f"has nothing to do  {self.now - lane.since:.0f} s", "dim"))
        if not lane.total:
            return self.row(lane.name, Text("computes", "dim"), f"round {lane.round}" if rounds else "", heard)
        where = f"round {lane.round}" if rounds else f"epoch {lane.epoch}" if lane.epoch else ""
        loss = f"loss {number(lane.loss)}" if lane.loss is not None else ""
        parts: list[str | Text] = [where, f"{rate(lane.rate):>9}" if lane.rate else "", loss, heard]
        room = self.width - self.names - sum(len(part) + 2 for part in parts if part)
        if room < SHORTEST_BAR:
            parts, room = parts[1:], room + len(where) + 2
        bar = [self.bar(lane.done / lane.total, min(room, LONGEST_BAR))]
        return self.row(lane.name, *bar * (room >= SHORTEST_BAR), *parts)
