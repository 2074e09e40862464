"""Starts the steps of an export, one after the other, each in a process of its own. Runs here; Keras is not imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.errors import ConfigError

ALONE = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}
"""All compute on the processor: accelerators round in ways of their own, and one process could keep them from the next."""


@dataclass(frozen=True, slots=True)
class Refused:
    """What became of a step that could not be done.

    Attributes:
        who: The package that refuses.
        why: Its sentence.
    """

    who: str
    why: str

    def __str__(self) -> str:
        return f"{self.who} refuses: {self.why}"


class Steps:
    """A folder in which steps leave what they find.

    Args:
        folder: New, empty and removed by whoever made it.
        code: The Python file with the user's own layers, or None.
    """

    def __init__(self, folder: Path, code: Path | None) -> None:
        self.folder = folder
        self.code = code

    def do(self, name: str, backend: str, **job: Any) -> dict[str, Any] | Refused:
        """Do a step.

        Args:
            name: Of its files; each step has its own.
            backend: Of Keras in that process.
            job: What there is to do, as ``step`` has it.

        Raises:
            ConfigError: The model itself, the user's file or his inputs are wrong.
        """
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(job | {"code": str(self.code) if self.code else ""}), encoding="utf-8")
        environment = {**os.environ, **ALONE, "KERAS_BACKEND": backend}
        log = self.folder / f"{name}.log"
        with open(log, "wb") as written:
            # -P: a file here that is named as a package must not be taken for it.
            ended = subprocess.run(
                [sys.executable, "-P", "-m", "ddlf.extras.export.step", str(file)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
            )
        done = file.with_suffix(".done.json")
        if not done.exists():
            return Refused("its process", _ended(ended.returncode, log))
        found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        if "error" in found:
            raise ConfigError(found["error"], hint=found["hint"])
        return Refused(**found["refused"]) if "refused" in found else found

    def log(self, name: str) -> str:
        """What a step wrote to its terminal."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def outputs(self, name: str, batch: int | str) -> list[Any]:
        """What a step computed of a batch, or of its layers."""
        with np.load(self.folder / f"{name}.{batch}.npz") as file:
            return [file[str(number)] for number in range(len(file.files))]


def _ended(code: int, log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    how = f"it ended with {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
    return f"{how}; its last words: {lines[-1][:300]}" if lines else how
