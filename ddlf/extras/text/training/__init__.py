"""Trains a model as text: its block ``train``, its data, the decisions, and the compiled model.

Runs on master and workers.
"""
