"""What a worker is in a run: the Keras model behind a few verbs (``replica``). The only rooms that talk to a Keras model."""

PRELOADED = ("keras", "ddlf.roles.replica")
"""What executors that train are to come with, imported once for all of a machine."""
