"""The planner predicts the time of training for different settings, and whether a cluster pays.

It trains short rounds on the workers, fits a model of time to their durations, and predicts other settings with it.
"""

from ddlf.extras import Extra

EXTRA = Extra(
    name="the planner",
    commands=(("train", "plan", "ddlf.extras.planner.command:PLAN", "predict how long training takes"),),
    plan="ddlf.extras.planner.planning:plan",
)
