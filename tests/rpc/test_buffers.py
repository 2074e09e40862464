from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from ddlf.rpc.buffers import MIN_BYTES, BufferPool


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_reused_after_its_array_was_freed() -> None:
    pool = BufferPool()
    first = pool.take(MIN_BYTES)
    first_address = address(first)
    assert pool.free_bytes == 0
    del first
    assert pool.free_bytes == MIN_BYTES
    assert address(pool.take(MIN_BYTES)) == first_address


def test_memory_is_not_reused_while_a_view_of_it_lives() -> None:
    pool = BufferPool()
    memory = pool.take(MIN_BYTES)
    array = np.frombuffer(memory, np.float32).reshape(2, -1)  # ``values.loads`` makes arrays in this way
    first_address = address(memory)
    for view in (array[1, 5:], array.T, array.view(np.uint8), memoryview(array), memory[10:], np.asarray(array)[::2]):
        del memory, array
        assert pool.free_bytes == 0
        assert address(pool.take(MIN_BYTES)) != first_address
        pool.clear()
        memory = array = view
    del memory, array, view
    assert pool.free_bytes == MIN_BYTES


def test_memory_of_another_size_is_not_reused() -> None:
    pool = BufferPool()
    pool.take(MIN_BYTES)
    assert pool.take(MIN_BYTES + 1).nbytes == MIN_BYTES + 1


def test_the_pool_keeps_no_more_memory_than_allowed() -> None:
    pool = BufferPool(max_free_bytes=2 * MIN_BYTES)
    arrays = [pool.take(MIN_BYTES) for _ in range(5)]
    del arrays
    assert pool.free_bytes == 2 * MIN_BYTES
    pool.take(2 * MIN_BYTES + 1)
    assert pool.free_bytes == 2 * MIN_BYTES
    pool.clear()
    assert pool.free_bytes == 0


def test_memory_of_a_small_array_is_not_kept() -> None:
    pool = BufferPool()
    pool.take(MIN_BYTES - 1)
    assert pool.free_bytes == 0


@pytest.mark.parametrize("sizes", ["(1_638_400, 174_080, 147_456) * 16", "(400_000,) * 300"], ids=["31 MB", "120 MB"])
def test_the_allocator_reuses_memory_of_arrays_too_small_for_the_pool(sizes: str) -> None:
    code = f"""
import resource, sys
import numpy as np
from ddlf.rpc.buffers import POOL

def rounds(number):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(number):
        arrays = [POOL.take(size) for size in {sizes}]
        for array in arrays:
            array[:] = 1
        del arrays, array
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / number

rounds(3)
print(rounds(10))
"""
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(completed.stdout) < 100  # page faults in a round; new memory takes 7,600 and 29,000
