"""The exchange ``split``: its settings and refusals. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, ClassVar

from ddlf.errors import AppError, ConfigError
from ddlf.settings.checks import Whole
from ddlf.settings.setting import FACT, FILE, Setting
from ddlf.training.exchanges.split.cut import CUT, Cut
from ddlf.training.spec import Refusal, RunSpec
from ddlf.training.strategy import Exchange, Loop, WeightContext

if TYPE_CHECKING:
    from ddlf.algorithms.merge import Rule
    from ddlf.algorithms.outer import OuterOptimizer
    from ddlf.training.context import App
    from ddlf.training.crew.crew import Crew
    from ddlf.training.exchanges.carrier import WeightSource
    from ddlf.training.exchanges.split.plan import Plan
    from ddlf.training.exchanges.states import SlotStates
    from ddlf.training.slot.parts import Kept
    from ddlf.training.slot.task import SlotState

USUAL_MICRO_BATCHES = 8
"""Micro-batches of a batch, if the user sets no number. Two stages are then idle for a ninth of the time. Without
stages there is one."""
ONE_SLOT = "a worker has only a part of a copy of the model"
NO_UPDATE = "parts step by themselves, so there are no updates to merge"


@dataclass(frozen=True)
class Split(Exchange):
    """Each worker has a part of the model. Workers exchange activations and their gradients.

    One process that adds up the gradients of the same micro-batches gets the same weights.
    """

    name: ClassVar[str] = "split"
    strategies: ClassVar[tuple[str, ...]] = ("sync", "downpour")
    about: ClassVar[str] = "activations between parts of one model"
    chosen_by: ClassVar[str] = "split"
    spans_workers: ClassVar[bool] = True
    slot_parts: ClassVar[tuple[str, ...] | None] = ("optimizer",)
    role: ClassVar[str] = "ddlf.training.exchanges.split.replica:SplitReplica"
    no_peer: ClassVar[str] = "no worker and no master has the whole model"
    unused: ClassVar[dict[str, str]] = {
        "partition": ONE_SLOT,
        "balance": ONE_SLOT,
        "merge": NO_UPDATE,
        "outer": NO_UPDATE,
        "codec": NO_UPDATE,
        "update_policy": NO_UPDATE,
        "local_rule": NO_UPDATE,
        "batchnorm": NO_UPDATE,
        "weights_codec": "weights travel only if a worker lacks them",
        "optimizer_state": "each part keeps its optimizer",
        "evaluate_on": "a worker has only a part of the model",
        "worker_callbacks": "Keras's fit does not run, because no worker has the whole model",
        "on_bad": "all workers read the same batches",
    }

    parts: Setting[Cut | None, Cut | str | None] = Setting(
        None,
        CUT,
        "cut the model into parts for several workers: stages:2, within:2, memory:2GB, or layers:NAME,NAME; "
        "images:rows or images:filters after within",
        "PARTS",
        FILE,
        flat="split",
    )
    """``stages:2`` cuts between layers, so that all parts take about equally many multiplications. ``within:2`` cuts each
    layer, and ``stages:2,within:2`` both. ``within:2,images:rows`` cuts convolutions by rows of images, and
    ``images:filters`` by filters; by default, DDLF chooses the way with fewer bytes. ``memory:2GB`` makes as few parts as
    fit into that memory each. ``layers:`` names the first layers of part 2 and of later parts. A value other than None
    selects ``exchange="split"``."""

    micro_batches: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="8, or one for each sample of a smaller batch; 1 if only layers are cut"),
        "pieces of a batch that pass through the parts of a split model one after another (default: 8; 1 if only layers are cut)",
        "N",
        FILE | FACT,
    )
    """More pieces keep the workers busier; fewer are larger, which computes faster. Batch normalization sees single
    micro-batches."""

    def check_app(self, app: App) -> None:
        """Raise an error for an app with its own ``train``, which trains a whole model.

        Raises:
            AppError: The app has its own ``train``.
        """
        if app.train.__module__ != "ddlf.app":
            raise AppError(
                f"{type(app).__name__}.train trains a whole model, and with split no worker has one",
                hint="leave out train, or leave out split",
            )

    async def chosen(self, app: App, crew: Crew, spec: RunSpec) -> tuple[Exchange, str]:
        """Return the exchange with the plan of this run, and the plan as a table.

        Raises:
            AppError, ConfigError: The model cannot be cut.
        """
        from ddlf.events import Warned

        assert self.parts is not None
        plan = self._plan(app, spec)
        check_workers(self.parts, plan, crew.size, spec.slots or 1)
        app.run_context.emit(plan.event())
        if warning := plan.warning():
            app.run_context.emit(Warned(about="model", why=warning))
        values = {setting.field: getattr(self, setting.field) for setting in self.settings()}
        return Planned(**values, plan=plan, reads=reads_model(app)), plan.describe(spec.slots or 1)

    async def preview(self, app: App, spec: RunSpec) -> str:
        """Return the plan of a run that does not begin. It loads the data, and builds the model without memory.

        Raises:
            AppError, ConfigError: The model cannot be cut.
        """
        from ddlf.data.app_data import take_made
        from ddlf.rpc.iworker import awaited
        from ddlf.training.exchanges.split.variables import unmade
        from ddlf.training.slot.build import fresh_names, ready_model

        await awaited(app.load_dataset())
        take_made(app)
        with fresh_names(), unmade():
            await awaited(app.create_model())
            ready_model(app)
        return self._plan(app, spec).describe(spec.slots or 1)

    def _plan(self, app: App, spec: RunSpec) -> Plan:
        from ddlf.training.exchanges.split.graph import Graph, check_graph
        from ddlf.training.exchanges.split.layer_plan import check_steps
        from ddlf.training.exchanges.split.plan import Plan
        from ddlf.training.slot.build import first_rows
        from ddlf.training.slot.gradients import check_mean_losses

        assert self.parts is not None
        graph = Graph.of(app.model)
        check_graph(graph)
        check_mean_losses(app.model, "split", first_rows(app, "train"))
        size = spec.data.batch_size
        if self.parts.within > 1:
            check_steps(app.model.optimizer)
        usual = 1 if self.parts.within > 1 and self.parts.parts == 1 else min(USUAL_MICRO_BATCHES, size)
        replicas = (spec.slots or 1) if spec.train.in_rounds else 1  # others train at their own pace
        plan = Plan.of(graph, self.parts, size, self.micro_batches or usual, replicas)
        plan.check()
        return plan

    def weights(self, weight_context: WeightContext) -> WeightSource:
        """Return the object through which workers meet. Their weights come from the master's loop."""
        from ddlf.training.exchanges.members import Members
        from ddlf.training.roles import REPLICA

        return Members(
            weight_context.run, weight_context.crew, weight_context.cluster, weight_context.lossless, REPLICA
        )

    def states(
        self, weight_context: WeightContext, source: WeightSource, states: list[SlotState], parts: Mapping[str, Kept]
    ) -> SlotStates:
        """Return the object that manages the optimizer, which stays with the parts."""
        from ddlf.training.exchanges.split.states import SplitStates

        return SplitStates(
            weight_context.run,
            weight_context.crew,
            states,
            parts,
            weight_context.spec.exchange.codec.name,
            source.restoring,
        )

    def worker_refusals(self, workers: int, one_at_a_time: bool, slots: int) -> Iterator[Refusal]:
        """Yield an error if the workers are too few, or cannot answer while they compute."""
        yield Refusal(
            one_at_a_time,
            f"split={str(self.parts)!r} needs workers that compute at the same time, but workers of in_process_cluster do one thing at a time",
            "use local_cluster",
        )
        least = 0 if self.parts is None else self.parts.least * slots
        several = slots > 1
        yield Refusal(
            least > workers,
            f"split={str(self.parts)!r} needs {least} workers{f' for {slots} slots' * several}, "
            f"and there {'are' if workers > 1 else 'is'} {workers}",
            "start more workers" + ", use fewer slots" * several + ", or cut the model into fewer parts",
        )

    def refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield an error for each setting that a model in parts does not support."""
        yield Refusal(
            self.parts is None,
            "exchange='split' needs to know how the model is cut",
            "set split, such as split='stages:2' (--split stages:2)",
        )
        size, micro_batches = spec.data.batch_size, self.micro_batches or 1
        yield Refusal(
            micro_batches > size,
            f"micro_batches={micro_batches} are more than the {size} sample{'s' * (size > 1)} of a batch",
            f"use at most {size}, or a larger batch_size",
        )
        yield Refusal(
            spec.local.precision not in ("auto", "float32"),
            f"precision={spec.local.precision!r} is not supported with split: parts exchange float32 values",
            "leave out precision, or leave out split",
        )
        for setting, value in spec.changed(("clip", "multipliers")):
            yield Refusal(
                True,
                f"{setting.name}={str(value)!r} wraps the optimizer, and with split each part has only its own gradients",
                f"leave out {setting.name}" + (", or use clipnorm of the optimizer" if setting.name == "clip" else ""),
            )


@dataclass(frozen=True)
class Planned(Split):
    """The exchange of a run whose model has been planned.

    Args:
        plan: How the model is cut.
        reads: Whether a hook of the app reads the model after each round.
    """

    plan: Plan | None = None
    reads: bool = False

    def loop(self, merge: Rule, outer: OuterOptimizer, balance: str) -> Loop:
        """Return the master's training loop, in which a group of workers trains one copy of the model."""
        from ddlf.training.exchanges.split.master import Pipeline

        assert self.plan is not None
        return Pipeline(self.plan, self.reads)


def reads_model(app: App) -> bool:
    """Return whether a hook of an app reads ``self.model``, so that the master needs the weights after each round.

    A hook without Python code may do so, too.
    """
    hooks = (getattr(app, name) for name in ("on_round", "on_event", "is_convergent"))
    own_hooks = [getattr(hook, "__func__", hook) for hook in hooks if getattr(hook, "__module__", "") != "ddlf.app"]
    return any("model" in names_in(hook.__code__) if hasattr(hook, "__code__") else True for hook in own_hooks)


def names_in(code: CodeType) -> set[str]:
    """Return the names of attributes and variables in the code of a function and of the functions in it."""
    return {*code.co_names}.union(
        *(names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    )


def check_workers(cut: Cut, plan: Plan, workers: int, slots: int = 1) -> None:
    """Raise an error if there are fewer workers than parts in all slots.

    Raises:
        ConfigError: There are fewer workers.
    """
    slots = max(slots, plan.replicas)
    parts = plan.parts_of_replica * slots
    if parts > workers:
        copies = f" in {slots} slots" * (slots > 1)
        raise ConfigError(
            f"split={str(cut)!r} makes {parts} parts of this model{copies}, and there {'are' if workers > 1 else 'is'} "
            f"{workers} worker{'s' * (workers > 1)}",
            hint="start more workers, use fewer slots, or cut the model into fewer parts",
        )
