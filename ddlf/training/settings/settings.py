"""What a run can be told: each setting is declared once, here or in ``training_settings``. Runs everywhere; imports nothing of weight.

From a declaration follow the attribute of ``IApp`` and its default, the check, the option of ``ddlf run``, the key in ``run:`` of cluster.yaml and
its JSON Schema, what a checkpoint compares, ``ddlf config show`` and docs/reference/settings.md. A setting that would have no effect is refused:
nobody trains a day with a median that was never taken.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from ddlf.training.settings.checks import (
    CALLBACKS,
    FOLDER,
    NAME,
    SWITCH,
    TRACKERS,
    OneOf,
    Whole,
    page,
    seconds,
)
from ddlf.training.settings.setting import NOWHERE, Setting
from ddlf.training.settings.training_settings import TrainingSettings


class Settings(TrainingSettings):
    """What a run can be told. Class attributes are the defaults; attributes of an app win over them, arguments and options over both.

    Each is declared by its name, its type, the fields of ``Setting``, and its default; below it stands what only the reference says.
    """

    callbacks: Annotated[
        Sequence[Any], CALLBACKS, "Keras callbacks, which run on the master once an epoch, as in fit"
    ] = ()
    """Make them in ``create_model``. They get the metrics of all slots and of the validation data. A learning rate that they set is every slot's from
    the next round on; ``stop_training`` ends the run. What looks at batches is for ``worker_callbacks``."""

    worker_callbacks: Annotated[
        Sequence[Any], CALLBACKS, "Keras callbacks for fit on the workers, which see batches"
    ] = ()
    """Make them in ``create_model``. Each round is a ``fit``, with epochs counted over the whole run. What they keep in attributes as data is the
    slot's: it goes on from round to round, moves to another worker with the slot, and is in checkpoints."""

    checkpoint: Annotated[str | Path | None, FOLDER, "folder to write a checkpoint to after every round", "DIR"] = None
    """None for none, or for that of ``resume``."""

    checkpoint_every: Annotated[int, Whole(1), "write checkpoints only after every N rounds, and at the end", "N"] = 1
    """Updates, in asynchronous training."""

    checkpoint_keep: Annotated[int, Whole(1), "how many of the last checkpoints are kept"] = 3

    resume: Annotated[
        str | Path | None,
        FOLDER,
        *("go on from the newest checkpoint: in --checkpoint, if there is one, or in DIR", "auto|DIR"),
    ] = None
    """Or from one checkpoint, ``DIR/round-000012``. With another folder as ``checkpoint`` the old one is only read. Synchronous training ends with
    the same bits as if it had never been interrupted, unless parts follow the measured speed. One that is complete is trained no more."""

    advice: Annotated[str, OneOf("off", "quick", "strict"), "known mistakes: say, or refuse (strict)", ""] = "quick"
    """Looked for in what is in memory before training (``ddlf advise``). With ``strict`` a run that could learn nothing does not begin."""

    takeover: Annotated[bool, SWITCH, "take the checkpoints' folder from another master that writes there"] = False
    """``Cluster`` has the same for workers, and ``--takeover`` is both."""

    out: Annotated[str | Path | None, FOLDER, "folder to make the run's own folder in; none: make none", "DIR"] = None
    """For ``ddlf run`` None is ``$DDLF_RUN_DIR``, else ``./runs``, and ``"none"`` makes none; in a program None makes none."""

    run_name: Annotated[str | None, NAME, "name of the run, in its folder's", "NAME", NOWHERE, None, "name"] = None
    """By default that of the app's class."""

    trackers: Annotated[
        tuple[str, ...] | list[str] | str, TRACKERS, "log to tensorboard, mlflow", "NAMES", NOWHERE, None, "log"
    ] = ()
    """Only the master does. ``pip install "ddlf[track]"`` has both."""

    wait_for_workers_s: Annotated[float, seconds, "how long to wait when all workers are lost"] = 60.0

    echo: Annotated[bool, SWITCH, "print what user code writes on the workers, with the worker's name"] = True
    """``print``, ``logging`` and warnings, in training and before. All of it is told as ``WorkerWrote`` in any case."""

    verbose: Annotated[bool, SWITCH, "print a line for each step"] = True
    """``-q`` switches it off."""

    ui: Annotated[
        Literal["auto", "rich", "plain", "json", "none"],
        OneOf("auto", "rich", "plain", "json", "none"),
        "how it is shown: a picture that moves (rich), lines (plain), each event as JSON (json), results only (none)",
        "",
    ] = "auto"
    """``auto`` is ``rich`` in a terminal and in a notebook, and ``plain`` elsewhere and where ``$CI`` is set. ``$DDLF_UI`` says it for all runs: it
    wins over the class, the option and the object's own attribute win over it. With ``plain`` rounds get at most one line in 2 s; with ``json`` what
    programs print goes to standard error."""

    dashboard: Annotated[bool | int | None, page, "whether ``ddlf run`` shows a page, and on which port"] = None
    """None when standard output is a terminal; without a port the first free one from 8900 to 8919. ``DDLF_DASHBOARD`` and ``--dashboard`` win over
    it. In your own code, ``cluster.dashboard(app)`` shows the page."""


_HINTS = TrainingSettings.__annotations__ | Settings.__annotations__
SETTINGS: Mapping[str, Setting] = {name: Setting(*hint.__metadata__) for name, hint in _HINTS.items()}
"""Each setting by its name, in the order in which they are listed everywhere."""


def option(name: str) -> str:
    """How a setting, or another option, is written on the command line."""
    other = SETTINGS[name].option if name in SETTINGS else ""
    return f"--{(other or name).replace('_', '-')}"
