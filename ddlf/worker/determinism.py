"""The environment variables that make frameworks compute the same bits in each run. Runs on master and workers.

A process has to have them before its framework first uses a card. Importing a framework does not read them, so a fork of
the warm template can still set them.
"""

from __future__ import annotations

import os
import sys

XLA_FLAGS = "XLA_FLAGS"
DETERMINISTIC_OPS = "--xla_gpu_deterministic_ops=true"
"""Lets XLA choose the same kernels in each run, and refuse an op without an equal one. JAX uses XLA for all
functions, and TensorFlow for functions with ``jit_compile``."""
CUBLAS, WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
"""Lets cuBLAS give its streams separate memory. PyTorch demands it."""

_set_here: set[str] = set()
"""The variables that this process has set, and not its user."""


def set_environment(on: bool) -> bool:
    """Set the variables for equal bits, or remove the variables of an earlier call.

    Returns:
        Whether this process computes with them. If JAX was used before, its flags stay as they are.
    """
    if jax_was_used():
        return DETERMINISTIC_OPS in os.environ.get(XLA_FLAGS, "")
    flags = os.environ.get(XLA_FLAGS, "")
    if on and not flags.endswith(DETERMINISTIC_OPS):
        os.environ[XLA_FLAGS] = f"{flags} {DETERMINISTIC_OPS}".strip()
        _set_here.add(XLA_FLAGS)
    elif not on and XLA_FLAGS in _set_here:
        if other_flags := flags.removesuffix(DETERMINISTIC_OPS).strip():
            os.environ[XLA_FLAGS] = other_flags
        else:
            del os.environ[XLA_FLAGS]
        _set_here.discard(XLA_FLAGS)
    if on and CUBLAS not in os.environ:
        os.environ[CUBLAS] = WORKSPACE
        _set_here.add(CUBLAS)
    elif not on and CUBLAS in _set_here:
        del os.environ[CUBLAS]
        _set_here.discard(CUBLAS)
    return on


def jax_was_used() -> bool:
    """Return whether JAX has read its flags, because it has computed in this process. This imports nothing."""
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bridge.backends_are_initialized()
