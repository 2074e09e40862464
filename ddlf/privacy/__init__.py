"""Clips updates and adds noise, so that the released weights tell little about one update. Without Keras and sockets.

``release`` has the one way from updates to released weights, and ``contradictions`` the settings that it excludes.
``visible`` has the table of the updates and samples that each party sees.
``accountant`` computes the epsilon of the releases of a run.
"""
