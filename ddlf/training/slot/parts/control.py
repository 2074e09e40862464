"""A local rule in the optimizer of a worker's model. Runs in the executor, on the thread that Keras lives on.

The optimizer's gradients are what every way of training has in common: ``fit``, an own ``train_step``, an own loop. What changes from round to round
is in variables of the optimizer, so nothing is traced again, and JAX, whose step is handed all that it reads, is handed them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddlf.algorithms.local_rules import LOCAL, Control, LocalRule, Plain
from ddlf.algorithms.weights import Weights
from ddlf.errors import AppError
from ddlf.training.roles.optimizers import HELD_PATH, innermost


class LocalSteps:
    """The local rule of a run, in its model.

    Args:
        model: Built and compiled, and its optimizer built.
    """

    def __init__(self, model: Any) -> None:
        self._optimizer = innermost(model.optimizer)  # of one that scales the loss: it is given gradients without
        self._model = model
        self._rule: LocalRule = Plain()
        self._held: list[Any] = []
        places = {id(weight): place for place, weight in enumerate(model.weights)}
        self._places = [places[id(weight)] for weight in model.trainable_weights]
        self._noted = 0
        self._stepped: dict[float, int] = {}  # steps of this round with each learning rate

    def begin(self, name: str, weights: Weights, control: Control | None, mean: Control | None) -> None:
        """Set what a round begins with.

        Args:
            name: The rule as text.
            weights: Global ones.
            control: The slot's; None for zeros.
            mean: Mean of those of all slots; None for zeros.
        """
        self._rule, self._control, self._mean = LOCAL.read(name), control, mean
        if type(self._rule) is Plain:
            return
        if self._optimizer is None:
            raise AppError(
                f"local_rule={name!r} changes the gradients that the model's optimizer is given, but the model has none",
                hint="compile the model with an optimizer, and train with it",
            )
        if not self._held:
            self._install()
        for held, place in zip(self._held, self._places, strict=True):
            w = weights[place]
            held.assign(self._rule.held(w, *self._controls(place, w)))
        self._noted, self._stepped = self._steps(), {}

    def note(self) -> None:
        """Say that the learning rate may change now."""
        if type(self._rule) is not Plain and self._rule.steers:
            now, rate = self._steps(), float(np.asarray(self._optimizer.learning_rate))
            self._stepped[rate] = self._stepped.get(rate, 0) + now - self._noted
            self._noted = now

    def left(self, update: Weights) -> Control | None:
        """The slot's control after its round; None if there is none.

        Args:
            update: Weights before minus weights after.

        Raises:
            AppError: The model's optimizer made no step, so the rule had no effect.
        """
        if type(self._rule) is Plain:
            return None
        self.note()
        steps = sum(self._stepped.values()) if self._rule.steers else self._steps() - self._noted
        if steps <= 0:
            raise AppError(
                f"local_rule={str(self._rule)!r} had no effect: train made no step with self.model.optimizer",
                hint="train with replica.fit or self.model.optimizer, or use local_rule='plain'",
            )
        if not self._rule.steers:
            return None
        *others, rate = (rate for rate, count in self._stepped.items() if count)
        if others:
            rate = sum(rate * count for rate, count in self._stepped.items()) / steps
        found: Control = [None] * len(update)
        for place in self._places:
            found[place] = self._rule.left(*self._controls(place, update[place]), update[place], steps, rate)
        return found

    def _controls(self, place: int, like: np.ndarray[Any, Any]) -> tuple[Any, Any]:
        both = [None if control is None else control[place] for control in (self._control, self._mean)]
        zero, one = (np.zeros_like(like) if control is None else control for control in both)
        return zero, one

    def _steps(self) -> int:
        return int(np.asarray(self._optimizer._iterations))

    def _install(self) -> None:
        """Have the optimizer's gradients corrected from here on."""
        import keras

        optimizer, rule = self._optimizer, self._rule
        self._held = [optimizer.add_variable_from_reference(v, name=HELD_PATH) for v in self._model.trainable_variables]
        apply: Callable[..., None] = optimizer._backend_apply_gradients
        theirs = {optimizer._var_key(v): h for v, h in zip(self._model.trainable_variables, self._held, strict=True)}

        def corrected(gradients: Sequence[Any], variables: Sequence[Any]) -> None:
            held = [theirs[optimizer._var_key(v)] for v in variables]
            apply(
                [
                    keras.ops.add(g, rule.correction(keras.ops.convert_to_tensor(v), keras.ops.convert_to_tensor(h)))
                    for g, v, h in zip(gradients, variables, held, strict=True)
                ],
                variables,
            )

        vars(optimizer)["_backend_apply_gradients"] = corrected
        self._model.train_function = None
