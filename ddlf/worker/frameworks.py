"""The frameworks under Keras: their cards, their arithmetic and their errors. Runs everywhere.

``Framework`` has one subclass for each backend of Keras. Their methods import the framework, so call them on the thread
of Keras.
"""

from __future__ import annotations

import importlib
import os
import re
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, ClassVar

from ddlf.worker.determinism import DETERMINISTIC_OPS, XLA_FLAGS, jax_was_used
from ddlf.worker.machine import keras_backend

TF32_CAPABILITY = 8
"""Cards of NVIDIA since this compute capability can multiply float32 in TF32."""


class Framework(ABC):
    """The framework under Keras.

    Attributes:
        name: Its name, as Keras calls it.
        title: Its name for people.
        lacking: Patterns of its errors about an op that has no way to compute equal bits. Their group ``op`` names the op.
        full: Pattern of its errors about too little memory.
        wrapped_full: Pattern of such an error in the text of another library's error, as Keras's errors about building a
            model have it; empty if there is none.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    lacking: ClassVar[tuple[str, ...]] = ()
    full: ClassVar[str] = "RESOURCE_EXHAUSTED|ResourceExhausted|[Oo]ut of memory|OOM when allocating"

    wrapped_full: ClassVar[str] = ""

    def __init__(self) -> None:
        self._is_set = False  # whether ``determine`` is on, and not only the user's own setting

    @abstractmethod
    def card(self) -> str:
        """Return the name of the card that it computes on; empty if it computes on the CPU."""

    @abstractmethod
    def determine(self, on: bool) -> str:
        """Let all later computations give equal bits in each run, or end this. A setting of the user stays.

        Returns:
            Why this has no effect here; empty if it has.
        """

    @abstractmethod
    def set_tf32(self, value: str) -> None:
        """Set whether cards round the factors of float32 products to TF32: ``"on"``, ``"off"``, or ``"auto"`` for the
        framework's default.
        """

    @abstractmethod
    def tf32(self) -> str:
        """Return which float32 products a card rounds to TF32, as a plural; empty for none, or without a card."""

    def peak(self) -> int:
        """Return the largest number of bytes that arrays have taken on the card; 0 if it is unknown."""
        return 0

    def full_error(self) -> Exception:
        """Return the error that it raises if a card has too little memory, for fault injection."""
        return MemoryError("out of memory")

    def is_full(self, error: BaseException) -> bool:
        """Return whether an error reports too little memory."""
        if isinstance(error, MemoryError):
            return True
        pattern = self.full if _is_of(error, self.name) else self.wrapped_full
        return pattern != "" and re.search(pattern, f"{type(error).__name__} {error}") is not None

    def indivisible(self, error: BaseException) -> tuple[int, int] | None:
        """Return the samples of a batch and the number of cards that it cannot be divided among, if an error says so."""
        return None

    def op_without_determinism(self, error: BaseException) -> str:
        """Return the op that cannot compute equal bits, if an error is about this; empty otherwise."""
        text = str(error)
        match = next((match for pattern in self.lacking if (match := re.search(pattern, text)) is not None), None)
        return match["op"].strip(" .%`'\"") if match is not None else ""


def _is_of(error: BaseException, name: str) -> bool:
    """Return whether a framework, and not the user's code, has raised an error."""
    modules = (name, f"{name}lib")
    return any(kind.__module__.partition(".")[0] in modules for kind in type(error).__mro__)


class TensorFlow(Framework):
    """TensorFlow, which computes equal bits also on the CPU only if it is asked."""

    name, title = "tensorflow", "TensorFlow"
    lacking = (
        r"[Dd]eterministic (?:GPU |CPU )?implementation of (?P<op>[\w.:/]+)",
        r"[Dd]eterminism is not (?:yet )?supported (?:in|for|by) (?:the )?(?:GPU |CPU )?(?:implementation of )?(?P<op>[\w.:/]+)",
        r"HLO instruction (?P<op>.+?) does not have a deterministic implementation",
        r"(?P<op>[Rr]andom ops) require a seed",
    )

    @property
    def _tf(self) -> Any:
        return importlib.import_module("tensorflow")

    def card(self) -> str:
        config = self._tf.config
        for device in config.list_physical_devices("GPU"):
            return str(config.experimental.get_device_details(device).get("device_name", device.name))
        return ""

    def determine(self, on: bool) -> str:
        config = importlib.import_module("tensorflow.python.framework.config")
        if on:
            config.enable_op_determinism()
        elif self._is_set:
            config.disable_op_determinism()
        self._is_set = on
        return ""

    def set_tf32(self, value: str) -> None:
        default = self._default()
        self._tf.config.experimental.enable_tensor_float_32_execution(default if value == "auto" else value == "on")

    @cache  # noqa: B019 - there is one object of this class
    def _default(self) -> bool:
        return bool(self._tf.config.experimental.tensor_float_32_execution_enabled())

    def tf32(self) -> str:
        config = self._tf.config.experimental
        for device in self._tf.config.list_physical_devices("GPU"):
            capability = config.get_device_details(device).get("compute_capability", (0, 0))
            if capability[0] >= TF32_CAPABILITY and config.tensor_float_32_execution_enabled():
                return "products and convolutions"
        return ""

    def peak(self) -> int:
        for device in self._tf.config.list_logical_devices("GPU"):
            return int(self._tf.config.experimental.get_memory_info(device.name.removeprefix("/device:"))["peak"])
        return 0

    def full_error(self) -> Exception:
        text = "OOM when allocating tensor with shape[512,4096] and type float on /device:GPU:0 by allocator GPU_0_bfc"
        error: Exception = self._tf.errors.ResourceExhaustedError(None, None, text)
        return error


class Jax(Framework):
    """JAX. Its flags are in the environment, which a process reads once."""

    name, title = "jax", "JAX"
    lacking = (r"HLO instruction (?P<op>.+?) does not have a deterministic implementation",)
    TF32: ClassVar[dict[str, str]] = {"on": "tensorfloat32", "off": "highest"}

    @property
    def _jax(self) -> Any:
        return importlib.import_module("jax")

    def card(self) -> str:
        return "" if self._jax.default_backend() == "cpu" else str(self._jax.devices()[0].device_kind)

    def determine(self, on: bool) -> str:
        if on and not self.card():
            return "JAX computes equal bits on CPUs in any case"
        return ""

    def set_tf32(self, value: str) -> None:
        default = self._default()
        self._jax.config.update("jax_default_matmul_precision", self.TF32.get(value, default))

    @cache  # noqa: B019 - there is one object of this class
    def _default(self) -> str | None:
        precision: str | None = self._jax.config.jax_default_matmul_precision
        return precision

    def tf32(self) -> str:
        if self._jax.default_backend() not in ("gpu", "cuda"):
            return ""
        capability = str(getattr(self._jax.devices()[0], "compute_capability", "0"))
        if int(capability.partition(".")[0] or 0) < TF32_CAPABILITY:
            return ""
        coarse = self._jax.config.jax_default_matmul_precision in (None, "default", "fastest", "tensorfloat32")
        return "products and convolutions" if coarse else ""

    def peak(self) -> int:
        return int((self._jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))

    def indivisible(self, error: BaseException) -> tuple[int, int] | None:
        match = re.search(r"axis 0 is partitioned (\d+) times, but the dimension size is (\d+)", str(error))
        return (int(match[2]), int(match[1])) if match is not None and _is_of(error, self.name) else None

    def full_error(self) -> Exception:
        error: Exception = self._jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 8388608 bytes."
        )
        return error


class Torch(Framework):
    """PyTorch, which names each op that cannot compute equal bits."""

    name, title = "torch", "PyTorch"
    lacking = (r"(?P<op>\S+) does not have a deterministic implementation",)
    wrapped_full = r"CUDA out of memory\. Tried to allocate"

    @property
    def _torch(self) -> Any:
        return importlib.import_module("torch")

    def card(self) -> str:
        return str(self._torch.cuda.get_device_name(0)) if self._torch.cuda.is_available() else ""

    def determine(self, on: bool) -> str:
        if on or self._is_set:
            self._torch.use_deterministic_algorithms(on)
        if on:
            self._torch.backends.cudnn.benchmark = False
        self._is_set = on
        return ""

    def set_tf32(self, value: str) -> None:
        products, convolutions = self._default()
        backends = self._torch.backends
        backends.cuda.matmul.allow_tf32 = products if value == "auto" else value == "on"
        backends.cudnn.allow_tf32 = convolutions if value == "auto" else value == "on"

    @cache  # noqa: B019 - there is one object of this class
    def _default(self) -> tuple[bool, bool]:
        backends = self._torch.backends
        return bool(backends.cuda.matmul.allow_tf32), bool(backends.cudnn.allow_tf32)

    def tf32(self) -> str:
        if not self._torch.cuda.is_available() or self._torch.cuda.get_device_capability(0)[0] < TF32_CAPABILITY:
            return ""
        backends = self._torch.backends
        allowed = {"products": backends.cuda.matmul.allow_tf32, "convolutions": backends.cudnn.allow_tf32}
        return " and ".join(name for name, on in allowed.items() if on)

    def peak(self) -> int:
        return int(self._torch.cuda.max_memory_allocated()) if self._torch.cuda.is_available() else 0

    def full_error(self) -> Exception:
        error: Exception = self._torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB.")
        return error


class Other(Framework):
    """A backend of Keras that computes on no card, such as NumPy."""

    def card(self) -> str:
        return ""

    def determine(self, on: bool) -> str:
        return f"the backend {keras_backend()} has no setting for it" if on else ""

    def set_tf32(self, value: str) -> None:
        """Do nothing: CPUs do not have TF32."""

    def tf32(self) -> str:
        return ""


FRAMEWORKS: dict[str, Framework] = {framework.name: framework for framework in (TensorFlow(), Jax(), Torch())}
OTHER = Other()


def framework() -> Framework:
    """Return the framework that Keras uses."""
    return FRAMEWORKS.get(keras_backend(), OTHER)


def lacks_flags() -> bool:
    """Return whether JAX computes on a card of this process without the flags for equal bits, which it reads once."""
    if not isinstance(framework(), Jax) or not jax_was_used():
        return False
    return bool(framework().card()) and DETERMINISTIC_OPS not in os.environ.get(XLA_FLAGS, "")
