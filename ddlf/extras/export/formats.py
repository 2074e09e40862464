"""The formats of exported models: their files, the backends of Keras that write them, their runtimes and packages."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from importlib import metadata

from ddlf.errors import ConfigError
from ddlf.worker.machine import has_module

BACKENDS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "torch"}
"""The Keras backends that DDLF can run, the usual one first, with the names to print."""
DISTRIBUTIONS = {
    "tensorflow": ("tensorflow-cpu", "tensorflow"),
    "jax": ("jax",),
    "torch": ("torch",),
    "tf2onnx": ("tf2onnx",),
    "jax2onnx": ("jax2onnx",),
    "onnx": ("onnx",),
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "ai_edge_litert": ("ai-edge-litert",),
    "openvino": ("openvino",),
    "iree.compiler": ("iree-base-compiler",),
    "iree.runtime": ("iree-base-runtime",),
}
"""The distributions that contain each module that a step imports, the usual one first."""

EXTRAS = {"tensorflow-cpu": "tensorflow", "torch": "export-torch", "jax2onnx": "export-jax"}
"""The extra of DDLF that installs a distribution, if it is not the extra ``export``."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """A program that runs exported models.

    Attributes:
        name: Its name in a job of ``steps``.
        called: The name to print.
        modules: The modules that running it imports.
    """

    name: str
    called: str
    modules: tuple[str, ...]

    def version(self) -> str:
        """Return the runtime's name and version as text to print."""
        names = DISTRIBUTIONS[self.modules[-1]]
        return f"{self.called} {version_of(names)}".strip()


@dataclass(frozen=True, slots=True)
class Format:
    """A file format for exported models.

    Attributes:
        name: Its name in ``--to``.
        keras: Its name in ``keras.Model.export``; empty if Keras lacks the format.
        endings: The suffixes of its files; Keras gets the first one.
        writers: The Keras backends that write it with a variable batch size, the usual one first, each with the further
            modules that it needs.
        runtimes: The programs that run it, the format's own runtime first.
    """

    name: str
    keras: str
    endings: tuple[str, ...]
    writers: dict[str, tuple[str, ...]]
    runtimes: tuple[Runtime, ...]
    also: tuple[str, ...] = field(default=())

    def files(self, stem: str) -> tuple[str, ...]:
        """Return the names of the files and folders of an exported model."""
        return tuple(f"{stem}{ending}" for ending in self.endings)

    def lacks(self, backend: str) -> list[str]:
        """Return the Python distributions to install, because this Keras backend needs them to write this format."""
        return absent((backend, *self.writers[backend]))


TENSORFLOW = Runtime("saved_model", "TensorFlow", ("tensorflow",))
ALL = (
    Format(
        "saved_model",
        "tf_saved_model",
        (".saved_model",),
        {"tensorflow": (), "jax": ("tensorflow",)},
        (TENSORFLOW,),
        ("savedmodel", "tf", "tensorflow", "tf_saved_model", "pb"),
    ),
    Format(
        "onnx",
        "onnx",
        (".onnx",),
        {"tensorflow": ("tf2onnx", "onnx"), "jax": ("jax2onnx", "onnx"), "torch": ("onnx",)},
        (Runtime("onnx", "onnxruntime", ("onnxruntime",)),),
    ),
    Format(
        "litert",
        "litert",
        (".tflite",),
        {"tensorflow": ()},
        (
            Runtime("litert", "LiteRT", ("ai_edge_litert",)),
            Runtime("tflite", "TensorFlow", ("tensorflow",)),
        ),
        ("tflite", "lite"),
    ),
    Format(
        "openvino",
        "openvino",
        (".xml", ".bin"),
        {"tensorflow": ("openvino",), "jax": ("tensorflow", "openvino"), "torch": ("openvino",)},
        (Runtime("openvino", "OpenVINO", ("openvino",)),),
        ("xml", "ir"),
    ),
    Format(
        "torch",
        "torch",
        (".pt2",),
        {"torch": ()},
        (Runtime("torch", "torch", ("torch",)),),
        ("pytorch", "pt2", "pt"),
    ),
    Format(
        "stablehlo",
        "",
        (".mlirbc", ".jax"),
        {"jax": ()},
        (
            Runtime("iree", "IREE", ("iree.compiler", "iree.runtime")),
            Runtime("jax", "JAX", ("jax",)),
        ),
        ("mlir", "hlo", "iree", "xla", "jax"),
    ),
)
FORMATS = {item.name: item for item in ALL}
"""All formats by name."""


def read(text: str) -> list[Format]:
    """Return the export formats that a comma-separated list names.

    Raises:
        ConfigError: A name is unknown, or the list is empty.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--to names no format", hint=f"the formats are: {', '.join(FORMATS)}")
    for name in names:
        if name not in FORMATS:
            synonyms = [item.name for item in ALL if name.lower() in item.also]
            candidates = synonyms or difflib.get_close_matches(name.lower(), FORMATS, 1)
            raise ConfigError(
                f"there is no format {name!r}",
                hint=f"did you mean {candidates[0]!r}?" if candidates else f"the formats are: {', '.join(FORMATS)}",
            )
    return [FORMATS[name] for name in dict.fromkeys(names)]


def writer_of(format: Format, backend: str | None) -> str:
    """Return the backend of Keras that writes a format.

    Args:
        format: The format.
        backend: The requested Keras backend. None selects the first one that is installed with all its modules.

    Raises:
        ConfigError: The backend cannot write the format, or a distribution is missing.
    """
    if backend is not None and backend not in format.writers:
        writers = _joined_with_or([BACKENDS[name] for name in format.writers])
        raise ConfigError(
            f"Keras writes {format.name} for any batch on {writers} only, not on {BACKENDS[backend]}",
            hint=f"leave --backend {backend} out, or {format.name}",
        )
    default = next(iter(format.writers))
    writer = backend or next((name for name in format.writers if not format.lacks(name)), default)
    if missing := format.lacks(writer):
        raise ConfigError(
            f"{format.name} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            hint=to_install(missing),
        )
    return writer


def to_install(distributions: list[str]) -> str:
    """Return the command that installs missing distributions."""
    names = [EXTRAS.get(name, "export") for name in distributions]
    extras = ",".join(dict.fromkeys(names))
    return f"python -m pip install 'ddlf[{extras}]'"


def absent(modules: tuple[str, ...]) -> list[str]:
    """Return the Python distributions to install, because they contain the missing ones of these modules."""
    return [DISTRIBUTIONS[name][0] for name in modules if not has_module(name)]


def version_of(distributions: tuple[str, ...]) -> str:
    """Return the version of the first of these distributions that is installed; empty if none is installed."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def installed_backends() -> list[str]:
    """Return the installed Keras backends, the usual one first."""
    return [name for name in BACKENDS if has_module(name)]


def _joined_with_or(names: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
