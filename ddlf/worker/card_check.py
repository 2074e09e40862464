"""Computes a matrix product on one card, to prove that the framework can use it. ``ddlf doctor`` runs this in a child.

A child, because a framework keeps the memory of a card until its process ends, and because a broken driver can end the
process.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ddlf.worker.assignment import GROWING
from ddlf.worker.cards import MASK
from ddlf.worker.process import child_environment

TIMEOUT_S = 180.0
EXACT_SIZE = 256
"""Rows of the product whose values are compared. Its whole numbers have the same sums in each number format."""
TIMED_SIZE = 4096
REPEATS = 10
PLATFORMS = "JAX_PLATFORMS"
"""Names the kinds of devices that JAX looks for."""
BEGINNING = "ddlf-card "
"""Begins the line with the result, because a framework may print, too."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of the check of one card.

    Args:
        device: The device, as the framework names it; empty if the check failed.
        teraflops: Rate of the product in float32, as the framework computes it by default.
        problem: Why the card cannot be used; empty if it can.
        do: How to repair this; empty if only the driver and the message know it.
    """

    device: str = ""
    teraflops: float = 0.0
    problem: str = ""
    do: str = ""


async def check_card(backend: str, uuid: str, timeout_s: float = TIMEOUT_S) -> Checked:
    """Compute a matrix product on a card in a child of this process.

    Args:
        backend: Name of the framework, as Keras calls it.
        uuid: Unique name of the card.
        timeout_s: Seconds until the child is killed.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ddlf.worker.card_check", backend),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=GROWING | child_environment() | {MASK: uuid},
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await child.communicate()
    except TimeoutError:
        return Checked(problem=f"it has not computed a matrix product with {backend} within {timeout_s:g} s")
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(BEGINNING):
            return Checked(**json.loads(line.removeprefix(BEGINNING)))
    last = (errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
    return Checked(problem=f"a matrix product with {backend} ended with exit code {child.returncode}: {last}")


def main(argv: list[str] | None = None) -> None:
    """Run as ``python -m ddlf.worker.card_check BACKEND``."""
    backend = (argv or sys.argv)[1]
    try:
        result = PRODUCTS[backend]()
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        result = Checked(problem=f"{backend} cannot use it: {first}")
    print(f"\n{BEGINNING}{json.dumps(asdict(result))}", flush=True)


def _measured(
    device: str, array: Callable[[Any], Any], product: Callable[[Any], Any], wait: Callable[[Any], Any]
) -> Checked:
    """Compare a product with NumPy's, then measure a large one.

    Args:
        device: The device, as the framework names it.
        array: Makes an array of the framework.
        product: Returns the product of an array with itself.
        wait: Waits for the computation of an array, and returns it as a NumPy array.
    """
    import numpy as np

    random = np.random.default_rng(0)
    small = random.integers(-3, 4, (EXACT_SIZE, EXACT_SIZE)).astype("float32")
    if not np.array_equal(wait(product(array(small))), small @ small):
        return Checked(problem="its matrix product has wrong values, so the card or its driver is faulty")
    large = array(random.standard_normal((TIMED_SIZE, TIMED_SIZE), "float32"))
    wait(product(large)[:1])  # kernels are chosen now
    begin = time.perf_counter()
    result = large
    for _ in range(REPEATS):
        result = product(large)
    wait(result[:1])
    return Checked(device, REPEATS * 2 * TIMED_SIZE**3 / (time.perf_counter() - begin) / 1e12)


def _with_jax() -> Checked:
    if (platforms := os.environ.get(PLATFORMS)) and not {"cuda", "gpu"} & {*platforms.split(",")}:
        return Checked(problem=f"{PLATFORMS}={platforms} hides it from jax", do=f"unset {PLATFORMS}")
    import jax
    import numpy as np

    device = jax.devices("gpu")[0]
    return _measured(
        device.device_kind, lambda array: jax.device_put(array, device), jax.jit(lambda a: a @ a), np.asarray
    )


def _with_torch() -> Checked:
    import torch

    device = torch.device("cuda", 0)
    return _measured(
        torch.cuda.get_device_name(device),
        lambda array: torch.from_numpy(array).to(device),
        lambda a: a @ a,
        lambda a: a.cpu().numpy(),
    )


def _with_tensorflow() -> Checked:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    import tensorflow as tf

    devices = tf.config.list_physical_devices("GPU")
    if not devices:
        return Checked(
            problem="tensorflow does not see it; mostly the libraries of CUDA are missing, which the extra tensorflow-gpu "
            "installs"
        )
    name = tf.config.experimental.get_device_details(devices[0]).get("device_name", devices[0].name)
    product = tf.function(lambda a: tf.matmul(a, a))
    return _measured(name, tf.constant, product, lambda a: a.numpy())


PRODUCTS = {"jax": _with_jax, "torch": _with_torch, "tensorflow": _with_tensorflow}


if __name__ == "__main__":
    main()
