"""What a worker is in a run: the Keras model behind a few verbs (``replica``). The only rooms that talk to a Keras model."""

from __future__ import annotations

import contextlib
import gc
import importlib
import sys

PRELOADED = ("keras", "ddlf.roles.replica")
"""What executors that train are to come with, imported once for all of a machine."""


def import_keras() -> None:
    """Import Keras and its backend, on any thread. Errors are met by who needs it.

    The garbage collector is off meanwhile: it would take a fifth of the time to look at hundreds of thousands of objects that stay.
    """
    collecting = gc.isenabled() and "keras" not in sys.modules
    if collecting:
        gc.disable()
    try:
        with contextlib.suppress(Exception):
            importlib.import_module("keras")
    finally:
        if collecting:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation: else the next collection of the youngest looks at all of them
            gc.enable()
