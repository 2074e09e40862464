"""Models as text: ``language`` reads and checks a model text, ``conversion`` converts it to a Keras model and back, and
``training`` trains this model.

A model text is a model written in DDLF's notation, in a ``.nnm`` file. ``verbs`` declares the commands of ``ddlf
model``, and ``command`` runs them.
"""

from ddlf.extras import Extra

EXTRA = Extra(
    name="models as text",
    commands=(("data and models", "model", "ddlf.extras.text.verbs:MODEL", "show, check and convert models"),),
    settings="notation",
    app_of_file="ddlf.extras.text.text_app:app_of",
    file_types=".nnm",
    check_app="ddlf.extras.text.training.notation:check_app",
    save_model="ddlf.extras.text.conversion.weights:save_with_text",
    saved_types=".safetensors",
    begin_executor="ddlf.extras.text.training.text_bytes:begin_executor",
    answer="ddlf.extras.text.training.text_bytes:answer",
    provide="ddlf.extras.text.command:provide",
)
