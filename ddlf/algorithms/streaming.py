"""Streaming DiLoCo, which exchanges one fragment of the weights in each round. Runs on master and workers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ddlf.algorithms.named import Named
from ddlf.algorithms.per_tensor import Nesterov, State, check_shares
from ddlf.algorithms.weights import Tensor
from ddlf.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming(Named):
    """Exchange one fragment of the weights in each round, with the outer step of DiLoCo. Slots keep their other values.

    The trained tensors are divided into P fragments. Round ``r`` exchanges fragment ``r mod P``. With ``w`` its
    global values, ``w_j`` the values of slot j after its training, and ``g`` the merge of ``w - w_j`` of all slots::

        v <- momentum * v + g
        w <- w - learning_rate * (g + momentum * v)
        w_j <- alpha * w_j + (1 - alpha) * w  (on slot j, before its next round)

    So a round moves ``1 / P`` of the bytes. Untrained tensors (BatchNorm statistics) are exchanged in every round,
    and all tensors in the last one.

    Args:
        fragments: P, > 0, at most the number of trained tensors.
        alpha: Share of a slot's values that survives the exchange of a fragment, in [0, 1).
        learning_rate: Step size on the update, dimensionless, > 0.
        momentum: Share of the previous velocity to keep, in [0, 1).

    Raises:
        ConfigError: A value is out of range.

    Source:
        Douillard et al. 2025, arXiv:2501.18512, Algorithm 2, with layers as fragments; here fragments have equal sizes.
    """

    fragments: int = 4
    alpha: float = 0.0
    learning_rate: float = 0.7
    momentum: float = 0.9

    only: ClassVar[str] = "sync"
    kept: ClassVar[int] = 1
    by_value: ClassVar[bool] = True
    removed: ClassVar[dict[str, str]] = {"overlap": "0"}

    def __post_init__(self) -> None:
        if self.fragments < 1:
            raise ConfigError(f"fragments must be >= 1, got {self.fragments}")
        check_shares(alpha=self.alpha)
        Nesterov(learning_rate=self.learning_rate, momentum=self.momentum)

    def init(self, weights: Sequence[Tensor]) -> State:
        return Nesterov().init(weights)

    def update(
        self,
        state: State,
        weights: Sequence[Tensor],
        merged: Sequence[Tensor],
        trainable: Sequence[bool],
        tensors: Sequence[int] | None = None,
    ) -> tuple[State, list[Tensor]]:
        """Do the same as other outer optimizers.

        ``tensors`` are the numbers of the exchanged tensors; others stay as they are.
        """
        chosen = range(len(weights)) if tensors is None else tensors
        rule = Nesterov(learning_rate=self.learning_rate, momentum=self.momentum)
        velocities, stepped = rule.update(
            *([whole[i] for i in chosen] for whole in (state, weights, merged, trainable))  # type: ignore[arg-type]
        )
        return put(state, chosen, velocities), put(weights, chosen, stepped)


def put(whole: Sequence[Any], places: Iterable[int], values: Iterable[Any]) -> list[Any]:
    """Return a copy of a list with new values at some places."""
    found = list(whole)
    for place, value in zip(places, values, strict=True):
        found[place] = value
    return found


def deal(weights: Sequence[Tensor], trainable: Sequence[bool], fragments: int) -> list[list[int]]:
    """Return the numbers of the trained tensors in each fragment.

    Each tensor, the largest first, goes to the fragment with the fewest bytes.

    Raises:
        ConfigError: There are more fragments than trained tensors.
    """
    trained = sorted((i for i, learns in enumerate(trainable) if learns), key=lambda i: -weights[i].nbytes)
    if fragments > len(trained):
        raise ConfigError(
            f"streaming with {fragments} fragments needs as many trained tensors, but the model has {len(trained)}"
        )
    dealt: list[list[int]] = [[] for _ in range(fragments)]
    for i in trained:
        min(dealt, key=lambda part: (sum(weights[j].nbytes for j in part), len(part))).append(i)
    return dealt


def tensors_of(parts: Iterable[int], weights: Sequence[Tensor], trainable: Sequence[bool], fragments: int) -> list[int]:
    """Return the ascending numbers of the tensors in some fragments and of all untrained tensors."""
    dealt = deal(weights, trainable, fragments)
    return sorted([i for part in parts for i in dealt[part]] + [i for i, learns in enumerate(trainable) if not learns])
