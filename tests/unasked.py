"""TensorFlow and Keras do not find JAX, Matplotlib and scikit-learn where they import them only because these are installed, as most users' do not.

Here they are for other tests, and would take half of every import of Keras, of which the tests make hundreds, each in a process of its own.
Whoever asks for them in earnest finds them, such as Keras's backend JAX. ``conftest`` lets all processes of the tests begin with this file, as their
``sitecustomize``.
"""

import sys

UNASKED = {
    "jax": ("tensorflow.lite.", "keras.src.callbacks."),
    "matplotlib": "keras.src.visualization.",
    "sklearn": "keras.src.wrappers.",
}
"""What is not found, by whom."""


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


sys.meta_path.insert(0, Unasked)
