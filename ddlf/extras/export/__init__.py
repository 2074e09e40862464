"""Models of Keras as files of other programs: ``formats`` says which there are, ``source`` what is exported, ``export`` writes, ``verify`` compares.
Each step runs in a process of its own (``step``), since Keras has one backend in a process: ``keras_model`` has the model there, ``write`` writes it,
``runtimes`` runs what was written.
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
