from __future__ import annotations

import gc

import numpy as np

from ddlf.net.buffers import MIN_BYTES, BufferPool


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_is_used_again_when_its_array_is_gone() -> None:
    pool = BufferPool()
    first = pool.take(MIN_BYTES)
    where = address(first)
    assert pool.free_bytes == 0
    del first
    assert pool.free_bytes == MIN_BYTES
    assert address(pool.take(MIN_BYTES)) == where


def test_memory_is_not_used_again_while_any_view_of_it_lives() -> None:
    pool = BufferPool()
    memory = pool.take(MIN_BYTES)
    array = np.frombuffer(memory, np.float32).reshape(2, -1)  # as ``values.loads`` makes arrays
    where = address(memory)
    for view in (array[1, 5:], array.T, array.view(np.uint8), memoryview(array), memory[10:], np.asarray(array)[::2]):
        del memory, array
        gc.collect()
        assert pool.free_bytes == 0
        assert address(pool.take(MIN_BYTES)) != where
        pool.clear()
        memory = array = view
    del memory, array, view
    assert pool.free_bytes == MIN_BYTES


def test_memory_of_another_size_is_not_used() -> None:
    pool = BufferPool()
    pool.take(MIN_BYTES)
    assert pool.take(MIN_BYTES + 1).nbytes == MIN_BYTES + 1


def test_no_more_is_kept_than_allowed() -> None:
    pool = BufferPool(max_free_bytes=2 * MIN_BYTES)
    arrays = [pool.take(MIN_BYTES) for _ in range(5)]
    del arrays
    assert pool.free_bytes == 2 * MIN_BYTES
    pool.take(2 * MIN_BYTES + 1)
    assert pool.free_bytes == 2 * MIN_BYTES
    pool.clear()
    assert pool.free_bytes == 0


def test_a_small_array_leaves_nothing_behind() -> None:
    pool = BufferPool()
    pool.take(MIN_BYTES - 1)
    assert pool.free_bytes == 0
