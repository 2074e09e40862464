"""TensorFlow and Keras do not find large packages where they import them only because these are installed, as most users' do not; they import parts
of themselves only when these are used; no garbage is looked for while they are imported; and no process waits for the disk.

Here these packages are for other tests, and would take half of every import of Keras, of which the tests make hundreds, each in a process of its own.
Whoever asks for them in earnest finds them, such as Keras's backend JAX. ``conftest`` lets all processes of the tests begin with this file, as their
``sitecustomize``. DDLF's own imports of Keras do without the garbage collector, too.
"""

import gc
import os
import sys
import threading
from importlib.machinery import PathFinder
from types import ModuleType

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
LATER = (
    "tensorflow._api.v2.compat.v1",
    "tensorflow._api.v2.compat.v2",
    "tensorflow._api.v2.feature_column",
    "tensorflow._api.v2.__internal__.feature_column",
    "tensorflow._api.v2.debugging.experimental",
    "tensorflow._api.v2.__internal__.distribute.combinations",
)
"""Lists of names in TensorFlow, with hundreds of modules behind them, that hardly anybody uses."""


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
        spec = PathFinder.find_spec(name, path, target) if name in LARGE or name in LATER else None
        if spec is not None and spec.loader is not None:
            how = Later if name in LATER else without_collections
            spec.loader.exec_module = how(spec.loader.exec_module)
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


class Later:
    """What executes a module when the first of its names is used."""

    def __init__(self, execute):
        self.execute, self.lock, self.begun = execute, threading.RLock(), False

    def __call__(self, module):
        module.__class__ = Unused
        vars(module)["__later__"] = self


class Unused(ModuleType):
    """A module without its names."""

    def __getattr__(self, name):
        later = vars(self).get("__later__")
        if later is not None and not (name.startswith("__") and name.endswith("__")):
            with later.lock:
                if not later.begun:
                    later.begun = True
                    later.execute(self)
                if name in vars(self):
                    return vars(self)[name]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


sys.meta_path.insert(0, Unasked)
# What a killed process has written is there without it, and nobody takes away the power.
os.fsync = lambda descriptor: None
