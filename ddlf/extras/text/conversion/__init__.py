"""Converts model texts to Keras models, and Keras models to model texts.

``build`` makes the model, with the layer in ``operator`` for each operator, and the computations in ``formulas``.
``describe`` writes the text of a model, ``objects`` converts values, and ``weights`` saves weights and text in one
file.
"""
