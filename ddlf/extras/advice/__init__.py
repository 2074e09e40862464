"""The adviser finds likely mistakes in data, labels, model and settings before training.

It runs in the process that has the model. Its rules are pure functions: they only read collected facts.
"""

from ddlf.extras import Extra

EXTRA = Extra(
    name="the adviser",
    commands=(("train", "advise", "ddlf.extras.advice.command:ADVISE", "find likely mistakes in an app"),),
    settings="advice",
    watch_run="ddlf.extras.advice.advise:watch_run",
    advise="ddlf.extras.advice.advise:advise",
    start_check="ddlf.extras.advice.starts:StartCheck",
)
