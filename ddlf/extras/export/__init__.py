"""Exports Keras models to the file formats of other programs, such as ONNX.

``formats`` lists the formats, ``source`` finds the model, ``export`` writes it, and ``verify`` compares the results.
``steps`` runs each step in its own process. There, ``keras_model`` loads and writes the model, and ``runtimes`` runs
the exported files.
"""

from ddlf.extras import Extra

EXTRA = Extra(
    name="export",
    commands=(
        ("data and models", "export", "ddlf.extras.export.verbs:EXPORT", "write a model for other programs"),
        (
            "data and models",
            "model compare",
            "ddlf.extras.export.verbs:COMPARE",
            "run a model on each backend of Keras",
        ),
    ),
)
