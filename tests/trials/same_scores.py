"""Search a learning rate on one, two and three workers, also with a killed worker, and compare all scores bit by bit.

    python -m tests.trials.same_scores [--steps 1500]

Three ``ddlf-worker`` processes with one thread each search a rate for the digits CNN. In two searches, the third worker
dies in its first trial: ``kill -9`` ends it and its executor. In one of these searches it restarts, and the other workers
wait in their trials until it has returned. Another search ends after two rungs, and restarts. All searches must give the
same SHA-256 of verdict, curve, starts and numbers of trials.

The exit code is 1 if a score differs, or if a worker did not die or return as described.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ddlf
from apps.digits_cnn import DigitsCNN
from benchmarks.measure import table
from ddlf.extras.scout.scouting import Scouted, scout
from tests.patience import PATIENCE_S
from tests.trials.options import read_options
from tests.trials.workers import Workers

LOST = 3
"""The number of the worker that dies."""
LOOK_S = 0.01


class Noted(DigitsCNN):
    """An app that notes the trials of each worker. If it has a process id, the third worker dies in its first trial."""

    verbose, threads = False, 1
    folder, pid, returns = "", 0, False

    async def create_model(self) -> None:
        """Make the network, and note that the third worker is back."""
        await super().create_model()
        if self._is_lost_one and (Path(self.folder) / "died").exists():
            (Path(self.folder) / "back").touch()

    def train(self, weights: Any, worker_epochs: int, batch_size: int) -> Any:
        """Train, after the death of the third worker or the wait for its return."""
        folder = Path(self.folder)
        if self.pid and self._is_lost_one and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(self.pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.returns and not self._is_lost_one:
            until(folder / "back", "the return of the worker")
        with (folder / f"worker-{self.worker.id}").open("a") as file:
            file.write(".")
        return super().train(weights, worker_epochs, batch_size)

    @property
    def _is_lost_one(self) -> bool:
        worker = getattr(self, "worker", None)
        return worker is not None and worker.id == LOST


def until(path: Path, label: str) -> None:
    """Wait until a file exists."""
    end = time.monotonic() + PATIENCE_S
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{label} did not happen")
        time.sleep(LOOK_S)


def digest(scouted: Scouted) -> str:
    """Return the SHA-256 of everything except the time."""
    facts = {name: value for name, value in scouted.to_data().items() if name != "seconds"}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Searches:
    """Searches on three workers.

    Args:
        started: The starter of the workers.
        steps: Number of steps of all trials of a search together.
        bounds: The bounds of the rate, ``low`` and ``high``, if the search has any.
    """

    def __init__(self, started: Workers, steps: int, **bounds: float) -> None:
        self._started, self._how = started, dict[str, Any](steps=steps, **bounds)
        self._processes = [started.start() for _ in range(LOST)]
        self._count = 0
        self.cluster = ddlf.Cluster(
            ["127.0.0.1"] * LOST,
            [port for _, port in self._processes],
            token_file=started.token_file,
            connect_timeout_s=PATIENCE_S,
        )

    @property
    def lost(self) -> subprocess.Popen[bytes]:
        """The daemon process of the worker that dies."""
        return self._processes[LOST - 1][0]

    def restart(self) -> None:
        """Restart the dead worker on its port."""
        self.lost.wait(PATIENCE_S)
        self._processes[LOST - 1] = self._started.start(port=self._processes[LOST - 1][1])

    async def search(self, case: str, workers: int = LOST, **attributes: Any) -> dict[str, Any]:
        """Search once, and return the result as a row."""
        app = self._app(workers, attributes)
        begin = time.perf_counter()
        scouted = await scout(app, **self._how, say=lambda text: None)
        folder = Path(app.folder)
        trials = [folder / f"worker-{number}" for number in range(1, workers + 1)]
        return {
            "case": case,
            "scores": digest(scouted),
            "rate": f"{scouted.verdict.rate:g}",
            "trials": scouted.trials,
            "by worker": ", ".join(str(len(file.read_text()) if file.exists() else 0) for file in trials),
            "died": (folder / "died").exists(),
            "back": (folder / "back").exists(),
            "seconds": f"{time.perf_counter() - begin:.1f}",
        }

    async def ended_and_again(self, case: str) -> dict[str, Any]:
        """End a search after two rungs, then search again on the same workers, and return the result."""
        messages: list[str] = []

        def say(text: str) -> None:
            messages.append(text)
            if len(messages) == 3:
                searching.cancel()

        searching = asyncio.ensure_future(scout(self._app(LOST, {}), **self._how, say=say))
        with contextlib.suppress(asyncio.CancelledError):
            await searching
        assert len(messages) == 3, messages
        return await self.search(case)

    def _app(self, workers: int, attributes: dict[str, Any]) -> Noted:
        self._count += 1
        folder = self._started.folder / f"search-{self._count}"
        folder.mkdir()
        app = Noted(self.cluster.options(workers=range(1, workers + 1)))
        for name, value in {"folder": str(folder), **attributes}.items():
            setattr(app, name, value)
        return app


async def tried(steps: int, **bounds: float) -> list[dict[str, Any]]:
    """Search in all cases, between the bounds ``low`` and ``high`` if there are any, and return a row for each case."""
    with Workers() as started:
        searches = await asyncio.to_thread(Searches, started, steps, **bounds)
        async with searches.cluster:
            rows = [await searches.search(f"{number} of 3 workers", number) for number in range(1, LOST + 1)]
            starting = asyncio.ensure_future(asyncio.to_thread(searches.restart))
            rows.append(await searches.search("one killed, and back", pid=searches.lost.pid, returns=True))
            await starting
            rows.append(await searches.ended_and_again("ended, and begun again"))
            rows.append(await searches.search("one killed", pid=searches.lost.pid))
    return rows


def is_right(rows: list[dict[str, Any]]) -> bool:
    """Return whether all scores have the same bits, and the third worker died and returned as planned."""
    deaths = [(row["died"], row["back"]) for row in rows]
    none = (False, False)
    return len({row["scores"] for row in rows}) == 1 and deaths == [none] * 3 + [(True, True), none, (True, False)]


def main() -> None:
    """Run the trial."""
    options = read_options(__doc__, steps=1500)
    rows = asyncio.run(tried(options.steps))
    names = [name for name in rows[0] if name not in ("died", "back")]
    shown = [{**row, "scores": row["scores"][:16]} for row in rows]
    print(table([names, *([str(row[name]) for name in names] for row in shown)]))
    sys.exit(not is_right(rows))


if __name__ == "__main__":
    main()
