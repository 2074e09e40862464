"""Count the files of DDLF that one synchronous round and one push pass through, on the master and on workers.

    python -m benchmarks.hops [--list] [--inside FUNCTION]

The round has two workers on this machine, the exchange ``star``, the rule ``mean`` and no codec. ``sys.setprofile``
traces it from one commit to the next. The push is from one replica of Downpour whose server is on another worker, with
a push after each batch and no fetch. On the pushing worker, the trace contains its event loop, and the calls of
``FUNCTION``, the end of a batch, in its compute thread. On the other worker it contains the event loop.

The output counts the different files and functions of ``ddlf`` in which a call began. In a round, heartbeats, events
and reads of properties count, too; only the calls that collect the trace do not. For a push, the trace covers several
rounds, and a function counts if it was called at least as often as one slot pushes in a round. So the beginning and the
end of a round are not part of a push.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from typing import Any

import numpy as np

import ddlf

GENERATOR = 0x20
"""The flag of a generator's code. The argument of its instruction RESUME is 0 when the generator begins."""
INSIDE = "stepped"
"""The function that Downpour calls at the end of a batch."""
SAMPLES = 256
"""Rows of the data. Each of two slots has half of them."""


class Plain(ddlf.IApp):
    """A small network on made-up points."""

    verbose = False
    batch_size = 32

    async def load_dataset(self) -> None:
        """Make random points."""
        chance = np.random.default_rng(0)
        self.x_train = chance.normal(size=(SAMPLES, 8)).astype("float32")
        self.y_train = np.eye(2, dtype="float32")[(self.x_train.sum(1) > 0).astype(int)]

    async def create_model(self) -> None:
        """Compile 8 inputs, 16 hidden units and 2 outputs with SGD."""
        import keras
        from keras import layers

        self.model = keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(2, "softmax")])
        self.model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy")


def trace(inside: str = "") -> Any:
    """Count the calls on this thread and on later threads; with ``inside`` only the calls by that function on this thread."""
    import sys
    import threading

    calls = getattr(sys, "_ddlf_calls", None)
    if calls is None:
        calls = sys._ddlf_calls = Counter()  # type: ignore[attr-defined]
    depth = [0]

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        name = code.co_filename
        at = name.rfind("ddlf/")
        if at < 0 or event not in ("call", "return") or "site-packages" in name or "/benchmarks/" in name:
            return
        if event == "call" and code.co_flags & GENERATOR and code.co_code[frame.f_lasti + 1]:
            return  # a generator continues: this is not a call
        if inside and code.co_name == inside:
            depth[0] += 1 if event == "call" else -1
        if event == "call" and (not inside or depth[0] > 0):
            calls[name[at:], code.co_qualname] += 1

    if not inside:
        threading.setprofile(note)
    sys.setprofile(note)


async def trace_there(self: Any, inside: str = "") -> None:
    """Trace in an executor: on its event loop, and on its compute thread either all calls or the calls of ``inside``."""
    await self.compute(lambda: trace(inside))
    trace()


async def collect_there(self: Any) -> list[tuple[str, str, int]]:
    """Return the calls in the executor since the last collection."""
    return collect()


def collect() -> list[tuple[str, str, int]]:
    """Return file, name and count of the calls in this process since the last collection."""
    import sys

    calls: Counter[tuple[str, str]] = getattr(sys, "_ddlf_calls", Counter())
    result = [(*call, count) for call, count in sorted(calls.items())]
    calls.clear()
    return result


async def collected(worker: Any) -> Counter[tuple[str, str]]:
    """Return the counts of the calls in a worker's executor since the last collection."""
    return Counter({(file, name): count for file, name, count in await worker.run_method(collect_there)})


async def own_calls(worker: Any) -> Counter[tuple[str, str]]:
    """Return the counts of the calls that the collection itself makes. The run must be over, because a worker's calls take turns."""
    await collected(worker)
    return await collected(worker)


async def round_of(cluster: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the calls of the third of four rounds."""
    calls_of: dict[str, list[tuple[str, str]]] = {}
    calls: Counter[tuple[str, str]] = Counter()
    app = Plain(cluster)
    app.master_epochs = 4
    worker = cluster.workers[0]

    async def on_round(record: Any) -> None:
        if record.version == 2:
            trace()
            await worker.run_method(trace_there)
            await worker.run_method(collect_there)
            collect()
        if record.version == 3:
            calls_of["master"] = [call[:2] for call in collect()]
            calls.update(await collected(worker))

    app.on_round = on_round  # type: ignore[method-assign]
    await app.train_sync()
    calls_of["worker"] = sorted(calls - await own_calls(worker))
    return calls_of


async def push_of(cluster: Any, inside: str) -> dict[str, list[tuple[str, str]]]:
    """Return the calls that each push makes, by side."""
    calls: dict[str, Counter[tuple[str, str]]] = {}
    app = Plain(cluster)
    vars(app).update(mode="downpour", shard_workers=1, shards=1, copies=0, n_fetch=10_000, n_push=1, master_epochs=8)
    app.batch_size = 4
    pushes = SAMPLES // (2 * app.batch_size)
    replica, server = cluster.workers

    async def on_round(record: Any) -> None:
        if record.version == 2:
            for worker in cluster.workers:
                await collected(worker)  # sends its code, which is not part of a push
            await replica.run_method(trace_there, inside=inside)
            await server.run_method(trace_there)
        if record.version == 6:  # each slot has begun and ended a round since
            calls["replica"], calls["server"] = await collected(replica), await collected(server)

    app.on_round = on_round  # type: ignore[method-assign]
    await app.train_downpour()
    return {name: sorted(call for call, count in calls[name].items() if count >= pushes) for name in calls}


def show(title: str, traced: dict[str, list[tuple[str, str]]], *, as_list: bool) -> None:
    """Print the number of files and functions of each side and of both, or all of them."""
    files = {side: {name for name, _ in calls} for side, calls in traced.items()}
    print(f"{title}: {len(set().union(*files.values()))} files")
    for side, calls in traced.items():
        print(f"  {side}: {len(files[side])} files, {len(calls)} functions")
        for name in sorted(files[side]) if as_list else ():
            print(f"    {name}: {', '.join(sorted(function for file, function in calls if file == name))}")


async def main(inside: str, *, as_list: bool) -> None:
    """Trace a synchronous round and a push."""
    from ddlf import Cluster

    async with Cluster.local(2) as cluster:
        traced = await round_of(cluster)
    async with Cluster.local(2) as cluster:
        pushed = await push_of(cluster, inside)
    show("round", traced, as_list=as_list)
    show("push", pushed, as_list=as_list)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the files and functions")
    parser.add_argument("--inside", default=INSIDE, help="what Downpour calls at the end of a batch")
    options = parser.parse_args()
    asyncio.run(main(options.inside, as_list=options.list))
