"""Tests of epsilon with private workers: each record has it, a resumed run continues it, and a budget ends the run in time."""

import shutil

import pytest

from ddlf.errors import BudgetSpent, CheckpointMismatch
from ddlf.privacy.accountant import Noise, epsilon
from ddlf.testing import in_process_cluster
from ddlf.training.checkpoints.releases import RELEASES
from tests.training.models import Quick
from tests.training.private_apps import Private


class Counted(Private):
    """An app whose noise has the norm of the clipped updates."""

    train = Quick.train

    master_epochs = 3
    update_clip = 0.1
    noise_multiplier = 1.0


def epsilon_after(releases):
    """Return epsilon after a number of releases with a noise multiplier of 1."""
    return pytest.approx(epsilon({Noise(multiplier=1.0): releases}, 1e-5), abs=1e-3)


@pytest.mark.slow
async def test_budget_ends_a_run_with_the_last_release_that_fits(tmp_path):
    async with in_process_cluster(3) as cluster:
        app = Counted(cluster)
        app.checkpoint, app.privacy_budget = tmp_path / "kept", 7.5
        history = await app.train_sync()
        assert [record.epsilons for record in history] == [dict.fromkeys("123", epsilon_after(n)) for n in (1, 2)]
        assert [record.metrics for record in history] == [{"epsilon": epsilon_after(n)} for n in (1, 2)]
        assert "above the privacy budget of 7.5" in history.ended

        app = Counted(cluster)
        app.resume, app.privacy_budget = tmp_path / "kept", 7.5
        with pytest.raises(BudgetSpent, match=r"above the privacy budget of 7\.5"):
            await app.train_sync()
        app = Counted(cluster)
        app.resume, app.privacy_budget, app.checkpoint = tmp_path / "kept", 9.0, tmp_path / "further"
        assert [record.epsilons["1"] for record in await app.train_sync()] == [epsilon_after(3)]
        app = Counted(cluster)
        app.resume, app.master_epochs = tmp_path / "kept", 4
        history = await app.train_sync()
        assert [record.epsilons["1"] for record in history] == [epsilon_after(3), epsilon_after(4)]

        shutil.copytree(tmp_path / "kept", tmp_path / "copy")
        (tmp_path / "copy" / RELEASES).unlink()
        app = Counted(cluster)
        app.resume, app.master_epochs = tmp_path / "copy", 5
        with pytest.raises(CheckpointMismatch, match="is missing, so the earlier releases"):
            await app.train_sync()
