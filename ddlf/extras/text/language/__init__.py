"""A model as text: read, checked and written again. Pure: text in, values out; no Keras, no NumPy, and nothing in a text is ever run.

``problems`` says what is wrong and where; ``syntax`` makes statements of a text (``values``), ``blocks`` looks at them one by one, ``forms`` finds
the models among them, ``expand`` (with ``reads``) makes a ``graph``, with the operators of ``operators`` and Keras's layers by name
(``keras_layers``); ``parts`` has the graph of each model, for which ``shapes``, ``types`` and ``learned`` infer what is not written; ``model`` does
one after the other; ``printer`` writes, ``diff`` compares two, ``drawing`` and ``svg`` draw one.
"""
