"""Tests of errors of GPUs: full memory, and operations without equal bits. The faults are injected, as CPUs have none."""

import pytest

from ddlf.errors import AppError, OutOfMemory
from ddlf.rpc.messages import describe, rebuild
from ddlf.testing import FaultPlan, in_process_cluster
from ddlf.training.slot.card_errors import explained
from tests.training.models import Blobs, Quick, app


class Lacking(Blobs):
    """Its training step has an operation that TensorFlow cannot compute with equal bits."""

    text = "Determinism is not yet supported in GPU implementation of DenseBincount."

    def train(self, weights, worker_epochs, batch_size):
        import tensorflow as tf

        raise tf.errors.UnimplementedError(None, None, self.text)


class Evaluated(Quick):
    """The memory of its GPU is full when the master evaluates."""

    async def create_model(self):
        from ddlf.worker.frameworks import framework

        await super().create_model()

        def evaluate(*args, **options):
            raise framework().full_error()

        self.model.evaluate = evaluate


async def test_full_memory_names_the_batch_and_the_largest_that_fitted():
    async with in_process_cluster(2) as cluster:
        trained = app(cluster, batch_size=64, master_epochs=3)
        async with FaultPlan().fill_memory(worker=2, at_round=1, fits=20).on(trained):
            with pytest.raises(OutOfMemory) as caught:
                await trained.train_sync()
        assert caught.value.worker.startswith("worker 2")
        assert (caught.value.batch_size, caught.value.fitted) == (64, 16)
        assert caught.value.message == (
            "a batch of 64 samples does not fit into the memory of this machine; the largest batch that fitted has 16 samples"
        )
        assert caught.value.hint == "set batch_size=16 or use precision='mixed_bfloat16'"
        assert isinstance(caught.value, MemoryError)


async def test_largest_batch_of_earlier_rounds_is_named_without_a_search():
    async with in_process_cluster(1) as cluster:
        trained = app(cluster, batch_size=32, master_epochs=3)
        async with FaultPlan().fill_memory(worker=1, at_round=2, fits=20).on(trained):
            with pytest.raises(OutOfMemory) as caught:
                await trained.train_sync()
        assert (caught.value.batch_size, caught.value.fitted) == (32, 32)
        assert caught.value.message.endswith("does not fit into the memory of this machine, though it fitted before")
        assert caught.value.hint.startswith("see what else uses it with ddlf doctor or set a smaller batch_size or")


async def test_memory_that_holds_no_batch_is_reported():
    async with in_process_cluster(1) as cluster:
        trained = app(cluster, batch_size=4)
        async with FaultPlan().fill_memory(worker=1, at_round=1, fits=0).on(trained):
            with pytest.raises(
                OutOfMemory, match=r"a batch of 4 samples .*; set a smaller batch_size or use"
            ) as caught:
                await trained.train_sync()
        assert caught.value.fitted == 0


async def test_full_memory_of_an_evaluation_is_reported():
    async with in_process_cluster(1) as cluster:
        trained = app(cluster, Evaluated, master_epochs=1)
        await trained.train_sync()
        with pytest.raises(OutOfMemory, match=r"of 512 samples does not fit .* in an evaluation; use precision"):
            await trained.evaluate_model()


def test_error_of_full_memory_names_card_limit_and_peak(monkeypatch):
    from ddlf.worker.frameworks import TensorFlow, framework

    monkeypatch.setenv("DDLF_CARDS", '["0 (NVIDIA H100), at most 8.6 GB"]')
    monkeypatch.setenv("DDLF_GPU_MEMORY", str(8 * 2**30))
    monkeypatch.setattr(TensorFlow, "peak", lambda self: 8 * 10**9)
    with pytest.raises(OutOfMemory) as caught, explained(app(None), lambda: 256, lambda: 128):
        raise framework().full_error()
    assert caught.value.message == (
        "a batch of 256 samples does not fit into the memory of the card 0 (NVIDIA H100), at most 8.6 GB; arrays took 8.0 GB "
        "at most; the largest batch that fitted has 128 samples"
    )
    assert caught.value.hint == "set batch_size=128 or use precision='mixed_bfloat16' or raise --gpu-memory"
    caught.value.__traceback__ = None  # like an error from a worker, whose frames belong to DDLF
    arrived = rebuild(describe(caught.value), worker="worker 3")
    assert (arrived.batch_size, arrived.fitted, arrived.peak) == (256, 128, 8 * 10**9)
    assert arrived.card == "0 (NVIDIA H100), at most 8.6 GB"


async def test_op_without_equal_bits_is_named():
    async with in_process_cluster(1) as cluster:
        with pytest.raises(
            AppError, match="deterministic=True: TensorFlow cannot compute DenseBincount with equal bits in each run"
        ):
            await app(cluster, Lacking, deterministic=True).train_sync()
        with pytest.raises(AppError, match="a random op of TensorFlow has no seed; give it a seed"):
            await app(cluster, Lacking, deterministic=True, text="Random ops require a seed").train_sync()
        with pytest.raises(
            Exception, match="DenseBincount"
        ) as caught:  # without deterministic=True, the framework's own error is raised
            await app(cluster, Lacking).train_sync()
        assert not isinstance(caught.value, AppError)
