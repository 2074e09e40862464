"""Training in a browser: the layer graph of a Keras model, and the engine that computes it.

``graph.py`` runs on the server; the engine (``engine``, JavaScript) runs in each browser.
"""
