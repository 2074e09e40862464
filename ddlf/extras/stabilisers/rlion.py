"""Rlion: Lion with a smooth step in place of the sign. Runs wherever a model is."""

from __future__ import annotations

from typing import Any

import keras

from ddlf.extras.stabilisers.wrapper import dense


@keras.saving.register_keras_serializable(package="ddlf")
class Rlion(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Lion whose step is smooth around 0, so that small momenta make small steps.

    ::

        c = beta_1 m + (1 - beta_1) g;  u = slope c / (1 + |slope c|)
        w <- w - learning_rate (u + weight_decay w);  m <- beta_2 m + (1 - beta_2) g

    Rlion stores one array for each weight. Adam stores two.

    Args:
        learning_rate: A number or a schedule.
        beta_1: Share of the momentum in the step, in [0, 1).
        beta_2: Share of the old momentum in the new one, in [0, 1).
        slope: Steepness of the step around 0, > 0. An infinite slope gives Lion.
        weight_decay: Share of a weight that each step subtracts, times the learning rate; None disables it. It is
            decoupled from the gradient, as in Lion.
        kwargs: The arguments that every Keras optimizer takes.

    Source:
        Lion: Chen et al. 2023, arXiv:2302.06675.
    """

    def __init__(
        self,
        learning_rate: Any = 5e-4,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        slope: float = 10.0,
        weight_decay: float | None = 0.01,
        name: str = "rlion",
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, name=name, **kwargs)
        self.beta_1, self.beta_2, self.slope = beta_1, beta_2, slope

    def build(self, variables: Any) -> None:
        """Create the momentum of each weight. Overrides Keras's ``build``."""
        if self.built:
            return
        super().build(variables)
        self.momenta = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a weight with its gradient. Overrides Keras's ``update_step``; Keras has already applied the weight
        decay.
        """
        ops = keras.ops
        rate, gradient = ops.cast(learning_rate, variable.dtype), ops.cast(dense(gradient), variable.dtype)
        momentum = self.momenta[self._get_variable_index(variable)]
        steep = self.slope * (self.beta_1 * momentum + (1 - self.beta_1) * gradient)
        self.assign_sub(variable, rate * (steep / (1 + ops.abs(steep))))
        self.assign(momentum, self.beta_2 * momentum + (1 - self.beta_2) * gradient)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of this optimizer, which Keras saves with a model."""
        arguments = {name: getattr(self, name) for name in ("beta_1", "beta_2", "slope")}
        return {**super().get_config(), **arguments}
