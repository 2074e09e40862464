"""Bringing nodes to where training can begin: connected, model built, data loaded and the same everywhere. Runs on the master."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from ddlf.cluster.proxy import ProxyWorker
from ddlf.errors import AppError, DatasetMismatch
from ddlf.training import replica
from ddlf.training.evaluation import maybe_await
from ddlf.training.precision import WORTH_SAYING
from ddlf.training.replica import describe_weights
from ddlf.wire.messages import Request
from ddlf.worker.datasets import fingerprint, not_finite


async def prepare(app: Any, seed: int | None = None) -> int:
    """Bring every node to where training can begin: connected, model built, data loaded and the same everywhere.

    Args:
        seed: Of the initial weights, when the model is made here; by default the attribute.

    Returns:
        The number of training samples.
    """
    await app.connect()
    begin = time.perf_counter()
    # The workers import Keras and build their models while this side does.
    app._run = secrets.token_hex(8)
    again = app.cluster.options(idempotent=True)  # a worker that dies meanwhile gets it once more
    opening = asyncio.ensure_future(again.run_method(replica.open_app, app=app, run=app._run))
    await asyncio.sleep(0)
    try:
        if not hasattr(app, "x_train"):
            await maybe_await(app.load_dataset())
        if not hasattr(app, "model"):
            import keras

            keras.utils.set_random_seed(app.seed if seed is None else seed)
            await maybe_await(app.create_model())
            if not hasattr(app, "model"):
                raise AppError("create_model set no self.model", hint="end it with self.model = ...")
    except BaseException:
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        raise
    opened = await opening
    _check_models(app, [facts["weights"] for facts in opened])
    threads = sorted({worker.facts["threads"] for worker in app.cluster.workers})
    app.say(
        f"model     {app.model.name}: {app.model.count_params():,} parameters, Keras {opened[0]['keras']} on "
        f"{opened[0]['backend']}, threads per worker {'-'.join(map(str, threads))}, "
        f"ready in {time.perf_counter() - begin:.1f} s"
    )
    if opened[0]["gain"] > WORTH_SAYING:
        app.say(
            f"precision float32; matrix products are {opened[0]['gain']:.1f}x as fast in bfloat16 here: try mixed_bfloat16"
        )
    mine = fingerprint(app.x_train, app.y_train) if hasattr(app, "x_train") else ""
    for name in ("x_train", "y_train") if mine else ():
        if found := not_finite(getattr(app, name)):
            app.say(f"data      WARNING {found} of {name} are NaN or infinite")
    loaded = await again.run_method(replica.load_data, wanted=mine)
    _check_data(mine, loaded)
    app._content = loaded[0]["fingerprint"]
    samples: int = loaded[0]["samples"]
    news = sum(facts["loaded"] for facts in loaded)
    how = (
        f"loaded on {news} workers in {max(facts['seconds'] for facts in loaded):.1f} s"
        if news
        else f"already on all {len(loaded)} workers, nothing loaded"
    )
    app.say(
        f"data      {samples:,} samples of shape {tuple(loaded[0]['shape'])}, content {loaded[0]['fingerprint']}: {how}"
    )
    return samples


async def open_worker(app: Any, worker: ProxyWorker) -> None:
    """Bring one worker to where training is: app, model and data, checked as at the beginning."""
    facts = await worker.rpc(Request("run_method", replica.open_app, app=app, run=app._run))
    _check_models(app, [facts["weights"]], worker.id)
    loaded = await worker.rpc(Request("run_method", replica.load_data, wanted=app._content))
    _check_data(app._content, [loaded], worker.id)


def _check_models(app: Any, weights: list[list[list[Any]]], first: int = 1) -> None:
    mine = [tuple(row[1:]) for row in describe_weights(app.model)]
    for number, theirs in enumerate(weights, first):
        if [tuple(row[1:]) for row in theirs] != mine:
            raise AppError(
                f"create_model makes another model on worker {number} ({len(theirs)} weights) than on the master ({len(mine)})",
                hint="it must not depend on the machine it runs on",
            )


def _check_data(mine: str, loaded: list[dict[str, Any]], first: int = 1) -> None:
    contents = {facts["fingerprint"] for facts in loaded} | ({mine} if mine else set())
    if len(contents) == 1:
        return
    rows = [("master", mine, "", "", "")] if mine else []
    rows += [
        (f"worker {n}", f["fingerprint"], f"{f['samples']:,}", str(tuple(f["shape"])), f["dtype"])
        for n, f in enumerate(loaded, first)
    ]
    table = "\n".join(f"  {who:<10} {content:<17} {n:>9} {shape:<18} {dtype}" for who, content, n, shape, dtype in rows)
    raise DatasetMismatch(
        f"the training data differs between nodes, so training was not started:\n  {'node':<10} {'content':<17} "
        f"{'samples':>9} {'shape':<18} dtype\n{table}\n",
        hint="give every node the same files, and load them without shuffling by chance",
    )
