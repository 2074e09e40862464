"""Keras models from texts and back: ``build`` makes the model, with ``operator`` as the layer of an operator and ``formulas`` as its computation;
``describe`` writes the text of a model; ``objects`` converts values; ``weights`` saves weights and text in one file.
"""
