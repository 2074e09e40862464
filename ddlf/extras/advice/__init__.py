"""Advice: what is likely to be wrong with data, labels, model and settings, found before a training. Runs where a model is; the rules are pure."""

from ddlf.extras import Extra

EXTRA = Extra(
    name="the adviser",
    commands=(("train", "advise", "ddlf.extras.advice.verbs:ADVISE", "find likely mistakes in an app"),),
    settings="advice",
    watch_run="ddlf.extras.advice.watch:watch_run",
    advise="ddlf.extras.advice.advise:advise",
)
