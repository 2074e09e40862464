"""Tests of the orders, references and answers of exchanges and checkpoints: each arrives as the same value."""

from pathlib import Path

import numpy as np
import pytest

from ddlf.algorithms.weights import Fault
from ddlf.rpc.messages import dumps, loads
from ddlf.training.checkpoints.slice_reader import Damage, SliceReport
from ddlf.training.checkpoints.slices import Destination, Identity, NotWritten, SliceFile
from ddlf.training.evaluation.metrics import Evaluation
from ddlf.training.evaluation.model import NotCounted
from ddlf.training.exchanges.sharded import plan as sharded
from ddlf.training.exchanges.split import orders as split
from ddlf.training.exchanges.split.plan import PlanArguments
from ddlf.training.samples.policy import DataDescription
from ddlf.training.slot.arithmetic import Arithmetic
from ddlf.training.slot.build import ModelReport
from ddlf.training.slot.replica import LoadedData, LoadReport
from ddlf.training.slot.task import MetricCounts, Task

ROW = np.arange(3, dtype="f4")
TASK = Task(
    slot=0,
    round=2,
    slots=1,
    first_epoch=0,
    epochs=1,
    batch_size=2,
    seed=0,
    indices=ROW.astype(int),
    weights=None,
    version=2,
)
MEAN = sharded.MeanPlan(group="optimizer", states=[(0, 1, 2, 1.0)], total=1.0, on_master=[(1, [ROW])])
PLAN = sharded.Plan(
    base=1,
    generation=2,
    updates=[(0, 1, 9, 1.0)],
    owners=[1],
    tensors=None,
    kept=1,
    state=[(0, 3, 1)],
    copies=False,
    left=[],
    groups=[],
    means=[MEAN],
    merge="average",
    weighed=[],
    outer="nesterov",
    codec="float32",
    trainable=[True],
    names=["kernel"],
    piece=3,
)
ORDER = dict(
    part=1, plan=PlanArguments(ends=[2, 4], batch_size=8, micro_batches=2, workers_of_stage=1, replicas=1, by_rows=0)
)
ORDER |= dict(workers=[1, 2], attempt=3, backend="tensorflow", version=4, copy=1)
MESSAGES = [
    PLAN,
    sharded.HeldWeights(generation=2, at=[1, 3], left=[2], means={"optimizer": 2}),
    sharded.EvaluatedWeights(generation=2, exact=[(0, 3, 1)]),
    split.PartOrder(**ORDER, source=None, entry={"id": 0}),
    split.PartOrder(**ORDER, source=split.PartSource(worker=2), entry=None),
    split.PartOrder(**ORDER, source=split.PartSource(arrays={"weight 0": ROW}), entry=None),
    split.PartTask(TASK, [3]),
    split.PartEvaluation("val", 8, 20, {"x_val": "ab"}),
]
DATA = DataDescription(fingerprint="ab", samples=3, shape=[3, 2], dtype="float32", evaluated={"val": 2}, rows=[ROW[:0]])
COUNTS = MetricCounts(["loss", None], [ROW])
ANSWERS = [
    SliceFile(name="slice_0001.safetensors", bytes=9, sha256="ab", arrays=["weights 0 a"], by=2),
    NotWritten(by=2, reason="the disk is full", visible=True),
    SliceReport(visible=True, damage=Damage("a", "9 bytes", "8 bytes", "it is damaged")),
    LoadReport(
        LoadedData(description=DATA, files=b"\x80", loaded=True, seconds=0.5),
        ModelReport(
            weights=[["a", [3], "float32"]], optimizer={}, keras="3", backend="jax", arithmetic=Arithmetic("a")
        ),
    ),
    COUNTS,
    NotCounted("a metric has its own update_state"),
    Evaluation({"loss": 0.5}, 3, COUNTS),
    Fault("has NaN", "kernel", 2, "lower the learning rate"),
    sharded.Unanswered(1, 2, "it is lost", link=True),
    sharded.Unmergeable("slot 1: has NaN"),
    sharded.Unusable(Fault("has NaN")),
    split.TrainedPart(metrics={}, losses=0.0, counted=COUNTS, digest="ab", compute_s=1.0, idle_s=0.5, wait_data_s=0.0),
    split.PartUnreached(2, "it is lost"),
    split.BadTensor("has NaN", "lower the learning rate"),
    split.PartStopped(),
]


def sent(value):
    return loads([bytearray(buffer) for buffer in dumps(value)])


@pytest.mark.parametrize("value", MESSAGES, ids=lambda value: type(value).__name__)
def test_message_is_plain_data_and_gives_the_same_value(value):
    message = value.to_message()
    assert not any(hasattr(item, "__dataclass_fields__") for item in message.values())
    assert repr(type(value).from_message(sent(message))) == repr(value)


@pytest.mark.parametrize("value", ANSWERS, ids=lambda value: type(value).__name__)
def test_master_receives_an_answer_as_the_same_value(value):
    assert repr(sent(value)) == repr(value)


def test_message_of_a_plan_has_the_arrays_themselves():
    (mean,) = PLAN.to_message()["means"]
    assert mean["on_master"][0][1][0] is ROW


def test_destination_travels_to_a_worker_with_its_paths():
    from ddlf.rpc.code import pickle_object, unpickle

    identity = Identity("a run", 3)
    destination = Destination(folder=Path("a"), session="s", file=Path("a/b"), name="slice_0001", identity=identity)
    assert unpickle(pickle_object(destination)) == destination
