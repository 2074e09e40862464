"""The attributes of an app that the master sends to workers. Runs on the master."""

from __future__ import annotations

from typing import Any

from ddlf.training.context import App

MASTER_ONLY = frozenset(
    {"cluster", "model", "worker", "run_context", "replica", "indices", "history", "ledger", "outer"}
    | {"x_train", "y_train", "x_test", "y_test", "x_val", "y_val", "w_train", "w_val", "w_test"}
    | {"train_data", "val_data", "test_data", "on_round", "on_event", "is_convergent", "callbacks"}
)
"""Attributes that do not travel from the master to the workers."""


def travels(app: App) -> dict[str, Any]:
    """Return the attributes to send: without ``MASTER_ONLY`` and all that ``load_dataset`` or ``create_model`` set."""
    state, set_here = {}, app.run_context.made
    for name, value in vars(app).items():
        made = set_here.get(name)
        if name in MASTER_ONLY or (made is not None and made[0] is value and len(made) == 1):
            continue
        state[name] = made[1] if made is not None and made[0] is value else value
    return state
