"""Models of Keras made of text: ``formulas`` has what each operator computes, ``recurrent`` and ``images`` some of them; ``operator``
is the layer that holds one, ``initial`` says how parameters begin, ``objects`` finds Keras's own classes, ``build`` makes the model. ``describe``
goes back: ``chains`` cuts a model where it branches, ``arguments`` says what each layer is made with. ``weights`` has weights and text in one file.
"""
