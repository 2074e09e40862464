"""Models as text: ``language`` reads and checks a text, ``conversion`` makes a Keras model of it and back, ``training`` trains it.

``verbs`` has the commands of ``ddlf model``, ``command`` and ``files`` do what they say.
"""

from ddlf.extras import Extra

EXTRA = Extra(
    name="models as text",
    commands=(("data and models", "model", "ddlf.extras.text.verbs:MODEL", "show, check and convert models"),),
)
