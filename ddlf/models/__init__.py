"""Models of Keras made of text: ``formulas`` has what each operator computes, ``recurrent`` and ``images`` some of them; ``operator``
is the layer that holds one, ``initial`` says how parameters begin, ``build`` makes the model.
"""
