"""Tests of the reading order of files: an epoch has every sample exactly once, for any files and slots."""

import json
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlf.algorithms.partition import equal_sizes, partition, shuffled, sizes_by_speed
from ddlf.algorithms.reading_order import MAX_GLOBAL, SHUFFLE, Portion, Turned, portions
from ddlf.errors import ConfigError

files = st.lists(st.integers(1, 40), min_size=1, max_size=12)
rules = st.sampled_from(["global", "none", "window:1", "window:3", "window:8"])
seeds = st.integers(0, 2**63)


def samples_of(portion, sizes):
    """Return the numbers of a portion's samples, in the order of training."""
    first = np.cumsum([0, *sizes])
    return np.concatenate([first[file] + row for file, row in portion.blocks(sizes)])


@given(data=st.data(), sizes=files, shuffle=rules, seed=seeds, epoch=st.integers(0, 50))
def test_every_sample_is_read_exactly_once_in_an_epoch(data, sizes, shuffle, seed, epoch):
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=1, max_size=min(9, sum(sizes))))
    slots = portions(sizes, sizes_by_speed(sum(sizes), speeds), shuffle, seed=seed, epoch=epoch)
    read = [samples_of(portion, sizes) for portion in slots]
    assert [len(samples) for samples in read] == [portion.samples for portion in slots]
    assert min(map(len, read)) > 0
    assert np.array_equal(np.sort(np.concatenate(read)), np.arange(sum(sizes)))


@given(sizes=files, shuffle=rules, seed=seeds, epoch=st.integers(0, 50), slots=st.integers(1, 5))
def test_a_portion_reads_its_stated_rows_and_each_file_once(sizes, shuffle, seed, epoch, slots):
    if sum(sizes) < slots:
        return
    for portion in portions(sizes, equal_sizes(sum(sizes), slots), shuffle, seed=seed, epoch=epoch):
        stated = {(file, row) for file, start, stop in portion.stretches(sizes).tolist() for row in range(start, stop)}
        read = [pair for block in portion.blocks(sizes) for pair in zip(*map(np.ndarray.tolist, block), strict=True)]
        assert set(read) <= stated
        assert shuffle == "global" or len(read) == len(stated)
        assert len(set(portion.stretches(sizes)[:, 0].tolist())) == len(portion.stretches(sizes))


@given(sizes=st.lists(st.integers(60, 100), min_size=1, max_size=8), slots=st.integers(1, 4), epoch=st.integers(0, 9))
def test_slots_get_their_shares_except_rounding_to_whole_files(sizes, slots, epoch):
    shares = equal_sizes(sum(sizes), slots)
    for portion, share in zip(portions(sizes, shares, seed=1, epoch=epoch), shares, strict=True):
        assert abs(portion.samples - share) <= 2 * max(1, 0.02 * sum(sizes) / slots)


@pytest.mark.parametrize("shuffle", ["none", "window:8"])
@pytest.mark.parametrize("sizes", [[20_000] * 3, [20_001, 20_000, 19_999], [4, 3, 3]])
def test_slots_read_one_whole_file_each_and_rotate(sizes, shuffle):
    for cycle in (0, 1, 7):
        files_by_epoch = []
        for epoch in range(3 * cycle, 3 * cycle + 3):
            stretches_of_slots = [
                portion.stretches(sizes).tolist()
                for portion in portions(sizes, equal_sizes(sum(sizes), 3), shuffle, seed=4, epoch=epoch)
            ]
            assert all(
                len(stretches) == 1 and stretches[0][1:] == [0, sizes[stretches[0][0]]]
                for stretches in stretches_of_slots
            )
            files_by_epoch.append([stretches[0][0] for stretches in stretches_of_slots])
        assert all(sorted(row) == [0, 1, 2] for row in files_by_epoch)
        assert all(sorted(column) == [0, 1, 2] for column in zip(*files_by_epoch, strict=True))
        assert files_by_epoch[1] == [*files_by_epoch[0][1:], files_by_epoch[0][0]]
        assert shuffle != "none" or files_by_epoch == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


@given(seed=seeds, slots=st.integers(1, 6), files=st.integers(1, 6))
def test_after_as_many_epochs_as_slots_each_slot_has_read_all(seed, slots, files):
    sizes = [slots * 4] * files
    for slot in range(slots):
        read = [
            samples_of(portions(sizes, equal_sizes(sum(sizes), slots), seed=seed, epoch=epoch)[slot], sizes)
            for epoch in range(slots)
        ]
        assert np.array_equal(np.sort(np.concatenate(read)), np.arange(sum(sizes)))


@given(sizes=files, seed=seeds, epoch=st.integers(0, 50), slots=st.integers(1, 4))
def test_a_global_shuffle_is_the_order_of_data_in_memory(sizes, seed, epoch, slots):
    if sum(sizes) < slots:
        return
    shares = equal_sizes(sum(sizes), slots)
    in_order = portions(sizes, shares, "global", seed=seed, epoch=epoch)
    expected = partition(shuffled(sum(sizes), seed, epoch), shares)
    for portion, samples in zip(in_order, expected, strict=True):
        assert np.array_equal(samples_of(portion, sizes), samples)


def test_without_a_shuffle_rows_keep_their_order():
    first, second = portions([3, 6, 3], [6, 6], "none", seed=0, epoch=0)
    assert samples_of(first, [3, 6, 3]).tolist() == [0, 1, 2, 3, 4, 5]
    assert samples_of(second, [3, 6, 3]).tolist() == [6, 7, 8, 9, 10, 11]


def test_a_window_mixes_the_rows_of_its_files_only():
    (portion,) = portions([50] * 9, [450], "window:3", seed=3, epoch=0)
    blocks = list(portion.blocks([50] * 9))
    assert [len(set(block.tolist())) for block, _ in blocks] == [3, 3, 3]
    assert all(len(set(block[:50].tolist())) == 3 for block, _ in blocks)
    files = portion.stretches([50] * 9)[:, 0].tolist()
    assert [set(block.tolist()) for block, _ in blocks] == [set(files[i : i + 3]) for i in (0, 3, 6)]


@given(seed=seeds, epoch=st.integers(0, 1000))
def test_orders_differ_from_epoch_to_epoch_and_from_slot_to_slot(seed, epoch):
    sizes = [64] * 4
    now, later = (portions(sizes, [128, 128], seed=seed, epoch=number) for number in (epoch, epoch + 2))
    orders = [samples_of(portion, sizes).tolist() for portion in (*now, *later)]
    assert len(set(map(tuple, orders))) == 4


@given(data=st.data(), sizes=files, shuffle=rules, seed=seeds)
def test_pieces_read_in_turn_give_the_batches_of_the_portion(data, sizes, shuffle, seed):
    (portion,) = portions(sizes, [sum(sizes)], shuffle, seed=seed, epoch=0)
    batch = data.draw(st.integers(1, 9))
    cuts = sorted(data.draw(st.lists(st.integers(0, -(-len(portion) // batch) - 1), max_size=3)))
    pieces = [portion[a * batch : b * batch] for a, b in zip([0, *cuts], [*cuts, len(portion)], strict=True)]
    order = [index for index, piece in enumerate(pieces) for _ in range(-(-len(piece) // batch))]
    order = [*data.draw(st.permutations(order[:-1])), order[-1]]
    turned = Turned(pieces=tuple(pieces), order=tuple(order), batch=batch)
    unread = [samples_of(piece, sizes).tolist() if len(piece) else [] for piece in pieces]
    expected = []
    for index in order:
        expected += unread[index][:batch]
        unread[index] = unread[index][batch:]
    assert samples_of(turned, sizes).tolist() == expected
    assert len(turned) == len(portion)
    if shuffle.startswith("window"):
        limit = int(shuffle[7:]) * turned.windows
        assert all(len(set(block.tolist())) <= limit for block, _ in turned.blocks(sizes))


def test_the_order_never_changes():
    """Resumed runs and workers of other versions depend on this order. A changed order needs a new name."""
    (portion,) = portions([3, 3, 3], [9], "window:2", seed=5, epoch=2)
    assert samples_of(portion, [3, 3, 3]).tolist() == [7, 2, 6, 1, 0, 8, 4, 5, 3]


def test_billion_samples_are_planned_quickly_in_small_tasks():
    sizes = np.full(100_000, 10_000)
    shares = equal_sizes(10**9, 3)
    began = time.process_time()
    portions(sizes, shares, seed=7, epoch=11)[1].stretches(sizes)
    took = time.process_time() - began
    tracemalloc.start()
    planned = portions(sizes, shares, seed=7, epoch=11)
    stretches = planned[1].stretches(sizes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 1
    assert peak < 50e6
    assert int((stretches[:, 2] - stretches[:, 1]).sum()) == planned[1].samples
    assert all(len(json.dumps(portion.to_message())) < 300 for portion in planned)
    assert Portion.from_message(json.loads(json.dumps(planned[1].to_message()))) == planned[1]


@pytest.mark.parametrize(
    ("sizes", "shares", "shuffle", "message"),
    [
        ([], [1], "none", "at least one sample"),
        ([3, 0], [3], "none", "at least one sample"),
        ([3], [], "none", "at least one sample"),
        ([3], [3, 0], "none", "at least one sample"),
        ([3], [2, 2], "none", "shares add up to 4, but there are 3"),
        ([3], [3], "window:0", "at least one file"),
        ([3], [3], "windows", "did you mean 'window'"),
        ([MAX_GLOBAL, 1], [MAX_GLOBAL + 1], "global", "too many for shuffle='global'"),
    ],
)
def test_impossible_portions_are_refused(sizes, shares, shuffle, message):
    with pytest.raises(ConfigError, match=message):
        portions(sizes, shares, shuffle, seed=0, epoch=0)


def test_a_shuffle_is_read_and_written_as_text():
    assert [str(SHUFFLE.read(text)) for text in ("global", "window:4", "none")] == ["global", "window:files=4", "none"]
