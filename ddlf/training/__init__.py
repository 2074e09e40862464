"""Train on a cluster: one algorithm per file (``sync``, ``asynchronous``: master), the Keras model behind a few verbs (``replica``: worker)."""

PRELOADED = ("keras", "ddlf.training.replica")
"""What executors that train are to come with, imported once for all of a machine."""
