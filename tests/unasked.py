"""Make imports of Keras and TensorFlow faster in all processes of the tests, which load this file as ``sitecustomize``.

Keras and TensorFlow import optional packages, such as pandas, if they are installed. Most users do not have them, but
other tests need them, so they are installed here. They would double the time of each import of Keras, and the tests
import Keras in hundreds of processes. This file does five things:

- It hides these packages from modules that need them only as an option. All other imports of them work, such as the
  import of JAX as the backend of Keras.
- It delays the import of some parts of TensorFlow until their first use.
- It turns the garbage collector off during these imports. DDLF does the same in its own imports of Keras.
- It turns TensorFlow's optimizations of graphs off if ``PLAIN_GRAPHS`` is in the environment, as it is in the fast tests:
  there they take longer than they save.
- It replaces ``os.fsync``, so that no process waits for the disk.
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
"""The hidden packages, each with the prefixes of the modules that cannot import it."""
LARGE = ("jax", "keras", "tensorflow")
"""Packages whose import makes hundreds of thousands of permanent objects."""
LATER = (
    "tensorflow._api.v2.compat.v1",
    "tensorflow._api.v2.compat.v2",
    "tensorflow._api.v2.feature_column",
    "tensorflow._api.v2.__internal__.feature_column",
    "tensorflow._api.v2.debugging.experimental",
    "tensorflow._api.v2.__internal__.distribute.combinations",
)
"""Modules of TensorFlow that hardly any program uses. Each one only lists names, but imports hundreds of modules."""


class Unasked:
    """A finder of modules that Python asks before its own ones."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Find a module.

        Raises:
            ModuleNotFoundError: The importing module may not see this package.
        """
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
            if name == "tensorflow" and "PLAIN_GRAPHS" in os.environ:
                spec.loader.exec_module = without_optimizations(spec.loader.exec_module)
        return spec


def without_collections(execute):
    """Return a function that executes a module with the garbage collector off. Later collections skip its objects."""

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


def without_optimizations(execute):
    """Return a function that executes TensorFlow, and lets it compute graphs as they were traced."""

    def plainly(module):
        execute(module)
        module.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})

    return plainly


class Later:
    """Executes a module when a program uses one of its names for the first time."""

    def __init__(self, execute):
        self.execute, self.lock, self.begun = execute, threading.RLock(), False

    def __call__(self, module):
        module.__class__ = Unused
        vars(module)["__later__"] = self


class Unused(ModuleType):
    """A module that has not been executed yet."""

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
# The data of a killed process reaches the disk without fsync; only a power failure would lose it.
os.fsync = lambda descriptor: None
