"""The setting ``rate_decay`` as a callback of Keras's. Runs on the master."""

from __future__ import annotations

from typing import Any

from ddlf.algorithms.rate_decay import Never, Plateau, RateDecay
from ddlf.data.parts import has
from ddlf.errors import AppError
from ddlf.events.record import accuracy
from ddlf.training.roles.optimizer_state import read_rates, write_rates
from ddlf.training.slot.parts.callbacks import check_rates


def callbacks_of(app: Any, rule: RateDecay | Plateau) -> list[Any]:
    """What lowers the learning rates of an app's model after each validation; nothing for a rule that does not.

    Raises:
        AppError: The app has no validation data that the rule needs, or its model no learning rate that can be set.
    """
    if isinstance(rule, Never):
        return []
    import keras

    name = f"rate_decay={str(rule)!r}"
    if isinstance(rule, Plateau):
        check_rates(app.model, name)
        monitor = "val_loss" if has(app, "val") else "loss"
        more = {"min_delta": rule.delta, "cooldown": rule.cooldown, "min_lr": rule.least}
        return [keras.callbacks.ReduceLROnPlateau(monitor, rule.factor, rule.patience, mode="min", **more)]
    decay: RateDecay = rule
    if not has(app, "val"):
        raise AppError(
            f"{name} looks at validation data, but there is no x_val", hint="set x_val, y_val in load_dataset"
        )
    check_rates(app.model, name)

    class RateDecays(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            # In lists, which a checkpoint has of a callback, as soon as there is something in them.
            self.first: list[float] = []
            self.accuracies: list[float] = []
            self.losses: list[float] = []

        def on_epoch_end(self, epoch: int, logs: dict[str, float]) -> None:
            now = read_rates(self.model)
            self.first = self.first or now
            found = accuracy({name: value for name, value in logs.items() if name.startswith("val_")})
            if not 0 <= found <= 1:
                raise AppError(
                    f"{name} looks at the accuracy of validation data, and the model reports "
                    + ("none" if found != found else f"{found}"),
                    hint="compile it with metrics=['accuracy']",
                )
            self.accuracies.append(found)
            self.losses.append(logs["val_loss"])
            lower = [decay.rate(first, self.accuracies, self.losses) for first in self.first]
            write_rates(self.model, [low if 0 < low < rate else rate for low, rate in zip(lower, now, strict=True)])
            logs["learning_rate"] = read_rates(self.model)[0]

    return [RateDecays()]
