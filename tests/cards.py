"""Simulated graphics cards for machines without any: a stand-in for NVML, and a JAX that seems to be built for CUDA."""

import json
import shutil
from pathlib import Path

import pytest

from ddlf.worker.assignment import GROWING
from ddlf.worker.cards import BUILD_FILES
from tests import fake_nvml, unasked

GIB = 2**30


def card(number=0, **more):
    """Return the description of a card, in the format of ``fake_nvml``."""
    return {"uuid": f"GPU-{number}0000000-0000", "name": "Test Card", "memory": 16 * GIB, **more}


class Cards:
    """The cards that this process and its child processes see.

    Args:
        folder: An empty folder for the files of the stand-in.
        monkeypatch: Restores the environment after the test.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.site = folder / "site"
        self.site.mkdir(parents=True)
        self._file = folder / "cards.json"
        shutil.copy(fake_nvml.__file__, self.site / "pynvml.py")
        self.install("jax-cuda12-plugin", "0.10.2")
        monkeypatch.setenv("FAKE_NVML", str(self._file))
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        for name in (
            "CUDA_VISIBLE_DEVICES",
            "JAX_PLATFORMS",
            "XLA_CLIENT_MEM_FRACTION",
            *GROWING,
        ):  # importing Keras sets the last ones
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PYTHONPATH", str(self.site), prepend=":")
        monkeypatch.syspath_prepend(str(self.site))
        self.has(card(0), card(1))

    def compute_with(self, backend: str) -> None:
        """Let Keras use a backend that seems to be built for CUDA, in this process and in new ones."""
        self._patch.setenv("KERAS_BACKEND", backend)
        if backend in BUILD_FILES:
            build = self.site / "build.txt"
            build.write_text("'cuda_version', '13.0'\ncuda = '13.0'\n")
            pattern = BUILD_FILES[backend][1]
            self._patch.setitem(BUILD_FILES, backend, (str(build), pattern))
            usual = Path(unasked.__file__).read_text()  # otherwise this file would hide the one of all tests
            (self.site / "sitecustomize.py").write_text(
                f"{usual}\nfrom ddlf.worker.cards import BUILD_FILES\n"
                f"BUILD_FILES[{backend!r}] = ({str(build)!r}, {pattern!r})\n"
            )

    def has(self, *cards, **more):
        """Change the cards of the machine."""
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"cards": cards, **more}))
        new.replace(self._file)  # a daemon may be reading it

    def install(self, name, version):
        """Let a distribution seem to be installed."""
        folder = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
