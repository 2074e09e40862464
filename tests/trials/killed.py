"""Kill workers and the master of a training, and compare its bits with the bits of an undisturbed training.

A trial calls ``kills`` with its app. The app trains on ``ddlf-worker`` processes. ``kill -9`` ends executors. Between these
kills it ends the master, which restarts and continues from the last checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import random
import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import ddlf
from tests.trials.masters import end_master, start_master
from tests.trials.workers import Workers

LOOK_S = 0.02
PAUSE_S = 0.5
"""Scale of the random pauses before kills, in seconds. In a pause, the other processes notice the last kill."""


def digest(model: Any) -> str:
    """Return the SHA-256 of a model's weights."""
    return hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()


async def master(facts: dict[str, Any]) -> None:
    """Train or resume, kill some executors meanwhile, and print the result as JSON."""
    log, chance = Path(facts["log"]), random.Random(facts["seed"])

    def note(label: str) -> None:
        with log.open("a") as file:
            file.write(f"{label}\n")

    hosts = ["127.0.0.1"] * len(facts["ports"])
    cluster = ddlf.Cluster(hosts, facts["ports"], token_file=facts["token_file"], takeover=True, connect_timeout_s=30)
    async with cluster:
        app = resolve_name(facts["app"])(cluster)
        vars(app).update(facts["attributes"])
        app.master_epochs, app.takeover = facts["iterations"], True
        if "split" not in vars(type(app)) and not app.private:
            app.slots = len(hosts)
        app.checkpoint, app.resume = facts["folder"], "auto" if facts["folder"] else None

        async def on_round(record: Any) -> None:
            note("commit")
            await asyncio.sleep(facts["pause_s"])

        app.on_round = on_round  # type: ignore[method-assign]

        async def kill() -> None:
            killed = 0
            while killed < facts["kills"]:
                await asyncio.sleep(chance.uniform(0.2, 2) * PAUSE_S)
                if not app.history or not all(worker.connected for worker in cluster.workers):
                    continue
                with contextlib.suppress(ddlf.DDLFError, ProcessLookupError):
                    pid = (await chance.choice(cluster.workers).status()).executor_pid
                    if pid:
                        os.kill(pid, signal.SIGKILL)
                        note("kill")
                        killed += 1

        training, killing = asyncio.ensure_future(app.train_model()), asyncio.ensure_future(kill())
        try:
            await training
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        result = {"sha256": digest(app.model), "ledger": app.ledger.is_exact(facts["iterations"])}
        print(json.dumps({**result, "loss": app.history[-1].loss, "rounds": len(app.history)}))


def kills(
    app: str,
    kills: int,
    masters: int,
    workers: int,
    seed: int,
    iterations: int,
    pause_s: float,
    **attributes: Any,
) -> dict[str, Any]:
    """Kill executors of workers, and the master between these kills. Return the numbers of kills and the result of the run.

    Args:
        app: Module and name of the class of the app.
        kills: Number of executors to kill.
        masters: Number of times to kill the master.
        workers: Number of workers.
        seed: Seed of the times of the kills.
        iterations: Number of epochs of the run. Each one is a round.
        pause_s: Pause after each round, in seconds.
        attributes: Attributes of the app.
    """
    chance, begin = random.Random(seed), time.monotonic()
    share = -(-kills // (masters + 1)) if kills else 0  # kills of executors during each life of the master
    with Workers() as started:
        facts: dict[str, Any] = {
            "ports": [started.start()[1] for _ in range(workers)],
            "token_file": str(started.token_file),
            "log": str(started.folder / "noted"),
            "iterations": iterations,
            "app": app,
            "attributes": attributes,
        }
        outputs: dict[ForkServerProcess, Path] = {}
        log = Path(facts["log"])
        log.touch()

        def begun(**more: Any) -> ForkServerProcess:
            output = started.folder / f"output-{len(outputs)}"
            process = start_master(master, {**facts, "seed": chance.randrange(2**32), **more}, output)
            outputs[process] = output
            return process

        def ended(process: ForkServerProcess) -> dict[str, Any]:
            process.join()
            assert process.exitcode == 0, f"the run failed:\n{started.log.read_text()[-2000:]}"
            return dict(json.loads(outputs[process].read_text().splitlines()[-1]))

        undisturbed = ended(begun(folder=None, kills=0, pause_s=0))
        log.write_text("")
        killed, folder = 0, str(started.folder / "checkpoints")
        while True:
            lines = log.read_text().splitlines()
            kills_left = min(share, kills - lines.count("kill")) if killed < masters else kills - lines.count("kill")
            process = begun(folder=folder, kills=max(kills_left, 0), pause_s=pause_s)
            if killed == masters:
                break
            commits, kills_due = lines.count("commit") + chance.randrange(2, 5), lines.count("kill") + kills_left
            while process.is_alive():
                now = log.read_text().splitlines()
                if now.count("kill") >= kills_due and now.count("commit") >= commits:
                    break
                time.sleep(LOOK_S)
            time.sleep(chance.random() * pause_s)
            if not process.is_alive():
                break
            end_master(process)
            killed += 1
        result = ended(process)
        done = log.read_text().splitlines().count("kill")
    same = result["sha256"] == undisturbed["sha256"]
    seconds = round(time.monotonic() - begin, 1)
    return {"kills": done, "masters": killed, "same": same, **result, "seconds": seconds}
