"""All settings of a run: those of training, in ``training_settings``, and the others, here. Imports nothing heavy.

Each setting is declared once. The declaration gives the attribute of ``IApp`` and its default, the check, the option of
``ddlf run``, the key in ``run:`` of cluster.yaml and its JSON Schema, the values that a checkpoint compares, the row in
``ddlf config show`` and the entry in docs/reference/settings.md. A setting without effect is refused: nobody should
train for a day and find out that the median was never used.
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
    """All settings of a run.

    Class attributes are the defaults. Attributes of an app override them; arguments and options override both. A
    declaration has the name, the type, the fields of ``Setting`` and the default. The string below it is extra text
    for the reference page.
    """

    callbacks: Annotated[
        Sequence[Any], CALLBACKS, "Keras callbacks that run on the master once per epoch, as for fit"
    ] = ()
    """Create them in ``create_model``. They receive the metrics of all slots and of the validation data. A learning
    rate that they set applies to every slot from the next round on, and ``stop_training`` ends the run. For
    callbacks that watch batches, use ``worker_callbacks``."""

    worker_callbacks: Annotated[
        Sequence[Any], CALLBACKS, "Keras callbacks for fit on the workers, where they also see batches"
    ] = ()
    """Create them in ``create_model``. Each round is one call of ``fit``, and epochs are counted over the whole
    run. Data in their attributes belongs to the slot: it is passed on from round to round, moves to another worker
    with the slot, and is saved in checkpoints."""

    checkpoint: Annotated[str | Path | None, FOLDER, "folder for checkpoints, written after every round", "DIR"] = None
    """None writes no checkpoints, or uses the folder of ``resume``."""

    checkpoint_every: Annotated[int, Whole(1), "write a checkpoint only after every N rounds, and at the end", "N"] = 1
    """In asynchronous training N counts updates."""

    checkpoint_keep: Annotated[int, Whole(1), "number of checkpoints to keep"] = 3

    resume: Annotated[
        str | Path | None,
        FOLDER,
        *(
            (
                "continue from a checkpoint: auto (the newest in --checkpoint, if any), or a folder, "
                "or the name of a run"
            ),
            "auto|DIR",
        ),
    ] = None
    """``DIR/round-000012`` selects one checkpoint. With another folder as ``checkpoint``, the old folder is only
    read. Synchronous training ends with the same bits as without the interruption, unless the parts follow measured
    speed. A run that is complete is not trained again."""

    advice: Annotated[
        str,
        OneOf("off", "quick", "strict"),
        "check for known mistakes before training: never (off), print them (quick), or refuse to start (strict)",
        "",
    ] = "quick"
    """Only looks at what is in memory before training; ``ddlf advise`` does more. With ``strict`` a run that could
    not learn anything does not start."""

    takeover: Annotated[bool, SWITCH, "take the checkpoint folder over from another master that writes to it"] = False
    """``Cluster`` has the same option for workers. ``--takeover`` sets both."""

    out: Annotated[str | Path | None, FOLDER, "parent folder for run folders; none disables them", "DIR"] = None
    """With ``ddlf run``, None means ``$DDLF_RUN_DIR`` or ``./runs``, and ``"none"`` disables run folders. In a
    program, None disables them."""

    run_name: Annotated[
        str | None, NAME, "name of the run, used in the name of its folder", "NAME", NOWHERE, None, "name"
    ] = None
    """The default is the name of the app's class."""

    trackers: Annotated[
        tuple[str, ...] | list[str] | str,
        TRACKERS,
        "experiment trackers to log to: tensorboard, mlflow",
        "NAMES",
        NOWHERE,
        None,
        "log",
    ] = ()
    """Only the master logs. ``pip install "ddlf[track]"`` installs both."""

    wait_for_workers_s: Annotated[float, seconds, "seconds to wait when all workers are lost"] = 60.0

    echo: Annotated[bool, SWITCH, "print what user code prints on the workers, with the worker's name"] = True
    """``print``, ``logging`` and warnings, during training and before. The event ``WorkerWrote`` reports them in
    any case."""

    verbose: Annotated[bool, SWITCH, "print the progress of the run"] = True
    """``-q`` switches it off."""

    ui: Annotated[
        Literal["auto", "rich", "plain", "json", "none"],
        OneOf("auto", "rich", "plain", "json", "none"),
        (
            "output style: live display (rich), log lines (plain), events as JSON lines (json), or "
            "only the results (none)"
        ),
        "",
    ] = "auto"
    """``auto`` is ``rich`` in a terminal or notebook, and ``plain`` elsewhere or if ``$CI`` is set. ``$DDLF_UI``
    applies to all runs: it overrides the class attribute, and is overridden by the option and by the attribute of
    the object. ``plain`` prints at most one line about rounds every 2 s. With ``json``, output of programs goes to
    standard error."""

    dashboard: Annotated[
        bool | int | None, page, "whether ``ddlf run`` serves a page for the browser, and on which port"
    ] = None
    """None serves the page if standard output is a terminal. True chooses the first free port from 8900 to 8919.
    ``DDLF_DASHBOARD`` and ``--dashboard`` override the attribute. In your own code, ``cluster.dashboard(app)``
    serves the page."""


_HINTS = TrainingSettings.__annotations__ | Settings.__annotations__
SETTINGS: Mapping[str, Setting] = {name: Setting(*hint.__metadata__) for name, hint in _HINTS.items()}
"""Each setting by its name, in the order in which they are listed everywhere."""


def option(name: str) -> str:
    """How a setting, or another option, is written on the command line."""
    other = SETTINGS[name].option if name in SETTINGS else ""
    return f"--{(other or name).replace('_', '-')}"
