"""Trains a few steps in its own process, to measure the memory that training takes. Linux only.

A worker starts this process, because it may not survive: a batch can need more memory than the machine has. It begins
like an executor, and trains as one does: same data, model, optimizer and codec. Messages are JSON, except
the app. The process ends with its worker.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

STEPS, ROUNDS = 4, 2
"""Steps of a round, and measured rounds of one batch size."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run as ``python -m ddlf.extras.planner.trial SOCKET_FD``."""
    from ddlf.worker.executor import die_with_parent
    from ddlf.worker.imports import MasterFinder, leave_current_folder

    (fd,) = map(int, (argv or sys.argv)[1:2])
    die_with_parent()
    link = Connection(fd)
    be_killed_first()
    leave_current_folder()
    request = json.loads(link.recv_bytes())

    def ask(kind: str, name: str, file: str = "") -> Any:
        from ddlf.rpc.messages import loads

        send(link, ask=[kind, name, file])
        return loads([bytearray(link.recv_bytes())])

    sys.meta_path.append(MasterFinder(ask, lambda: request))
    try:
        serve(link, request)
    except EOFError:
        pass  # the worker needs no more
    except BaseException as error:
        send(link, failed=f"{type(error).__name__}: {error}"[:500])
    finally:
        os._exit(0)  # whatever the framework would do at its end


def serve(link: Connection, request: dict[str, Any]) -> None:
    """Open the app, then train a batch size after another, until the worker ends the connection."""
    from ddlf.rpc.code import unpickle

    trial = Trial(unpickle(link.recv_bytes()), request["worker"], request["workers"])
    send(link, did=trial.open(request["format"]))
    while True:
        order = json.loads(link.recv_bytes())
        send(link, did=trial.train(order["batch"], order["limit"]))


def send(link: Connection, **message: Any) -> None:
    """Send a message to the worker."""
    link.send_bytes(json.dumps(message).encode())


class Trial:
    """Trains an app as a worker does.

    Args:
        app: The app, without data and model.
        number: Number of the worker.
        workers: Number of workers in the cluster.
    """

    def __init__(self, app: Any, number: int, workers: int) -> None:
        from ddlf.data.array_cache import ArrayCache
        from ddlf.training.registry import EXCHANGE
        from ddlf.training.slot.replica import Replica
        from ddlf.worker.calls import Methods
        from ddlf.worker.worker import Worker

        nowhere = Path(os.devnull)
        self._cache = ArrayCache()
        worker = Worker(Methods(nowhere, nowhere), self._cache)
        worker.id, worker.N = number, workers
        exchange = EXCHANGE.kind(app.exchange)
        self._replica = (resolve_name(exchange.role) if exchange.one_step else Replica)(worker, app)
        self._app, self._round = app, 0
        self._keep = () if exchange.one_step or app.optimizer_state == "fresh" else ("optimizer",)
        self._steps = 1 if exchange.one_step else STEPS

    def open(self, format: Sequence[str] | None) -> dict[str, int]:
        """Load the data and build the model, and return the bytes that they take.

        Args:
            format: The number format of the master; None for Keras's default.
        """
        from ddlf.data.app_data import samples_of
        from ddlf.training.slot.optimizers import read_optimizer

        app = self._app
        self._replica.begin(format)
        framework = memory_now()
        self._replica.load_data({}, self._cache)
        data = memory_now() - framework
        self._replica.build()
        self._weights = app.model.get_weights()
        return {
            "samples": samples_of(app, "train"),
            "framework": framework,
            "data": max(data, 0),
            "loaded": memory_peak(),
            "weights": sum(array.nbytes for array in self._weights),
            "optimizer": sum(np.asarray(array).nbytes for array in read_optimizer(app.model)),
        }

    def train(self, batch: int, limit: int | None) -> tuple[int, int]:
        """Train some steps, and return the most bytes of this process in the first round, and after it.

        The first round with a batch size copies the data into the memory of the framework, and compiles the step. A
        worker does so once.

        Args:
            batch: Samples of a batch.
            limit: The most bytes that this process may have; None without a limit.
        """
        limit_memory(limit)
        forget_peak()
        self._carry(batch)
        first = memory_peak()
        forget_peak()
        for _ in range(ROUNDS):
            self._carry(batch)
        return first, memory_peak()

    def _carry(self, batch: int) -> None:
        from ddlf.algorithms.codec import CODEC
        from ddlf.algorithms.encoding import encode_update
        from ddlf.rpc.messages import dumps, loads

        # A worker has its own copy of the weights, and holds its answer until it is sent.
        encoded, _ = encode_update(CODEC.read("float32"), self._weights, [False] * len(self._weights))
        received = loads([bytearray(part) for part in dumps(encoded)])
        reply = self._replica.carry(self._task(batch, received))
        self._sent = [bytes(part) for part in dumps(reply.update)]
        self._round += 1

    def _task(self, batch: int, encoded: Any) -> Any:
        from ddlf.algorithms.reading_order import Portion
        from ddlf.data.app_data import data_set_of, samples_of
        from ddlf.training.slot.task import Task

        samples = samples_of(self._app, "train")
        count = min(samples, self._steps * batch)
        indices: Any = np.arange(count)
        if data_set_of(self._app, "train") is not None:
            indices = Portion(shuffle="none", seed=0, epoch=0, slots=1, start=0, stop=samples, end=count)
        return Task(
            slot=0,
            round=self._round,
            slots=1,
            first_epoch=0,
            epochs=1,
            batch_size=batch,
            seed=0,
            indices=indices,
            weights={"delta": False, "encoded": encoded},
            version=0,
            codec=str(self._app.codec),
            keep=self._keep,
            back=self._keep,
            state=None if self._round else {},
            steps=(0, count // batch + 1, samples // batch + 1, 1),
        )


def memory_now(pid: int | str = "self") -> int:
    """Return the bytes of memory of a process, without pages of files such as libraries.

    Processes of a machine share these pages, and the kernel drops them when memory becomes short. A fork maps fewer of
    them than a process that has imported the libraries itself.
    """
    return _status(pid)["RssAnon"]


def memory_peak(pid: int | str = "self") -> int:
    """Return the most bytes that a process had, or has had since ``forget_peak``, likewise."""
    status = _status(pid)
    return status["VmHWM"] - status["RssFile"] - status["RssShmem"]


def _status(pid: int | str = "self") -> dict[str, int]:
    text = Path(f"/proc/{pid}/status").read_text()
    return {name: int(count) * 1024 for name, count in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def forget_peak() -> None:
    """Let the kernel look for the most memory from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def limit_memory(limit: int | None) -> None:
    """Let this process have at most so many bytes of memory; None for as many as the machine has."""
    import resource

    from ddlf.worker.machine import memory

    now, free = memory_now(), memory()[1]
    allowed = limit - now if limit is not None else resource.RLIM_INFINITY if free is None else free
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = allowed if allowed == resource.RLIM_INFINITY else _status()["VmData"] + max(allowed, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def be_killed_first() -> None:
    """Ask the kernel to kill this process before others if the machine has no memory left."""
    Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    main()
