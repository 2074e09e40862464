"""The steps of an export. Each runs in its own process, because Keras has one backend per process.

``StepRunner`` starts ``python -m ddlf.extras.export.steps FOLDER/NAME.json``. The file contains the job. The process
writes its results beside the file: ``NAME.done.json``, and arrays as ``NAME.BATCH.npz``. Only that process imports
Keras.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddlf.errors import ConfigError, DDLFError

ALONE = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "-1"}
"""Settings that keep all steps on the CPU.

Accelerators round differently, and a process could block one for the next.
"""


MEASURED_S = 0.2
"""Seconds to repeat each batch, to measure its time."""
FEWEST, MOST = 3, 200
"""The minimum and maximum number of repetitions."""
CALLED = {
    "keras": "Keras",
    "tensorflow": "TensorFlow",
    "jax": "JAX",
    "jaxlib": "JAX",
    "ai_edge_litert": "LiteRT",
    "litert_torch": "litert-torch",
    "openvino": "OpenVINO",
    "iree": "IREE",
}
"""Packages whose printed name differs from the module's name."""
MATTERS = (
    (r"No conversion rule found for operations: (.*?) To facilitate", "it has no rule for {}"),
    (r"This is an invalid model\. (.*)", "{}"),
    (r": error: (.*)", "{}"),
    (r"No Op registered for (\w+)", "ONNX has no operator {}"),
    (r"Exception encountered when calling (.+?)\. \x1b\[1m(.*?)\x1b\[0m", "in {}: {}"),
)
"""Patterns of the relevant sentence in an error, and its reported form: OpenVINO, onnxruntime, IREE, onnx, Keras."""
NOBODY = ("numpy", "absl", "google", "optree")
"""Packages that only report errors of other packages."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The result of an export step that failed inside a package, such as tf2onnx.

    Attributes:
        program: The package that failed.
        reason: The sentence of its error.
    """

    program: str
    reason: str

    def __str__(self) -> str:
        return f"{self.program} refuses: {self.reason}"

    def to_data(self) -> dict[str, str]:
        """Return the result for JSON. ``ddlf export --json`` prints these keys."""
        return {"who": self.program, "why": self.reason}

    @classmethod
    def from_data(cls, data: dict[str, str]) -> Refused:
        """Return the result that ``to_data`` converted."""
        return cls(data["who"], data["why"])


class StepRunner:
    """Runs steps, each in its own process. The files of all steps are in one folder.

    Args:
        folder: A new, empty folder; the caller removes it.
        code: The Python file with the user's own layers, or None.
    """

    def __init__(self, folder: Path, code: Path | None) -> None:
        self.folder = folder
        self.code = code

    def do(self, name: str, backend: str, **job: Any) -> dict[str, Any] | Refused:
        """Run a step of the export in its own process, and return its result.

        Args:
            name: The name of the step's files, unique for each step.
            backend: The Keras backend in the step's process.
            job: The kind of the job in ``do``, and the arguments of the function for it.

        Raises:
            ConfigError: The model, the user's Python file or the inputs are invalid.
        """
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(job | {"code": str(self.code) if self.code else ""}), encoding="utf-8")
        environment = {**os.environ, **ALONE, "KERAS_BACKEND": backend}
        log = self.folder / f"{name}.log"
        with open(log, "wb") as written:
            # -P: a file in the current folder must not shadow a package of the same name.
            ended = subprocess.run(
                [sys.executable, "-P", "-m", "ddlf.extras.export.steps", str(file)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=subprocess.STDOUT,
            )
        done = file.with_suffix(".done.json")
        if not done.exists():
            return Refused("its process", _ended(ended.returncode, log))
        result: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        if "error" in result:
            raise ConfigError(result["error"], hint=result["hint"])
        return Refused.from_data(result["refused"]) if "refused" in result else result

    def outputs(self, name: str, batch: int | str) -> list[Any]:
        """Return the arrays that a step computed for a batch, or for each layer."""
        return _read(self.folder / f"{name}.{batch}.npz")


def _ended(code: int, log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    how = f"it ended with {signal.Signals(-code).name}" if code < 0 else f"it ended with exit code {code}"
    return f"{how}; its last line of output: {lines[-1][:300]}" if lines else how


# -- in the process of a step ----------------------------------------------------------------------------------------------


def main(job_file: Path) -> None:
    """Run the job that a file describes, and write its results."""
    job = json.loads(job_file.read_text(encoding="utf-8"))
    try:
        done = STEPS[job["do"]](job, job_file)
    except DDLFError as error:
        done = {"error": error.message, "hint": error.hint}
    except Exception as error:
        traceback.print_exc()
        done = {"refused": refusal(error).to_data()}
    temporary = job_file.with_suffix(".done.new")
    temporary.write_text(json.dumps(done), encoding="utf-8")
    temporary.replace(job_file.with_suffix(".done.json"))


def _build(job: dict[str, Any], job_file: Path) -> dict[str, Any]:
    """Build the Keras model of a model text, and save it as a ``.keras`` file."""
    from ddlf.extras import provided
    from ddlf.extras.export.keras_model import own_layers

    if job["code"]:
        own_layers(Path(job["code"]))  # this registers the layers
    provided("model_of_text", job["model"])(Path(job["model"])).save(job["target"])
    return {}


def _write(job: dict[str, Any], job_file: Path) -> dict[str, Any]:
    """Load a ``.keras`` file, and write the model in one export format. This is a step in its own process."""
    from ddlf.extras.export.formats import FORMATS
    from ddlf.extras.export.keras_model import write

    write(_loaded(job), FORMATS[job["format"]], Path(job["folder"]), job["stem"], job["batch"])
    return {}


def _keras(job: dict[str, Any], job_file: Path) -> dict[str, Any]:
    """Run a model in Keras. The first such run generates the inputs for all later runs."""
    from ddlf.extras.export.keras_model import inputs_from_file, outputs_by_layer, random_inputs

    loaded = _loaded(job)
    for batch in job["batches"]:
        inputs = _inputs_of(job_file.parent, batch)
        if not inputs.exists():
            path = job["inputs"]
            _save(inputs, inputs_from_file(loaded, Path(path), batch) if path else random_inputs(loaded, batch))
    done = {
        "inputs": [asdict(spec) for spec in loaded.inputs],
        "layout": loaded.layout,
        "outputs": loaded.outputs(),
        "parameters": loaded.model.count_params(),
    }
    if job["layers"]:
        result = outputs_by_layer(loaded, _read(_inputs_of(job_file.parent, max(job["batches"]))))
        _save(job_file.with_suffix(".layers.npz"), list(result.values()))
        done["layers"] = list(result)
    return done | {"seconds": _run_all(loaded.run, job, job_file)}


def _run(job: dict[str, Any], job_file: Path) -> dict[str, Any]:
    """Run an exported model in a runtime on the generated inputs. This is a step in its own process."""
    from ddlf.extras.export.runtimes import RUNTIMES

    facts = job["facts"] | {"code": job["code"]}
    run = RUNTIMES[job["runtime"]](Path(job["artefact"]), facts)
    return {"seconds": _run_all(run, job, job_file), "note": facts.get("note", "")}


STEPS: dict[str, Callable[[dict[str, Any], Path], dict[str, Any]]] = {
    "build": _build,
    "write": _write,
    "keras": _keras,
    "run": _run,
}


def _loaded(job: dict[str, Any]) -> Any:
    from ddlf.extras.export.keras_model import Loaded

    return Loaded(Path(job["model"]), Path(job["code"]) if job["code"] else None)


def _inputs_of(folder: Path, batch: int) -> Path:
    return folder / f"inputs.{batch}.npz"


def _save(path: Path, arrays: Sequence[Any]) -> None:
    result = [np.asarray(array) for array in arrays]
    # .npz files cannot store bfloat16
    storable = [item.astype("float32") if item.dtype.kind == "V" else item for item in result]
    array_by_name: dict[str, Any] = {str(number): array for number, array in enumerate(storable)}
    np.savez(path, **array_by_name)


def _read(path: Path) -> list[Any]:
    with np.load(path) as file:
        return [file[str(number)] for number in range(len(file.files))]


def _run_all(run: Callable[[list[Any]], Sequence[Any]], job: dict[str, Any], job_file: Path) -> list[float]:
    """Run the model on a batch of each size, and save the outputs. Return the median time of each size, without its
    first run."""
    seconds = []
    for batch in job["batches"]:
        flat = _read(_inputs_of(job_file.parent, batch))
        _save(job_file.with_suffix(f".{batch}.npz"), run(flat))
        durations: list[float] = []
        while len(durations) < FEWEST or (sum(durations) < MEASURED_S and len(durations) < MOST):
            began = time.perf_counter()
            run(flat)
            durations.append(time.perf_counter() - began)
        seconds.append(statistics.median(durations))
    return seconds


def refusal(error: BaseException) -> Refused:
    """Return the name of the installed package whose code raised an error, and the relevant sentence of its message."""
    package_name = "Python"
    for frame in traceback.extract_tb(error.__traceback__):
        _, installed, module_path = frame.filename.replace(os.sep, "/").rpartition("/site-packages/")
        package = module_path.partition("/")[0].removesuffix(".py")
        if installed and package not in NOBODY:
            package_name = CALLED.get(package, package)
    return Refused(package_name, _sentence(error))


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    for pattern, template in MATTERS:
        if result := re.search(pattern, text):
            text = template.format(*result.groups())
    first = text.partition(". ")[0].removesuffix(".")
    return f"{first[:297]}..." if len(first) > 300 else first


if __name__ == "__main__":
    main(Path(sys.argv[1]))
