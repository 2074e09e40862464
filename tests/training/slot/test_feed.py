"""Tests of feeds: they give batches in a chosen order, and lead to the weights of plain ``fit``."""

import numpy as np
import pytest

from ddlf.data.trees import first_array, tree_map
from ddlf.training.slot.feed import ArrayFeed, TensorFlowFeed, make_feed
from tests.training.models import blobs, equal, small_model
from tests.training.slot.replicas import traces


def rows(feed):
    """Return the batches of one pass over a feed."""
    dataset = feed.dataset
    if isinstance(feed, ArrayFeed):
        return [dataset[number] for number in range(len(dataset))]
    return [tree_map(lambda tensor: tensor.numpy(), batch) for batch in dataset]


@pytest.mark.parametrize("kind", [TensorFlowFeed, ArrayFeed])
@pytest.mark.parametrize("samples", [1, 7, 8, 9, 16])
def test_a_pass_gives_every_sample_of_the_order_once_and_in_order(kind, samples):
    x, y = np.arange(40.0).reshape(20, 2), np.arange(20)
    feed = kind((x, y), 8)
    order = np.random.default_rng(0).permutation(20)[:samples].astype(np.uint8)
    feed.set_order(order)
    batches = rows(feed)
    assert [len(batch[1]) for batch in batches] == [8] * (samples // 8) + ([samples % 8] if samples % 8 else [])
    assert np.array_equal(np.concatenate([batch[1] for batch in batches]), order)
    assert np.array_equal(np.concatenate([batch[0] for batch in batches]), x[order])


@pytest.mark.parametrize("batch_size", [2**31, 10**30])
def test_a_batch_larger_than_the_pass_is_the_whole_pass(batch_size):
    feed = make_feed((np.arange(6),), batch_size)
    feed.set_order(np.array([5, 0, 3]))
    ((batch,),) = rows(feed)
    assert list(batch) == [5, 0, 3]


@pytest.mark.parametrize("kind", [TensorFlowFeed, ArrayFeed])
def test_models_of_several_inputs_get_trees_of_batches(kind):
    data = ({"a": np.arange(6), "b": np.arange(6) * 10}, [np.arange(6) * 100])
    feed = kind(data, 4)
    feed.set_order(np.array([5, 0, 3]))
    ((inputs, (label,)),) = rows(feed)
    assert list(inputs["a"]) == [5, 0, 3]
    assert list(inputs["b"]) == [50, 0, 30]
    assert list(label) == [500, 0, 300]


@pytest.mark.parametrize("kind", [TensorFlowFeed, ArrayFeed])
def test_the_arrays_of_a_feed_are_the_memory_of_its_batches(kind):
    feed = kind(({"a": np.arange(6)}, np.arange(6)), 4)
    assert list(feed.data[0]["a"]) == list(range(6))
    feed.data[1].flags.writeable = kind is ArrayFeed  # TensorFlow's own memory stays read-only
    assert feed.data[1].flags.writeable == (kind is ArrayFeed)
    feed.set_order(np.array([2]))
    assert rows(feed)[0][1] == feed.data[1][2]


@pytest.mark.parametrize("kind", [TensorFlowFeed, ArrayFeed])
def test_batches_of_another_size_share_the_memory_of_the_samples(kind):
    """TensorFlow keeps the samples of an old pipeline, so a second copy would stay as long as the model."""
    first = kind((np.arange(6.0), {"a": np.arange(6)}), 4)  # TensorFlow converts the first array
    feed = first.with_batches_of(2)
    feed.set_order(np.array([5, 0, 3]))
    assert [list(batch[0]) for batch in rows(feed)] == [[5, 0], [3]]
    assert [list(batch[1]["a"]) for batch in rows(feed)] == [[5, 0], [3]]
    assert np.shares_memory(feed.data[1]["a"], first.data[1]["a"])
    if kind is TensorFlowFeed:
        assert feed._tensors is first._tensors


def test_the_first_array_of_a_tree_is_found():
    assert first_array({"a": [np.zeros(3), np.zeros(3)]}).shape == (3,)


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 16])
def test_fit_on_a_feed_has_the_weights_of_fit_on_arrays(steps):
    x, y = blobs(203)
    order = np.random.default_rng(3).permutation(203)
    plain, fed = small_model(), small_model()
    fed.set_weights(plain.get_weights())
    plain.fit(x[order], y[order], batch_size=16, epochs=1, shuffle=False, verbose=0)
    feed = make_feed((x, y), 16)
    feed.set_order(order)
    fed.steps_per_execution = steps
    fed.fit(feed.dataset, epochs=1, verbose=0, shuffle=False)
    assert equal(plain.get_weights(), fed.get_weights())


def test_new_orders_of_other_lengths_cause_no_new_trace():
    x, y = blobs(100)
    model, feed = small_model(), make_feed((x, y), 16)
    model.steps_per_execution = 16
    counts = []
    for length in (100, 90, 37, 64, 100):
        feed.set_order(np.arange(length))
        model.fit(feed.dataset, epochs=2, verbose=0, shuffle=False)
        counts.append(traces(model))
    assert counts[-1] == counts[0]


def test_an_order_of_the_same_length_keeps_the_data_set():
    feed = TensorFlowFeed((np.arange(6),), 4)
    feed.set_order(np.array([5, 0, 3]))
    before = feed.dataset
    feed.set_order(np.array([1, 2, 4]))
    assert feed.dataset is before
    assert list(rows(feed)[0][0]) == [1, 2, 4]
