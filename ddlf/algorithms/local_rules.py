"""Local rules: they change the gradients of local training, so that slots do not drift apart. Runs on workers.

A local rule is a value with pure functions, of one tensor each. With w the first weights of the round, y the weights
in a local step, g the gradient of the loss at y::

    held(w, control, mean) -> h           once a round
    correction(y, h) -> d                 each step: the optimizer is given g + d
    left(control, mean, w - y, K, rate)   after K steps: the slot's control of its next round

``correction`` is traced by the backend, so it is of operators alone, and what changes from round to round is in
``h``, which is a variable there.

A slot has a *control*, which is part of its state, if its rule ``steers``: what its gradients were, beside the mean
of all slots' controls. Only trainable tensors have either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Protocol

import numpy as np

from ddlf.algorithms.named import Family, Named
from ddlf.algorithms.weights import Tensor
from ddlf.errors import ConfigError

Control = list[Tensor | None]
"""A control variate of a slot, or the mean of all. None stands for an untrained tensor."""


class LocalRule(Protocol):
    """Base of all local rules.

    Attributes:
        steers: Whether slots have controls, whose mean travels with the weights.
    """

    steers: ClassVar[bool]

    def held(self, weight: Tensor, control: Tensor, mean: Tensor) -> Tensor:
        """Return what the round's steps need of a tensor, of its shape."""

    def correction(self, weight: Any, held: Any) -> Any:
        """Return the addition to the gradient. Arguments and result are tensors of the backend."""

    def left(self, control: Tensor, mean: Tensor, update: Tensor, steps: int, rate: float) -> Tensor:
        """Return the control after a round.

        Args:
            control: That of the slot in the round.
            mean: Mean of the control variates of all slots.
            update: Weights before minus weights after.
            steps: Steps of the optimizer in the round, > 0.
            rate: Its learning rate, >= 0.
        """

    def check_optimizer(self, optimizer: Mapping[str, Any]) -> None:
        """Refuse an optimizer that the rule is not right with.

        Args:
            optimizer: As ``describe_optimizer`` tells it.

        Raises:
            ConfigError: The rule cannot be used; the message names the reason.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(Named):
    """Train with the gradients as they are.

    Source:
        Phan, Do 2023, Algorithm 2; FedAvg, arXiv:1602.05629.
    """

    steers: ClassVar[bool] = False

    def held(self, weight: Tensor, control: Tensor, mean: Tensor) -> Tensor:
        return weight

    def correction(self, weight: Any, held: Any) -> Any:
        return 0.0

    def left(self, control: Tensor, mean: Tensor, update: Tensor, steps: int, rate: float) -> Tensor:
        return control

    def check_optimizer(self, optimizer: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProx(Plain):
    """Pull local training towards the weights that its round began with.

    The local loss has ``(mu / 2) * norm(y - w)**2`` added, with w the weights that the round begins with; per tensor::

        g <- g + mu * (y - w)

    The optimizer gets that gradient, so clipping and momentum see it, too. ``mu=0`` is plain training.

    Args:
        mu: Strength of the pull, >= 0. Typical are 0.001 to 1.

    Raises:
        ConfigError: ``mu`` is out of range.

    Source:
        Li et al. 2018, arXiv:1812.06127.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        if not (isfinite(self.mu) and self.mu >= 0):
            raise ConfigError(f"mu must be finite and 0 or more, got {self.mu}")

    def correction(self, weight: Any, held: Any) -> Any:
        return self.mu * (weight - held)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold(Plain):
    """Remove the difference between a slot's gradients and the mean of all slots (option II).

    With c_i the control of slot i, c the mean of all N slots' controls, both 0 at first, K local steps of rate eta from w to y, per tensor::

        y <- y - eta * (g - c_i + c)
        c_i <- c_i - c + (w - y) / (K * eta)

    Merge and outer optimizer make the global weights; the outer rate is the source's ``eta_g``. The source's
    ``c + (1/N) sum (c_i+ - c_i)`` is the mean of the control variates, and is computed as a mean. So no error grows
    in it, and later slots begin with 0.

    The second line holds only for plain SGD in synchronous training, so DDLF refuses other optimizers and modes. If
    callbacks change the rate within a round, ``eta`` is its mean over the K steps, which keeps the line exact. A
    control variate is as large as the weights and travels both ways with them.

    Source:
        Karimireddy et al. 2019, arXiv:1910.06378, Algorithm 1.
    """

    steers: ClassVar[bool] = True
    only: ClassVar[str] = "sync"
    """The mode that takes it."""

    def held(self, weight: Tensor, control: Tensor, mean: Tensor) -> Tensor:
        return np.asarray(mean - control, weight.dtype)

    def correction(self, weight: Any, held: Any) -> Any:
        return held

    def left(self, control: Tensor, mean: Tensor, update: Tensor, steps: int, rate: float) -> Tensor:
        # A rate of 0 says nothing about the gradients.
        return np.asarray(control - mean + update / (steps * rate), control.dtype) if rate else control

    def check_optimizer(self, optimizer: Mapping[str, Any]) -> None:
        name = optimizer.get("optimizer")
        rate = optimizer.get("optimizer learning_rate", 0.0)
        more = sorted(key.partition(" ")[2] for key, value in optimizer.items() if _matters(key, value))
        if name != "SGD" or more or not isinstance(rate, int | float):
            what = f"{name} with {', '.join(more)}" if more else f"{name}" if name != "SGD" else "SGD with a schedule"
            raise ConfigError(
                f"local_rule='scaffold' needs plain SGD with a constant learning rate, but the model is compiled with {what}",
                hint="compile it with keras.optimizers.SGD(0.01), or use local_rule='fedprox'",
            )


def mean_control(controls: Sequence[Control | None]) -> Control | None:
    """Return the mean of all slots' controls, summed in slot order in float64; one that is None counts as zeros, and None is returned if all are."""
    known = [control for control in controls if control is not None]
    if not known:
        return None

    def mean(parts: Sequence[Tensor | None]) -> Tensor | None:
        arrays = [part for part in parts if part is not None]
        if not arrays:
            return None
        total = np.zeros(arrays[0].shape, np.float64)
        for array in arrays:
            total += array
        return np.asarray(total / len(controls), arrays[0].dtype)

    return [mean(parts) for parts in zip(*known, strict=True)]


LOCAL: Family[LocalRule] = Family("local rule", plain=Plain, fedprox=FedProx, scaffold=Scaffold)
"""Every local rule by name."""


def _matters(key: str, value: Any) -> bool:
    """Whether an entry of an optimizer's configuration makes its step another one than ``w - rate * g``."""
    usual = {
        "optimizer momentum": 0.0,
        "optimizer use_ema": False,
        "optimizer weight_decay": "None",
        "optimizer clipnorm": "None",
        "optimizer global_clipnorm": "None",
        "optimizer clipvalue": "None",
        "optimizer gradient_accumulation_steps": "None",
    }
    return key in usual and value not in (usual[key], None)
