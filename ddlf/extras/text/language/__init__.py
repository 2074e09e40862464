"""Reads, checks and writes model texts (models in DDLF's notation). Pure: no Keras, no NumPy, and it never executes
code in a text.

A text becomes statements (``syntax``, with the tree of ``values``), blocks (``blocks``), models (``forms``) and a ``graph`` (``expand``), with the
operators of ``operators`` and Keras's layers by name (``keras_layers``). ``inference`` adds shapes, types and parameters. ``model`` does all this in
order, and ``problems`` collects the mistakes. ``printer`` writes a text, and ``diff`` compares two models.
"""
