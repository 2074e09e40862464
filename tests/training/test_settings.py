"""Tests that every setting is checked before a worker is connected. These tests have no workers."""

import contextlib
import dataclasses
import io
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import ddlf
from ddlf.algorithms.arrival import FedBuff
from ddlf.algorithms.merge import TrimmedMean
from ddlf.algorithms.outer import Nesterov, Subtract
from ddlf.errors import AppError, BadUpdate, ConfigError
from ddlf.testing import FakeCluster, FakeRun, FakeWorker
from ddlf.training import reporter
from ddlf.training.checkpoints.checkpoint import CheckpointFolder
from ddlf.training.registry import EXCHANGES, SETTINGS, STRATEGIES, flat
from ddlf.training.start import check


class Plain(ddlf.IApp):
    async def load_dataset(self): ...

    async def create_model(self): ...


def with_settings(**attributes):
    app = Plain()
    for name, value in attributes.items():
        setattr(app, name, value)
    return app


class NoOptimizer:
    def __repr__(self):
        return "<no optimizer>"


WRONG = [
    (dict(mode="assync"), f"mode must be one of {', '.join(STRATEGIES)}, got 'assync'; did you mean 'async'?"),
    (
        dict(optimizer_state="keep"),
        "optimizer_state must be one of kept, stays, fresh, averaged, got 'keep'; did you mean 'kept'?",
    ),
    (dict(split="2"), "`within:2,images:rows`, `memory:2GB`, `layers:NAME,NAME`, or None, got '2'"),
    (dict(micro_batches=0), "micro_batches must be a whole number of 1 or more, or None for 8"),
    (dict(optimizer_state=None), "optimizer_state must be one of kept, stays, fresh, averaged, got None"),
    (dict(balance="speedy"), "balance must be 'equal' or 'speed', got 'speedy'; did you mean 'speed'?"),
    (
        dict(partition="dirichlet:0"),
        "partition 'dirichlet:0': alpha must be finite and > 0, got 0.0; write it as dirichlet:alpha=1.0",
    ),
    (dict(partition="dirichlet:nan"), "alpha must be finite and > 0, got nan"),
    (dict(partition="classes:0"), "per_slot must be 1 or more, got 0"),
    (dict(partition="classes:1.5"), "per_slot must be a whole number, got '1.5'"),
    (dict(partition="power:11"), "exponent must be from -10 to 10, got 11.0"),
    (dict(partition="dirichlet:1,2"), "dirichlet has no more parameters than alpha"),
    (dict(partition="dirichlt"), "unknown partition 'dirichlt', did you mean 'dirichlet'?"),
    (dict(partition=None), "partition must be a name, got None"),
    (
        dict(partition="power:1", balance="speed"),
        "balance='speed' has no effect with partition='power:exponent=1.0'; leave balance out, or choose",
    ),
    (
        dict(partition="power:1", worker_steps=2),
        "worker_steps=2 has no effect with partition='power:exponent=1.0'; leave worker_steps out",
    ),
    (
        dict(optimizer_state="averaged", mode="async"),
        "optimizer_state='averaged' is for synchronous training: asynchronous slots end no",
    ),
    (
        dict(outer=Nesterov(), exchange="gradient"),
        "outer='nesterov:learning_rate=0.7,momentum=0.9' is for local training: with exchange='gradient' there is none",
    ),
    (
        dict(partition="power:1", exchange="gradient"),
        "is for local training: with exchange='gradient' there is none; leave partition at",
    ),
    (
        dict(batchnorm="lokal"),
        "batchnorm must be one of averaged, local, recalibrated, got 'lokal'; did you mean 'local'?",
    ),
    (dict(batchnorm="local", outer="streaming"), "both determine which weights a slot keeps; leave one of them out"),
    (dict(outer="streaming:fragments=2,overlap=2"), "streaming has no overlap any more; leave out overlap"),
    (dict(batchnorm="local", exchange="gradient"), "batchnorm='local' is for local training"),
    (dict(arrival="fedasinc"), "unknown arrival rule 'fedasinc', did you mean 'fedasync'?"),
    (dict(staleness="invers"), "unknown staleness 'invers', did you mean 'inverse'?"),
    (dict(max_staleness=-1), "max_staleness must be a whole number of 0 or more, or None for no limit, got -1"),
    (dict(converge="nope"), "unknown convergence 'nope'; choose one of never, target"),
    (dict(schedule="cosin"), "unknown schedule 'cosin', did you mean 'cosine'?"),
    (dict(schedule="cosine,linear"), "schedule 'cosine,linear' is not one course behind at most one warm-up"),
    (dict(clip="roling"), "unknown clip 'roling', did you mean 'rolling'?"),
    (dict(clip="rolling", mode="downpour"), "has no effect in Downpour training: it uses the norms"),
    (dict(multipliers="freeze:0.5", mode="downpour"), "has no effect in Downpour training: push_rule decides"),
    (dict(multipliers="freeze:2"), "multipliers 'freeze:2': shares must be from 0 to 1, got 2.0"),
    (dict(multipliers="head=x"), "'head=x' is not a value of multipliers"),
    (dict(multipliers="head=-1"), "the factor of 'head' must be finite and 0 or more"),
    (dict(rate_decay="plateau:factor=1"), "factor must be between 0 and 1"),
    (dict(rate_decay="nope"), "unknown decay of the learning rate 'nope'; choose one of never, webnn"),
    (dict(precision="bfloat16"), "got 'bfloat16'; did you mean 'mixed_bfloat16'?"),
    (
        dict(update_policy="rejct"),
        "update_policy must be one of stop, reject, clip, got 'rejct'; did you mean 'reject'?",
    ),
    (dict(converge="target:val_acuracy,0.9"), "looks at 'val_acuracy', did you mean 'val_accuracy'?"),
    (dict(converge="target:los,0.9"), "looks at 'los', did you mean 'loss'?"),
    (
        dict(checkpoint_keep=5),
        "checkpoint_keep=5 has no effect without a folder for checkpoints; set checkpoint, too (--checkpoint DIR)",
    ),
    (dict(checkpoint=ddlf.Checkpoint(every=4)), "checkpoint_every=4 has no effect without a folder for checkpoints"),
    (dict(verbose=3), "verbose must be True or False, got 3"),
    (dict(mode="downpour:fetch=2,,"), "downpour:fetch=2,, has nothing between two commas; leave out a comma"),
    (dict(mode="downpour:"), "downpour: has no setting after the colon; leave out the colon"),
    (dict(mode="downpour:replicas=4,,fetch=2"), "has nothing between two commas"),
    (
        dict(class_weight={0: -1.0}),
        "class_weight must be a dict of a weight of 0 or more for each class's number, or None, got {0: -1.0}",
    ),
    (dict(checkpoint_every=0), "checkpoint_every must be a whole number of 1 or more, got 0"),
    (dict(checkpoint_every="2"), "checkpoint_every must be a whole number of 1 or more, got '2'"),
    (dict(checkpoint_keep=0), "checkpoint_keep must be a whole number of 1 or more, got 0"),
    (dict(checkpoint=3), "checkpoint must be a folder or None, got 3"),
    (dict(resume=True), "resume must be a folder or None, got True"),
    (dict(evaluate_every=-1), "evaluate_every must be a whole number of 0 or more, got -1"),
    (dict(evaluate_every=True), "evaluate_every must be a whole number of 0 or more, got True"),
    (dict(evaluate_on="worker"), "evaluate_on must be 'master' or 'workers', got 'worker'; did you mean 'workers'?"),
    (
        dict(threads=0),
        "threads must be a whole number of 1 or more, or None for one number for all workers, chosen from cores and slots, got 0",
    ),
    (dict(deterministic=2), "deterministic must be True or False, got 2"),
    (dict(scout=2), "scout must be True or False, got 2"),
    (dict(planned=2), "planned must be True or False, got 2"),
    (dict(private="yes"), "private must be True or False, got 'yes'"),
    (dict(update_clip=0), "update_clip must be a finite number above 0, or None for no noise, got 0"),
    (dict(update_clip=float("nan")), "update_clip must be a finite number above 0"),
    (dict(secure_aggregation="yes"), "secure_aggregation must be True or False, got 'yes'"),
    (dict(secure_aggregation=True), "secure_aggregation without private=True cannot work: the master has the data"),
    (dict(private=True, update_limit=4.0), "update_limit without secure_aggregation cannot work: it is the largest"),
    (dict(update_limit=0), "update_limit must be a finite number above 0, or None for 8, or what clip and noise need"),
    (dict(update_limit=float("inf")), "update_limit must be a finite number above 0"),
    (dict(noise_multiplier=-1), "noise_multiplier must be a finite number above 0"),
    (dict(noise_multiplier=float("inf")), "noise_multiplier must be a finite number above 0"),
    (dict(privacy_budget=0), "privacy_budget must be a finite number above 0, or None for no limit, got 0"),
    (dict(delta=1.0), "delta must be a finite number above 0 and below 1, or None for 1e-5, got 1.0"),
    (dict(delta=float("nan")), "delta must be a finite number above 0 and below 1"),
    (dict(private=True, privacy_budget=3.0), "privacy_budget without noise_multiplier cannot work: without noise"),
    (dict(private=True, delta=1e-6), "delta without noise_multiplier cannot work: it belongs"),
    (dict(private=True, update_clip=1.0), "update_clip without noise_multiplier cannot work: a clipped update"),
    (dict(update_clip=1.0, noise_multiplier=1.0), "noise_multiplier without private=True cannot work: the master has"),
    (dict(private=True, privacy_unit="pupil"), "privacy_unit must be 'worker' or 'sample', got 'pupil'"),
    (dict(private=True, privacy_unit="sample"), "privacy_unit='sample' without noise_multiplier cannot work: it says"),
    (
        dict(private=True, update_clip=1.0, noise_multiplier=1.0, mode="async"),
        "noise_multiplier with mode='async' cannot work: the new weights follow from the update of one worker",
    ),
    (
        dict(private=True, update_clip=1.0, noise_multiplier=1.0, local_rule="scaffold"),
        "noise_multiplier with local_rule='scaffold' cannot work: workers would get sums of more than the updates",
    ),
    (
        dict(private=True, partition="power:1"),
        "partition='power:exponent=1.0' contradicts private=True: each worker trains",
    ),
    (
        dict(private=True, balance="speed"),
        "balance='speed' contradicts private=True: each worker trains on all its samples",
    ),
    (dict(private=True, slots=3), "slots=3 contradicts private=True: each worker is one slot"),
    (dict(private=True, class_weight={0: 2.0}), "contradicts private=True: the master does not know the classes"),
    (
        dict(private=True, worker_steps=5),
        "worker_steps=5 contradicts private=True: each worker trains on all its samples",
    ),
    (dict(private=True, round_samples=9), "round_samples=9 contradicts private=True: each worker trains on all"),
    (dict(private=True, shuffle="none"), "shuffle='none' contradicts private=True: private data is arrays"),
    (
        dict(private=True, evaluate_on="workers"),
        "evaluate_on='workers' contradicts private=True: workers evaluate their",
    ),
    (dict(private=True, mode="downpour"), "mode='downpour' contradicts private=True: its workers share portions"),
    (dict(private=True, mode="lbfgs"), "mode='lbfgs' contradicts private=True: its workers share portions"),
    (dict(private=True, exchange="sharded"), "exchange='sharded' contradicts private=True: other workers would see"),
    (dict(private=True, exchange="gradient"), "exchange='gradient' contradicts private=True: other workers would see"),
    (dict(private=True, scout=True), "scout=True contradicts private=True: trials compare rates on the same samples"),
    (dict(private=True, planned=True), "planned=True contradicts private=True: a plan compares numbers of slots"),
    (dict(private=True, batchnorm="recalibrated"), "batchnorm='recalibrated' contradicts private=True: it reads"),
    (
        dict(private=True, update_clip=1e38, noise_multiplier=1.0),
        "update_clip times noise_multiplier above 1e6 cannot work: so much noise fills all digits of a float32 weight; lower",
    ),
    (
        dict(private=True, update_clip=1.0, noise_multiplier=1e30, privacy_unit="sample"),
        "update_clip times noise_multiplier above 1e6 cannot work: so much noise",
    ),
    (dict(tf32="no"), "tf32 must be one of auto, on, off, got 'no'"),
    (dict(slots=0), "slots must be a whole number of 1 or more, or None for as many as workers, got 0"),
    (dict(slots=1.5), "slots must be a whole number of 1 or more, or None for as many as workers, got 1.5"),
    (dict(slots="3"), "slots must be a whole number of 1 or more, or None for as many as workers, got '3'"),
    (dict(wait_for_workers_s=-1), "wait_for_workers_s must be a number of seconds, 0 or more, got -1"),
    (dict(wait_for_workers_s=float("nan")), "wait_for_workers_s must be a number of seconds, 0 or more, got nan"),
    (dict(wait_for_workers_s=True), "wait_for_workers_s must be a number of seconds, 0 or more, got True"),
    (dict(wait_for_workers_s="60"), "wait_for_workers_s must be a number of seconds, 0 or more, got '60'"),
    (dict(callbacks=None), "callbacks must be a list of Keras callbacks, got None"),
    (dict(worker_callbacks=len), "worker_callbacks must be a list of Keras callbacks, got <built-in function len>"),
    (
        dict(class_weight=[1.0, 2.0]),
        "class_weight must be a dict of a weight of 0 or more for each class's number, or None, got [1.0",
    ),
    (dict(advice="strikt"), "advice must be one of off, quick, strict, got 'strikt'; did you mean 'strict'?"),
    (dict(verbose="no"), "verbose must be True or False, got 'no'"),
    (dict(ui="plane"), "ui must be one of auto, rich, plain, json, none, got 'plane'; did you mean 'plain'?"),
    (dict(echo="yes"), "echo must be True or False, got 'yes'"),
    (dict(out=3), "out must be a folder or None, got 3"),
    (dict(run_name=3), "run_name must be a name or None, got 3"),
    (dict(trackers="tensorbord"), "trackers must be 'tensorboard' or 'mlflow', got 'tensorbord'; did you mean"),
    (dict(dashboard="yes"), "dashboard must be True, False, a port, or None, got 'yes'"),
    (dict(dashboard=65536), "dashboard must be True, False, a port, or None, got 65536"),
    (dict(takeover="yes"), "takeover must be True or False, got 'yes'"),
    (dict(codec=None), "codec must be a name, got None"),
    (
        dict(codec="delta:int8"),
        "codec='delta:int8': an update is a difference already; codec='int8' for updates, weights_codec='delta:int8' for weights",
    ),
    (dict(weights_codec=8), "weights_codec must be a name, got 8"),
    (dict(merge=None), "merge must be a name, got None"),
    (dict(merge="trimmed:0.7"), "merge 'trimmed:0.7': beta must be in [0, 0.5), got 0.7; write it as trimmed:beta=0.2"),
    (dict(codec="topk:2"), "codec 'topk:2': fraction must be in (0, 1], got 2.0; write it as topk:fraction=0.01"),
    (dict(weights_codec="int8"), "weights cannot travel as 'int8': the lost part would never arrive; use float32"),
    (dict(outer="nesterov:momentun=1"), "nesterov has no parameter 'momentun', did you mean 'momentum'?"),
    (dict(outer="adam"), "unknown outer optimizer 'adam', did you mean 'fedadam'?"),
    (dict(outer="nestrov"), "unknown outer optimizer 'nestrov', did you mean 'nesterov'?"),
    (dict(outer=Nesterov), "outer must be an object, got the class Nesterov; write Nesterov()"),
    (dict(merge=TrimmedMean), "merge must be an object, got the class TrimmedMean; write TrimmedMean()"),
    (dict(arrival=FedBuff(size=2.5), mode="async"), "arrival rule 'fedbuff:size=2.5': size must be a whole number"),
    (dict(outer=NoOptimizer()), "outer must be an outer optimizer or the name of one, got <no optimizer>"),
    (
        dict(worker_steps="5"),
        "worker_steps must be a whole number of 1 or more, or None for rounds of worker_epochs, got '5'",
    ),
    (dict(worker_steps=5, worker_epochs=2), "worker_steps=5 and worker_epochs=2 both set the length of a round"),
    (
        dict(exchange="gradients"),
        f"exchange must be one of {', '.join(EXCHANGES)}, got 'gradients'; did you mean 'gradient'?",
    ),
    (dict(local_rule="scafold"), "unknown local rule 'scafold', did you mean 'scaffold'?"),
    (dict(local_rule=3), "local_rule must be a name, got 3"),
    (
        dict(local_rule="scaffold", mode="async"),
        "local_rule='scaffold' is for synchronous training: asynchronous training has no such setting; choose another local_rule",
    ),
    (
        dict(data_memory="0"),
        "data_memory must be a size such as `512MiB` or `2GB`, a number of bytes, or None, got '0'",
    ),
    (dict(shuffle="windw:8"), "unknown shuffle 'windw:8', did you mean 'window'?"),
    (dict(on_bad="ignore"), "on_bad must be 'stop' or 'skip', got 'ignore'"),
    (dict(round_samples=0), "round_samples must be a whole number of 1 or more, or None for rounds of worker_epochs"),
    (dict(n_fetch=0), "n_fetch must be a whole number of 1 or more, got 0"),
    (dict(n_push=1.5), "n_push must be a whole number of 1 or more, got 1.5"),
    (dict(pairs=0), "pairs must be a whole number of 1 or more, got 0"),
    (dict(portion=0), "portion must be a whole number of 1 or more, or None for an eighth of a slot's samples, got 0"),
    (dict(tolerance=-1), "tolerance must be a number, 0 or more, got -1"),
    (dict(push_rule="adagrat"), "unknown push rule 'adagrat', did you mean 'adagrad'?"),
    (dict(replicas=0), "replicas must be a whole number of 1 or more, or None for one in each slot, got 0"),
    (
        dict(copies=-1),
        "copies must be a whole number of 0 or more, or None for one, where there is another worker, got -1",
    ),
    (dict(shards=0), "shards must be a whole number of 1 or more, or None for one on each worker, got 0"),
    (dict(shard_cut="layer"), "shard_cut must be 'equal' or 'layers', got 'layer'"),
    (
        dict(shard_workers=0),
        "shard_workers must be a whole number of 1 or more, or None for those " + "that train, got 0",
    ),
    (dict(softsync=0), "softsync must be a whole number of 1 or more, or None for a step for each push, got 0"),
    (dict(warm_start=-1), "warm_start must be a whole number of 0 or more, or None for"),
    (
        dict(n_push=2),
        "n_push=2 is for Downpour training: synchronous training does not use it; leave n_push at 1, or",
    ),
    (dict(seed=2**32), "seed must be a whole number from 0 to 4294967295, got 4294967296"),
    (dict(peer="http://127.0.0.1:8930/"), "the link has no code behind its #; copy the whole link"),
    (dict(batch_size="64"), "batch_size must be a whole number of 1 or more, got '64'"),
]


@pytest.mark.parametrize(("attributes", "sentence"), WRONG, ids=[str(wrong) for wrong, _ in WRONG])
async def test_an_impossible_value_of_a_setting_is_refused_with_a_sentence(attributes, sentence):
    with pytest.raises(ConfigError) as refused:
        await with_settings(**attributes).run_context.check()
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("attributes", "hint"),
    [
        (dict(batchnorm="recalibrated"), "use batchnorm='averaged' or 'local'"),
        (dict(batchnorm="recalibrated", secure_aggregation=True), "use batchnorm='averaged'"),
        (dict(batchnorm="recalibrated", update_clip=1.0, noise_multiplier=1.0), "use batchnorm='averaged'"),
        (
            dict(class_weight={0: 2.0}, secure_aggregation=True),
            "leave out class_weight, and set w_train in load_dataset",
        ),
        (
            dict(class_weight={0: 2.0}, update_clip=1.0, noise_multiplier=1.0, privacy_unit="sample"),
            "leave out class_weight",
        ),
    ],
)
async def test_hint_for_private_data_names_only_what_its_other_settings_allow(attributes, hint):
    with pytest.raises(ConfigError) as refused:
        await with_settings(private=True, **attributes).run_context.check()
    assert refused.value.hint == hint


def test_takeover_without_checkpoints_and_workers_to_take_over_is_refused(tmp_path):
    run = FakeRun(FakeCluster(2), takeover=True)
    with pytest.raises(ConfigError, match="takeover=True has no effect without a folder for checkpoints"):
        check(run, "sync")
    run.cluster.takeover = True
    check(run, "sync")
    check(FakeRun(FakeCluster(2), takeover=True, checkpoint=tmp_path), "sync")


@pytest.mark.parametrize("settings", [{"replicas": 1}, {"softsync": 3}])
def test_replicas_that_the_slots_of_the_cluster_rule_out_are_refused_before_the_start(settings):
    app = with_settings(mode="downpour", **settings)
    check(app, "downpour")  # the number of slots is not known
    app.cluster = FakeCluster(2)
    with pytest.raises(ConfigError, match=r"replicas=1 are fewer than the 2 slots|softsync must be from 1 to the 2"):
        check(app, "downpour")


RIGHT = [
    dict(slots=3),
    dict(slots=np.int64(3)),
    dict(evaluate_every=2, checkpoint=Path("nowhere"), resume="auto", wait_for_workers_s=0, verbose=0),
    dict(callbacks=[], outer="nesterov", optimizer_state="fresh", balance="speed", merge="trimmed:0.1"),
    dict(partition="equal", balance="speed"),
    dict(outer=Subtract(learning_rate=0.5), codec="topk:0.1", weights_codec="delta:int8"),
    dict(mode="async", evaluate_every=3, outer=Nesterov(), update_policy="clip", slots=2, seed=np.uint32(7)),
]


@pytest.mark.parametrize("attributes", RIGHT, ids=str)
async def test_usable_settings_pass(attributes):
    await with_settings(**attributes).run_context.check()


@pytest.mark.parametrize("attributes", [dict(merge="median"), dict(batchnorm="local")], ids=str)
async def test_asynchronous_training_refuses_settings_without_effect(attributes):
    check(with_settings(**attributes), "sync")
    name = next(iter(attributes))
    with pytest.raises(ConfigError, match=f"{name}='.*' is for synchronous training: .*; leave {name} at '.*', or"):
        check(with_settings(**attributes), "async")


@pytest.mark.parametrize(
    "attributes",
    [
        *(dict(worker_epochs=2), dict(worker_steps=2), dict(optimizer_state="fresh"), dict(balance="speed")),
        *(dict(outer="nesterov"), dict(worker_callbacks=["one"]), dict(precision="mixed_float16")),
    ],
    ids=str,
)
async def test_gradient_exchange_refuses_settings_without_effect(attributes):
    check(with_settings(**attributes), "sync")
    (name,) = attributes
    with pytest.raises(ConfigError, match=rf"{name}=.* with exchange='gradient' .*; .* exchange='star'"):
        check(with_settings(exchange="gradient", **attributes), "sync")


def test_gradient_exchange_has_one_step_rounds_and_no_own_train():
    class Own(Plain):
        def train(self, weights, worker_epochs, batch_size): ...

    assert check(with_settings(exchange="gradient"), "sync").local.steps == 1
    with pytest.raises(ConfigError, match="exchange='gradient' is for synchronous training"):
        check(with_settings(exchange="gradient"), "async")
    custom = Own()
    custom.exchange = "gradient"
    with pytest.raises(AppError, match=r"Own\.train is local training: with exchange='gradient' there is none"):
        check(custom, "sync")


def test_every_setting_is_checked():
    assert set(SETTINGS) == {name for wrong, _ in WRONG for name in wrong} | {"master_epochs", "worker_epochs"}


def test_integers_of_numpy_are_accepted():
    spec = check(with_settings(batch_size=np.int32(8), seed=np.int64(3)), "sync", None, np.int16(4), None, None)
    numbers = flat(spec)
    assert numbers["batch_size"] == 8
    assert all(type(numbers[name]) is int for name in ("master_epochs", "worker_epochs", "batch_size", "seed"))


def test_a_rule_may_be_text_or_an_object():
    def outer_of(setting):
        return check(with_settings(outer=setting), "sync").outer

    assert outer_of("nesterov:momentum=0.5") == outer_of(Nesterov(momentum=0.5)) == Nesterov(momentum=0.5)
    assert outer_of(None) == outer_of("subtract") == Subtract()
    assert check(with_settings(merge=TrimmedMean(beta=0.1)), "sync").train.merge == TrimmedMean(beta=0.1)
    assert str(outer_of(Nesterov(learning_rate=1))) == str(outer_of("nesterov:1"))  # checkpoints store the text


# --- Each mode uses these settings or refuses them

OTHERS = {
    "master_epochs": 2,
    "worker_epochs": 2,
    "worker_steps": 1,
    "local_rule": "fedprox:0.5",
    "batch_size": 8,
    "seed": 1,
    "slots": 3,
    "balance": "speed",
    "optimizer_state": "fresh",
    "codec": "int8",
    "weights_codec": "float16",
    "merge": "median",
    "arrival": "fedasync",
    "update_policy": "stop",
    "outer": "nesterov",
    "evaluate_every": 1,
    "checkpoint": "elsewhere",
    "checkpoint_every": 3,
    "checkpoint_keep": 1,
    "resume": "before",
    "takeover": True,
    "verbose": True,
}


class Poisoned(FakeWorker):
    """Each worker is slower than the one before it. The fourth update of the first worker is NaN."""

    def train(self, task):
        reply = super().train(task)
        if len(self.asked) == 4 and self.id == 1:
            reply.update["payloads"][1]["raw"][:] = np.nan
        return dataclasses.replace(reply, compute_s=0.001 * self.id)


async def outcome(mode, folder, **settings):
    """Return everything that a run with these settings shows to its caller."""
    folders = {name: folder / settings[name] for name in ("checkpoint", "resume") if name in settings}
    cluster, options, output = FakeCluster(), [], io.StringIO()
    before = FakeRun(cluster, mode=mode, update_policy="clip", checkpoint=folder / "before", master_epochs=1)
    cluster.workers = [
        Poisoned(number) for number in ((1, 2) if mode == "sync" else (1,))
    ]  # the order of updates is known with one worker
    await before.train_model()
    app = FakeRun(
        cluster, mode=mode, **{"checkpoint": folder / "there", "update_policy": "clip", **settings, **folders}
    )
    app.x_test, app.y_test = np.zeros((1, 1)), np.zeros((1, 1))
    opened = CheckpointFolder.open

    def spied(self, *arguments, **more):
        options.append(more)
        return opened(self, *arguments, **more)

    with (
        mock.patch.object(CheckpointFolder, "open", spied),
        mock.patch.object(reporter, "evaluate", return_value={"loss": 0.0}) as evaluate,
        contextlib.redirect_stdout(output),
    ):
        try:
            await app.train_model()
        except BadUpdate as bad:
            return str(bad)
    tasks = [task for worker in cluster.workers for name, task, *_ in worker.asked if name == "train"]
    tasks_of_slots = [(task.slot, task.epochs, task.batch_size, len(task.indices)) for task in tasks]
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("round-*"))
    bits = [array.tobytes() for array in app.model.get_weights()]
    return bits, tasks_of_slots, files, len(app.history), options, evaluate.call_count, bool(output.getvalue())


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_each_mode_uses_each_setting_or_refuses_it_by_name(mode, tmp_path):
    has_effect = {}
    with mock.patch("os.fsync"):
        usual = await outcome(mode, tmp_path / "usual")
        assert await outcome(mode, tmp_path / "again") == usual
        for name, value in OTHERS.items():
            try:
                has_effect[name] = await outcome(mode, tmp_path / f"with {name}", **{name: value}) != usual
            except ConfigError as refused:
                has_effect[name] = str(refused).startswith(f"{name}=")
    assert [name for name in has_effect if not has_effect[name]] == [], "ignored"
