"""Train on a cluster: one algorithm per file (``sync``, ``asynchronous``: master), the Keras model behind a few verbs (``replica``: worker)."""
