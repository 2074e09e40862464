"""The scout finds a learning rate with short trials on all workers, before training.

The search is pure (``halving.py``, ``verdict.py``). A trial is a short training on one worker (``trials.py``). The same
trials give the same answer, whatever worker runs them.
"""

from ddlf.extras import Extra

EXTRA = Extra(
    name="the scout",
    commands=(("train", "scout", "ddlf.extras.scout.command:SCOUT", "find a learning rate"),),
    settings="scout",
    check_app="ddlf.extras.scout.chosen:check_settings",
    choose_settings="ddlf.extras.scout.chosen:choose_settings",
    watch_run="ddlf.extras.scout.chosen:watch_run",
)
