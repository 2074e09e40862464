"""The adviser finds likely mistakes in data, labels, model and settings before training.

Runs where a model is; its rules are pure.
"""

from ddlf.extras import Extra

EXTRA = Extra(
    name="the adviser",
    commands=(("train", "advise", "ddlf.extras.advice.command:ADVISE", "find likely mistakes in an app"),),
    settings="advice",
    watch_run="ddlf.extras.advice.advise:watch_run",
    advise="ddlf.extras.advice.advise:advise",
)
