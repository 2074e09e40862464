"""TensorFlow and Keras do not find large packages where they import them only because these are installed, as most users' do not; and no
garbage is looked for while they are imported.

Here these packages are for other tests, and would take half of every import of Keras, of which the tests make hundreds, each in a process of its own.
Whoever asks for them in earnest finds them, such as Keras's backend JAX. ``conftest`` lets all processes of the tests begin with this file, as their
``sitecustomize``. DDLF's own imports of Keras do without the garbage collector, too.
"""

import gc
import sys
from importlib.machinery import PathFinder

UNASKED = {
    "IPython": "keras.src.saving.",
    "jax": ("tensorflow.lite.", "keras.src.callbacks."),
    "matplotlib": "keras.src.visualization.",
    "pandas": ("keras.src.trainers.", "tensorflow.python.keras."),
    "scipy": "tensorflow.python.keras.",
    "sklearn": "keras.src.wrappers.",
}
"""What is not found, by whom."""
LARGE = ("jax", "keras", "tensorflow")
"""Imports that make hundreds of thousands of objects, all of which stay."""


class Unasked:
    """Goes before Python's own finders."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Say that there is no such module if it is one of these that asks."""
        if name in UNASKED:
            frame = sys._getframe(1)
            while "importlib" in frame.f_globals["__name__"]:
                frame = frame.f_back
            if frame.f_globals["__name__"].startswith(UNASKED[name]):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        spec = PathFinder.find_spec(name, path, target) if name in LARGE else None
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = without_collections(spec.loader.exec_module)
        return spec


def without_collections(execute):
    """What executes a module, with the garbage collector off; it never looks at what there is afterwards."""

    def quietly(module):
        if not gc.isenabled():
            return execute(module)
        gc.disable()
        try:
            return execute(module)
        finally:
            gc.freeze()
            gc.enable()

    return quietly


sys.meta_path.insert(0, Unasked)
