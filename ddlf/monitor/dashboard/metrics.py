"""Metrics of a board for Prometheus, in base units, with the prefix ``ddlf_``. Needs prometheus-client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ddlf.monitor.dashboard.board import Board
from ddlf.version import __version__

CONTENT_TYPE = CONTENT_TYPE_LATEST
OF_UPDATES = (
    ("updates", "updates", "Updates that have arrived"),
    ("trained", "samples", "Samples that these updates were trained on, counted in each local epoch"),
    ("compute_s", "compute_seconds", "Seconds of local training"),
    ("transfer_s", "transfer_seconds", "Seconds from sending weights to receiving updates, without local training"),
    ("bytes_out", "sent_bytes", "Bytes sent for these updates"),
    ("bytes_back", "received_bytes", "Bytes received for these updates"),
    ("lost", "lost", "How often the worker was lost"),
)
"""Field of ``Sums``, name of the metric, and its help text."""
OF_CARDS = (
    ("utilisation", "utilisation_percent", "Percent of the time in which a card of the worker computes"),
    ("memory", "memory_bytes", "Used memory of a card of the worker"),
    ("watts", "power_watts", "Power of a card of the worker"),
    ("celsius", "temperature_celsius", "Temperature of a card of the worker"),
)
"""Field of ``Reading``, name of the metric, and its help text."""


def text(board: Board) -> bytes:
    """Return all metrics of a board, in Prometheus's text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Board(board))
    return generate_latest(registry)


class _Board(Collector):
    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        board, state, header = self._board, self._board.state, self._board.header
        yield InfoMetricFamily("ddlf", "Release of DDLF on the master", {"version": __version__})
        if state.app:
            about = dict(run=header.run, app=header.app, mode=header.mode, model=header.model, how=state.how)
            yield InfoMetricFamily("ddlf_run", "The run; the label how is empty until the run has ended", about)
            yield _gauge("ddlf_run_training", "Whether rounds are being computed", float(state.is_training))
            yield _gauge("ddlf_run_start_timestamp_seconds", "When the run began, since 1970", state.began)
            yield _gauge("ddlf_run_done_ratio", "Finished share of the run", state.done)
            yield _gauge("ddlf_rounds", "Rounds of the whole run, of each slot if it is asynchronous", state.rounds)
            yield _gauge("ddlf_version", "Merges so far", state.record.version if state.record else header.first)
            rejected = CounterMetricFamily("ddlf_updates_rejected", "Rejected updates")
            rejected.add_metric([], header.rejected)
            yield rejected
            metric = GaugeMetricFamily("ddlf_metric", "Newest value of a metric of the model", labels=["name"])
            for name, value in state.metrics.items():
                metric.add_metric([name], value)
            yield metric
            if record := state.record:
                parts = dict(
                    compute=record.compute_s, transfer=record.transfer_s, merge=record.merge_s, wait=record.wait_s
                )
                spent = GaugeMetricFamily(
                    "ddlf_round_seconds", "Seconds of the newest round, by activity", labels=["part"]
                )
                for part, seconds in parts.items():
                    spent.add_metric([part], seconds)
                yield spent
        for fact, name, description in OF_UPDATES:
            counter = CounterMetricFamily(f"ddlf_worker_{name}", description, labels=["worker"])
            for worker, sums in sorted(board.sums.items()):
                counter.add_metric([str(worker)], getattr(sums, fact))
            yield counter
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("ddlf_worker_up", "Whether the worker answers", labels=["worker", "name", "state"])
        busy = GaugeMetricFamily("ddlf_worker_busy", "Whether the worker runs a method", labels=["worker"])
        memory = GaugeMetricFamily("ddlf_worker_memory_bytes", "Memory of the worker's processes", labels=["worker"])
        cores = GaugeMetricFamily("ddlf_worker_cores", "Cores that the worker may use", labels=["worker"])
        restarts = CounterMetricFamily(
            "ddlf_worker_restarts", "Executors of the worker that have ended", labels=["worker"]
        )
        for worker in self._board.workers:
            number = str(worker["worker"])
            up.add_metric([number, worker["name"], worker["state"]], float(worker["state"] in ("alive", "suspect")))
            if "host" not in worker:
                continue  # the worker has not answered yet
            busy.add_metric([number], float(worker["busy"] is not None))
            restarts.add_metric([number], worker["restarts"])
            for family, value in ((memory, (worker.get("memory") or {}).get("used")), (cores, worker.get("cores"))):
                if value is not None:
                    family.add_metric([number], value)
        yield from (up, busy, memory, cores, restarts, *self._cards())

    def _cards(self) -> Iterator[Metric]:
        for fact, name, description in OF_CARDS:
            family = GaugeMetricFamily(f"ddlf_card_{name}", description, labels=["worker", "card"])
            for worker in self._board.workers:
                for card in worker.get("cards") or ():
                    if card[fact] is not None:
                        family.add_metric([str(worker["worker"]), card["number"]], card[fact])
            if family.samples:
                yield family


def _gauge(name: str, description: str, value: Any) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, description, value=float(value))
