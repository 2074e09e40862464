"""What a worker gives an app of data, by the app's own ``load_dataset``. Runs in the executor, on the thread that Keras lives on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ddlf.data.array_cache import ArrayCache, unchanging
from ddlf.data.parts import NAMES, check_data, content, contents, place_of, rows_of, take_made
from ddlf.data.trees import tree_map
from ddlf.training.slot.app import call


def load_data(app: Any, wanted: dict[str, str], held: ArrayCache) -> tuple[dict[str, str], dict[str, Any]]:
    """Give the app its data by its own ``load_dataset``; arrays that are here already are kept once.

    Args:
        app: App as it came from the master.
        wanted: If nothing but arrays is to be set: the fingerprint of each. When all of them are here, nothing is loaded.
        held: What is here; it gets what is not.

    Returns:
        The fingerprint of each array, and of each data set at a place; and what the training data is, and whether it was loaded.
    """
    begin = time.perf_counter()
    found = wanted
    here = bool(wanted) and all(content in held for content in wanted.values())
    if not here:
        held.make_room()
        call(app.load_dataset)
        take_made(app)
        check_data(app)
        found = contents(app)
    arrays = {name: one for name, one in found.items() if name in NAMES}
    for name, one in arrays.items():
        if one not in held:
            held[one] = tree_map(unchanging, getattr(app, name))
        setattr(app, name, held[one])
    held.use(arrays.values())
    return found, {
        "fingerprint": content(found),
        **rows_of(app),
        "here": _files_here(app),
        "loaded": not here,
        "seconds": time.perf_counter() - begin,
    }


def _files_here(app: Any) -> bytes | None:
    """Of each file of the training data a bit that says whether it is on a disk here; None if all are, and for arrays."""
    place = place_of(app, "train")
    found = () if place is None else place.here()
    return None if all(found) else np.packbits(np.array(found, np.bool_)).tobytes()
