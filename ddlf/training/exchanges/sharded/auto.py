"""``exchange="auto"``: star or sharded, whichever is probably faster. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddlf.errors import ConfigError
from ddlf.training.exchanges.sharded.settings import Sharded
from ddlf.training.exchanges.star import Star
from ddlf.training.spec import RunSpec
from ddlf.training.strategy import Exchange

if TYPE_CHECKING:
    from ddlf.extras import MeasuredRounds
    from ddlf.training.context import App
    from ddlf.training.crew.crew import Crew

LINK = 125e6
"""Assumed bandwidth of a link, each way, in bytes per second: 1 Gbit/s."""
AGREED_S = 0.05
"""Time per round for workers to agree on their work in the sharded exchange, in seconds."""


@dataclass(frozen=True)
class Auto(Exchange):
    """Star or sharded, whichever is likely to be faster. A line of the output says which one, and why."""

    name: ClassVar[str] = "auto"
    strategies: ClassVar[tuple[str, ...]] = ("sync",)
    about: ClassVar[str] = "the faster of star and sharded"
    role: ClassVar[str] = Sharded.role
    same_bits_as: ClassVar[str] = Sharded.same_bits_as

    async def chosen(self, app: App, crew: Crew, spec: RunSpec) -> tuple[Exchange, str]:
        """Return the faster exchange and the reason; star if two workers cannot reach each other."""
        from ddlf.extras import measured_rounds
        from ddlf.training.crew.recovery import LOSS
        from ddlf.training.exchanges.members import cannot_reach

        size = sum(w.nbytes for w in app.model.get_weights())
        exchange, reason = fastest(spec, app.cluster.N, size, measured_rounds(app, app.cluster))
        if isinstance(exchange, Sharded):
            present = [worker for worker in app.cluster.workers if crew.member(worker.id) is not None]
            try:
                unmet = await app.cluster.introduced(present, app.run_context.name)
            except LOSS:
                unmet = []  # a lost worker is introduced when it is back
            for caller, callee, error in unmet:
                return Star.of_flat(spec.exchange.flat()), f"{cannot_reach(caller, callee)}: {error}"
        return exchange, reason


def fastest(
    spec: RunSpec, workers: int, weights: int, measured: MeasuredRounds | None = None
) -> tuple[Star | Sharded, str]:
    """Choose the exchange that moves the data of a round in less time.

    Args:
        spec: All settings of the run.
        workers: K, the number of workers that train.
        weights: P, the bytes of the model's weights.
        measured: Measured times of the app on these workers; without them, links are assumed to have 1 Gbit/s.

    Returns:
        The exchange, and the reason.

    Formula:
        Over links of B bytes/s each way, ``2 K P / B`` through the master; ``2 (K - 1) / K P / B`` plus the time to
        agree from worker to worker. If only rounds through the master were measured, each worker adds ``2 P / B`` to
        them. If both were measured, B is not needed.
    """
    from ddlf.training.refusals import check

    through_master, between_workers = Star.of_flat(spec.exchange.flat()), Sharded.of_flat(spec.exchange.flat())
    try:
        check(between_workers.refusals(spec))
    except ConfigError as error:
        return through_master, error.message
    worker_s, source = 2 * weights / LINK, "at 1 Gbit/s, which is assumed: ddlf plan measures it"
    star_s, sharded_s = workers * worker_s, (workers - 1) / workers * worker_s + AGREED_S
    if measured is not None and workers > 1:
        codec = str(spec.exchange.codec)
        one_worker_s, all_workers_s, measured_s = (
            measured.exchange_s("sync", exchange, codec, slots)
            for exchange, slots in (("star", 1), ("star", workers), ("sharded", workers))
        )
        if one_worker_s is not None and all_workers_s is not None:
            worker_s, source = (all_workers_s - one_worker_s) / (workers - 1), measured.origin
            star_s = workers * worker_s if measured_s is None else all_workers_s
            sharded_s = (workers - 1) / workers * worker_s + AGREED_S if measured_s is None else measured_s
    size = f"{workers} worker{'s' * (workers > 1)} and {weights / 1e6:.3g} MB of weights"
    times = f"{star_s:.2g} s through the master and {sharded_s:.2g} s from worker to worker"
    return (
        between_workers if sharded_s < star_s and workers > 1 else through_master,
        f"for {size} the exchange of a round takes about {times}, {source}",
    )
