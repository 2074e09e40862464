"""Advice: what is likely to be wrong with data, labels, model and settings, found before a training. Runs where a model is; the rules are pure."""

from ddlf.extras import Extra

EXTRA = Extra(name="the adviser", verbs="ddlf.extras.advice.verbs:add")
