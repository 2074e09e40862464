"""Local rules, which change the gradients of local training, so that slots do not drift apart. Runs on workers.

A local rule is a value with pure functions. Each call is about one tensor. ``w`` are the first weights of the round,
``y`` the weights in a local step, and ``g`` the gradient of the loss at ``y``::

    constant(w, control, mean) -> h       once a round
    correction(y, h) -> d                 each step: the optimizer is given g + d
    left(control, mean, w - y, K, rate)   after K steps: the slot's control of its next round

The backend traces ``correction``, so it may only use operators. Values that change from round to round are in ``h``,
which the backend stores as a variable.

If a rule ``steers``, each slot has a *control*, which is part of its state: an estimate of the slot's gradients. The
correction uses the control and the mean of all slots' controls. Only trainable tensors have controls.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Protocol

import numpy as np

from ddlf.algorithms.rule_text import Family, Named
from ddlf.algorithms.weights import Tensor
from ddlf.errors import ConfigError

Control = list[Tensor | None]
"""The control variate of a slot, or the mean over all slots. None stands for an untrained tensor."""


class LocalRule(Protocol):
    """Base of all local rules: each changes the gradients of local training.

    Attributes:
        steers: Whether slots have controls, whose mean travels with the weights.
    """

    steers: ClassVar[bool]

    def constant(self, weight: Tensor, control: Tensor, mean: Tensor) -> Tensor:
        """Return the array that all steps of the round use for a tensor, with the tensor's shape."""

    def correction(self, weight: Any, constant: Any) -> Any:
        """Return the term to add to the gradient. Arguments and result are tensors of the backend."""

    def new_control(self, control: Tensor, mean: Tensor, update: Tensor, steps: int, rate: float) -> Tensor:
        """Return the slot's new control (estimate of its gradients) after a round.

        Args:
            control: The slot's control in this round.
            mean: Mean of the control variates of all slots.
            update: Weights before minus weights after.
            steps: Steps of the optimizer in the round, > 0.
            rate: Learning rate of the optimizer, >= 0.
        """

    def check_optimizer(self, optimizer: Mapping[str, Any]) -> None:
        """Raise an error for an optimizer that would make the rule incorrect.

        Args:
            optimizer: The result of ``describe_optimizer``.

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

    def constant(self, weight: Tensor, control: Tensor, mean: Tensor) -> Tensor:
        return weight

    def correction(self, weight: Any, constant: Any) -> Any:
        return 0.0

    def new_control(self, control: Tensor, mean: Tensor, update: Tensor, steps: int, rate: float) -> Tensor:
        return control

    def check_optimizer(self, optimizer: Mapping[str, Any]) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class FedProx(Plain):
    """Pull local training towards the weights that its round began with.

    The rule adds ``(mu / 2) * norm(y - w)**2`` to the local loss, with ``w`` the first weights of the round. Per
    tensor::

        g <- g + mu * (y - w)

    The optimizer receives the changed gradient, so clipping and momentum apply to it, too. ``mu=0`` is plain training.

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

    def correction(self, weight: Any, constant: Any) -> Any:
        return self.mu * (weight - constant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold(Plain):
    """Remove the difference between a slot's gradients and the mean of all slots (option II).

    ``c_i`` is the control of slot i, and ``c`` the mean of all N slots' controls; both start at 0. In K local steps
    with the learning rate ``eta`` from ``w`` to ``y``, per tensor::

        y <- y - eta * (g - c_i + c)
        c_i <- c_i - c + (w - y) / (K * eta)

    The merge and the outer optimizer compute the global weights; the outer rate is the source's ``eta_g``. The source's
    ``c + (1/N) sum (c_i+ - c_i)`` equals the mean of all controls, so DDLF computes a mean. Rounding errors then cannot
    add up. The controls of slots that are added later start at 0.

    The second line holds only for plain SGD in synchronous training, so DDLF refuses other optimizers and modes. If
    callbacks change the rate within a round, ``eta`` is its mean over the K steps, which keeps the line exact. A
    control variate is as large as the weights and travels both ways with them.

    Source:
        Karimireddy et al. 2019, arXiv:1910.06378, Algorithm 1.
    """

    steers: ClassVar[bool] = True
    only: ClassVar[str] = "sync"
    """The mode that supports this rule."""

    def constant(self, weight: Tensor, control: Tensor, mean: Tensor) -> Tensor:
        return np.asarray(mean - control, weight.dtype)

    def correction(self, weight: Any, constant: Any) -> Any:
        return constant

    def new_control(self, control: Tensor, mean: Tensor, update: Tensor, steps: int, rate: float) -> Tensor:
        # A rate of 0 says nothing about the gradients.
        return np.asarray(control - mean + update / (steps * rate), control.dtype) if rate else control

    def check_optimizer(self, optimizer: Mapping[str, Any]) -> None:
        name = optimizer.get("optimizer")
        rate = optimizer.get("optimizer learning_rate", 0.0)
        extras = sorted(key.partition(" ")[2] for key, value in optimizer.items() if _matters(key, value))
        if name != "SGD" or extras or not isinstance(rate, int | float):
            description = (
                f"{name} with {', '.join(extras)}" if extras else f"{name}" if name != "SGD" else "SGD with a schedule"
            )
            raise ConfigError(
                f"local_rule='scaffold' needs plain SGD with a constant learning rate, but the model is compiled with {description}",
                hint="compile it with keras.optimizers.SGD(0.01), or use local_rule='fedprox'",
            )


def mean_control(controls: Sequence[Control | None]) -> Control | None:
    """Return the mean of all slots' controls (estimates of their gradients); None if all controls are None.

    It is summed in slot order in float64.

    A control of None counts as zeros.
    """
    defined = [control for control in controls if control is not None]
    if not defined:
        return None

    def mean(parts: Sequence[Tensor | None]) -> Tensor | None:
        arrays = [part for part in parts if part is not None]
        if not arrays:
            return None
        total = np.zeros(arrays[0].shape, np.float64)
        for array in arrays:
            total += array
        return np.asarray(total / len(controls), arrays[0].dtype)

    return [mean(parts) for parts in zip(*defined, strict=True)]


LOCAL: Family[LocalRule] = Family("local rule", plain=Plain, fedprox=FedProx, scaffold=Scaffold)
"""Every local rule by name."""


def _matters(key: str, value: Any) -> bool:
    """Return whether an entry of an optimizer's configuration makes its step differ from ``w - rate * g``."""
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
