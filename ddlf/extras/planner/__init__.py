"""The planner predicts the time of training for different settings, and whether a cluster pays.

It trains short rounds on the workers, fits a model of time to their durations, and predicts other settings with it.
"""

from ddlf.extras import Extra

EXTRA = Extra(
    name="the planner",
    commands=(("train", "plan", "ddlf.extras.planner.command:PLAN", "predict how long training takes"),),
    settings="planned",
    check_app="ddlf.extras.planner.planned:check_settings",
    choose_settings="ddlf.extras.planner.planned:choose_settings",
    watch_run="ddlf.extras.planner.watch:watch_run",
    measured_rounds="ddlf.extras.planner.constants:measured_rounds",
    preview_plan="ddlf.extras.planner.planned:preview_plan",
    plan="ddlf.extras.planner.planning:plan",
)
