"""Train on a cluster: one algorithm per file (``sync``, ``asynchronous``, master side), and the Keras model behind a few verbs (``replica``, worker side)."""
