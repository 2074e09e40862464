"""Sandblaster L-BFGS: its settings. Runs everywhere; imports no heavy modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ddlf.settings.checks import Number, Whole
from ddlf.settings.setting import FACT, FILE, Setting
from ddlf.training.spec import Refusal, RunSpec
from ddlf.training.strategy import CommonStep, Loop, Strategy, WeightContext

if TYPE_CHECKING:
    from ddlf.training.context import App
    from ddlf.training.exchanges.carrier import WeightSource

ONE_STEP = "an iteration is one step along a direction that all samples decide"
OF_LOCAL_TRAINING = (
    "worker_steps",
    "round_samples",
    "worker_callbacks",
    "clip",
    "schedule",
    "multipliers",
    "freeze",
    "batchnorm",
)
"""Settings of other groups that only affect local training, besides the settings in ``unused``."""


@dataclass(frozen=True)
class LBFGS(Strategy):
    """Sandblaster L-BFGS (Dean et al. 2012, section 4.2): each iteration uses all samples and makes one step.

    The weights, the gradient and the last pairs of L-BFGS are in shards on the workers. The master sends them small
    commands, and has no vector while it trains. It decides the direction and the step from numbers.
    """

    name: ClassVar[str] = "lbfgs"
    words: ClassVar[str] = "L-BFGS"
    about: ClassVar[str] = "once per epoch, by an L-BFGS step from the gradient of all samples"
    in_rounds: ClassVar[bool] = True
    encodes_small: ClassVar[bool] = True
    keeps_optimizer: ClassVar[bool] = False
    about_rates: ClassVar[str] = "has no effect: the line search chooses the length of each step"
    role: ClassVar[str] = "ddlf.training.strategies.lbfgs.replica:LbfgsReplica"
    slot_parts: ClassVar[tuple[str, ...] | None] = ()
    no_peer: ClassVar[str] = "its directions follow from earlier weights, which a merge makes invalid"
    unused: ClassVar[dict[str, str]] = {
        "worker_epochs": ONE_STEP,
        "batch_size": "a worker computes a whole portion at once, whose size is the setting portion",
        "exchange": "portions of the samples travel to shards on the workers",
        "codec": "gradients are added without a codec, so that sums have the same bits in every order",
        "weights_codec": "the loss must be that of the exact weights",
        "optimizer_state": "the compiled optimizer does not step",
        "local_rule": "there is no local training",
        "balance": "a free worker takes the next portion",
        "partition": "every portion counts alike",
        "rate_decay": "the line search chooses the length of each step",
        "update_policy": "a step with NaN or infinite values is not taken, and the line search tries a shorter one",
    }

    history: Setting[int, int] = Setting(
        10,
        Whole(1),
        "pairs of changes of weights and gradient that the direction is made from",
        "N",
        FACT,
        flat="pairs",
    )
    """m of the literature. Each pair takes twice the memory of the weights, divided among the shards."""

    tolerance: Setting[float, float] = Setting(
        1e-5, Number(0), "training ends when no value of the gradient is larger", "X", FILE
    )

    portion: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="an eighth of a slot's samples"),
        "samples that a worker computes at once, as one batch (default: an eighth of a slot's)",
        "N",
        FILE | FACT,
    )
    """Free workers take portions one by one. Smaller portions balance unequal workers better, and need less memory."""

    shards: Setting[int | None, int | None] = Setting(
        None,
        Whole(1, none="one on each worker"),
        "number of parts that the vectors are cut into, on the workers (default: one per worker)",
        "N",
        FILE,
    )
    """In L-BFGS a part has at least 65,536 values, so a small model has one part. The result does not depend on the number."""

    def loop(self, spec: RunSpec, step: CommonStep | None) -> Loop:
        """Return the master's training loop, which decides the direction and the step of each iteration."""
        from ddlf.training.strategies.lbfgs.master import Iterations

        return Iterations(history=self.history, tolerance=self.tolerance, portion=self.portion, shards=self.shards)

    def weights(self, weight_context: WeightContext) -> WeightSource:
        """Return the object through which the master reaches the shards on the workers."""
        from ddlf.training.exchanges.members import Members
        from ddlf.training.strategies.lbfgs.shards import SHARDS

        return Members(weight_context.run, weight_context.crew, weight_context.cluster, weight_context.lossless, SHARDS)

    def has_fixed_slots(self, spec: RunSpec) -> bool:
        """Return True: the default size of a portion follows from the number of slots."""
        return True

    def check_model(self, app: App) -> None:
        """Raise an error if the model's loss is not a mean over samples."""
        from ddlf.training.strategies.lbfgs.replica import check_loss

        check_loss(app)

    def refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield an error for each setting that needs local training or single steps."""
        for setting, value in spec.changed(OF_LOCAL_TRAINING):
            yield Refusal(
                bool(value),
                f"{setting.name}={str(value)!r} is for local training: with mode='lbfgs' there is none",
                f"leave {setting.name} at {setting.default!r}, or train in mode 'sync'",
            )
        yield Refusal(
            spec.local.precision in ("mixed_float16", "mixed_bfloat16"),
            f"precision={spec.local.precision!r} rounds gradients too coarsely for a line search",
            "use precision='float32', or train in mode 'sync'",
        )

    def file_refusals(self, spec: RunSpec) -> Iterator[Refusal]:
        """Yield an error for files, because portions name samples by index."""
        yield Refusal(
            True,
            "mode='lbfgs' trains on arrays, but this app has train_data",
            "load the samples as self.x_train and self.y_train, or train in mode 'sync'",
        )

    def worker_refusals(self, workers: int, one_at_a_time: bool) -> Iterator[Refusal]:
        """Yield an error if the workers cannot answer while they compute."""
        yield Refusal(
            one_at_a_time,
            "mode='lbfgs' needs workers that answer while others compute, but workers of in_process_cluster do one thing at a time",
            "use local_cluster",
        )
