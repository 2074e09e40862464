"""What of an app goes to the workers. Runs on the master."""

from __future__ import annotations

from typing import Any

MASTER_ONLY = frozenset(
    {"cluster", "model", "worker", "replica", "indices", "history", "ledger", "outer"}
    | {"x_train", "y_train", "x_test", "y_test", "x_val", "y_val", "w_train", "w_val", "w_test"}
    | {"train_data", "val_data", "test_data", "on_round", "on_event", "is_convergent", "callbacks"}
)
"""Attributes that do not travel from the master to the workers."""


def travels(app: Any, base: type) -> dict[str, Any]:
    """Attributes of an app that go along: not those above, not the base's own private ones, not what ``load_dataset`` and ``create_model`` set here.

    Args:
        app: The user's ``IApp``.
        base: ``IApp``.
    """
    state = {}
    for name, value in vars(app).items():
        made = app._made.get(name)
        own = name in MASTER_ONLY or (name.startswith("_") and hasattr(base, name))
        if own or (made is not None and made[0] is value and len(made) == 1):
            continue
        state[name] = made[1] if made is not None and made[0] is value else value
    return state
