"""Trains the model of a model text: reads its block ``train``, loads its data, decides open training keys, and compiles
it.

Runs on master and workers.
"""
