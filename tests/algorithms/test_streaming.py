"""Tests of streaming: slots exchange one fragment of the weights in each round, by the formula of the source."""

from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.algorithms.merge import Mean, merged
from ddlf.algorithms.outer import OUTER, Streaming, divide_into_fragments, tensors_of
from ddlf.errors import ConfigError
from ddlf.events import Warned
from ddlf.testing import FakeCluster, FakeRun
from ddlf.training.exchanges.carrier import StarWeights
from ddlf.training.slot.parts import OwnFragments, SlotRound

START = {f"layer/{i}": np.random.default_rng(i).normal(size=(30, 20 + i)).astype(np.float32) for i in range(8)}


def bits(run):
    return [w.tobytes() for w in run.model.get_weights()]


async def trained(**settings):
    settings = {"start": START, "slots": 2, "outer": "streaming:3", **settings}
    run = FakeRun(FakeCluster(settings.pop("workers", 2)), **settings)
    await run.train_model()
    return run


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_streaming_equals_the_formula_of_its_source_over_ten_rounds(alpha):
    """Each of three slots is pulled towards another point. The second of three tensors is not trained."""
    rule, trainable = Streaming(fragments=2, alpha=alpha, learning_rate=0.7, momentum=0.9), [True, False, True]
    chance = np.random.default_rng(0)
    points, counts = chance.normal(size=(3, 3, 4)), [10, 20, 30]

    # The formula leaves open which of the two trained tensors is in which fragment.
    dealt = divide_into_fragments([np.zeros(4)] * 3, trainable, 2)
    w, v, local = np.ones((3, 4)), np.zeros((3, 4)), np.ones((3, 3, 4))
    expected = []
    for r in range(10):
        local = local - 0.2 * (local - points)  # the local training of each slot
        for tensor in (0, 1, 2):
            if trainable[tensor] and tensor not in dealt[r % 2]:
                continue
            g = sum(n * (w[tensor] - local[j, tensor]) for j, n in enumerate(counts)) / 60
            if trainable[tensor]:
                v[tensor] = 0.9 * v[tensor] + g
                w[tensor] = w[tensor] - 0.7 * (g + 0.9 * v[tensor])
                local[:, tensor] = alpha * local[:, tensor] + (1 - alpha) * w[tensor]
            else:
                w[tensor] = w[tensor] - g
                local[:, tensor] = w[tensor]
        expected.append(w.copy())

    weights, state, own_states, last = [np.ones(4)] * 3, rule.init([np.ones(4)] * 3), [None] * 3, [-1, -1]
    model = SimpleNamespace(lossless=[not flag for flag in trainable])
    for r in range(10):
        task = SimpleNamespace(merged=tuple(last), wanted=(r % 2,), alpha=alpha, round=r, apart=())
        updates = []
        for slot in range(3):
            round, part = SlotRound(task, model), OwnFragments(None, model)
            round.weights = weights
            round.begun = part.begin(round, weights, own_states[slot])
            update, own_states[slot] = part.end(
                round, [0.2 * (b - p) for b, p in zip(round.begun, points[slot], strict=True)]
            )
            updates.append([u if i in round.tensors else np.zeros(4) for i, u in enumerate(update)])
        state, weights = rule.update(state, weights, merged(Mean(), updates, counts), trainable, round.tensors)
        last[r % 2] = r
        np.testing.assert_allclose(weights, expected[r], rtol=0, atol=1e-12)


def test_fragments_have_each_trained_tensor_once_and_similar_sizes():
    chance = np.random.default_rng(1)
    weights = [np.zeros(size, np.float32) for size in chance.integers(1, 1000, size=40)]
    trainable = [bool(flag) for flag in chance.integers(0, 2, size=40)]
    dealt = divide_into_fragments(weights, trainable, 4)
    assert sorted(i for part in dealt for i in part) == [i for i, learns in enumerate(trainable) if learns]
    sizes = [sum(weights[i].nbytes for i in part) for part in dealt]
    assert max(sizes) < 1.1 * sum(sizes) / 4
    always = tensors_of([], weights, trainable, 4)
    assert always == [i for i, learns in enumerate(trainable) if not learns]


def test_each_fragment_has_a_tensor_also_when_some_are_empty():
    assert all(divide_into_fragments([np.zeros(0)] * 3 + [np.zeros(9)], [True] * 4, 4))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("streaming:0", "fragments must be >= 1, got 0"),
        ("streaming:alpha=1", r"alpha must be in \[0, 1\), got 1.0"),
        ("streaming:learning_rate=0", "learning_rate must be finite and > 0"),
        ("streaming:momentum=1", r"momentum must be in \[0, 1\)"),
        ("streaming:overlap=2", "streaming has no overlap any more; leave out overlap"),
    ],
)
def test_impossible_parameters_are_refused(text, sentence):
    with pytest.raises(ConfigError, match=sentence):
        OUTER.read(text)


def test_text_of_an_earlier_version_without_overlap_is_read():
    assert OUTER.read("streaming:fragments=3,overlap=0") == Streaming(fragments=3)


# --- runs with it -----------------------------------------------------------------------------------------------------


async def test_streaming_with_one_fragment_has_the_bits_of_diloco():
    diloco = await trained(outer="diloco")
    assert bits(await trained(outer="streaming:1")) == bits(diloco)
    assert bits(await trained(outer="streaming:2")) != bits(diloco)


async def test_a_round_changes_only_its_fragment_and_the_last_round_changes_all():
    history = []
    run = FakeRun(FakeCluster(2), start=START, outer="streaming:3", master_epochs=5)
    run.on_round = lambda record: history.append(run.model.get_weights())
    await run.train_model()
    dealt = divide_into_fragments(list(START.values()), [True] * 8, 3)
    before = list(START.values())
    for number, after in enumerate(history):
        moved = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if not np.array_equal(a, b)]
        assert moved == (list(range(8)) if number == 4 else sorted(dealt[number % 3]))
        before = after


def test_only_a_fragment_travels_either_way():
    weights = list(START.values())
    nbytes = sum(w.nbytes for w in weights)
    out = StarWeights("float32", [False] * 8, fragments=True)
    assert not out.encode(0, weights, 0)["delta"]
    for part in range(4):
        tensors = tensors_of([part], weights, [True] * 8, 4)
        weights = [w + 1 if i in tensors else w for i, w in enumerate(weights)]
        message = out.encode(0, weights, part + 1, tensors=tensors)
        sent = sum(array.nbytes for payload in message["encoded"]["payloads"] for array in payload.values())
        assert sent == sum(weights[i].nbytes for i in tensors) < 0.3 * nbytes
        assert all(np.array_equal(a, b) for a, b in zip(out.slot_weights[0], weights, strict=True))


@pytest.mark.parametrize(
    "settings", [{}, {"codec": "int4-block", "weights_codec": "delta:int4-block"}, {"codec": "powersgd"}]
)
async def test_streaming_run_resumes_within_an_epoch_with_the_same_bits(settings, tmp_path):
    """The last round of an epoch of 194 samples has 2 samples, so only two of three slots train in it."""
    settings |= {
        "outer": "streaming:3,alpha=0.1",
        "worker_steps": 4,
        "batch_size": 16,
        "slots": 3,
        "samples": 194,
        "master_epochs": 2,
    }
    uninterrupted = await trained(**settings, checkpoint=tmp_path / "whole", checkpoint_keep=100)
    assert min(record.samples for record in uninterrupted.history) == 2
    for number in (1, len(uninterrupted.history) // 2):
        source = tmp_path / "whole" / f"round-{number:06d}"
        resumed = await trained(
            **settings, resume=source, checkpoint=tmp_path / f"{number}", checkpoint_every=100, workers=1
        )
        assert bits(resumed) == bits(uninterrupted)


async def test_local_weights_lost_with_a_worker_are_reported():
    run = FakeRun(FakeCluster(2), start=START, outer="streaming:3")
    worker = run.cluster.workers[1]
    usual = worker.rpc

    async def rpc(request, timeout_s=None):
        if request.args[2] == "train" and request.args[-1]["round"] == 2:
            worker.rpc, worker.lost = usual, True
            worker.open(run)
        return await usual(request, timeout_s)

    worker.rpc = rpc
    await run.train_model()
    (dropped,) = [event for event in run.events if event.kind == "dropped"]
    assert dropped.text.startswith("lost with worker 2 (it was lost): the local weights of slot 2;")
    assert len(run.history) == run.master_epochs


@pytest.mark.parametrize("after", ["nesterov", "streaming:2", "streaming:3"])
async def test_training_continues_after_streaming_with_any_rule(after):
    run = await trained()
    run.outer = after
    await run.train_model()
    assert len(run.history) == 2 * run.master_epochs


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"mode": "async"},
            "outer='streaming:.*' is for synchronous training: asynchronous training has no such setting",
        ),
        (
            {"weights_codec": "float16"},
            "weights_codec='float16' is for whole weights.*use weights_codec='delta:float16'",
        ),
        (
            {"outer": "streaming:9"},
            "streaming with 9 fragments needs as many trained tensors, but the model has 8",
        ),
        ({"outer": f"streaming:{10**13}"}, f"streaming with {10**13} fragments needs as many trained tensors"),
    ],
)
async def test_settings_that_contradict_streaming_are_refused_before_any_round(settings, sentence):
    run = FakeRun(FakeCluster(2), start=START, **{"outer": "streaming:3", **settings})
    with pytest.raises(ConfigError, match=sentence):
        await run.train_model()
    assert not run.history


@pytest.mark.parametrize(("rounds", "late"), [(1, 2), (2, 2), (4, 2), (9, 0)])
async def test_a_stopped_run_reports_fragments_that_the_model_does_not_have(rounds, late):
    run, warned = FakeRun(FakeCluster(2), start=START, outer="streaming:3", master_epochs=9), []
    run.subscribe(lambda event: warned.append(event.why) if isinstance(event, Warned) else None)
    run.on_round = lambda record: run.stop_training() if record.round == rounds else None
    await run.train_sync()
    sentence = f"what slots have learned since {late} of 3 fragments were merged is not in the model"
    assert [message.partition(":")[0] for message in warned] == [sentence] * bool(late)
