"""``docs/howto/strategy.md``: its code, installed like a package, trains."""

import re
from pathlib import Path

import numpy as np
import pytest

from ddlf.errors import CheckpointMismatch, ConfigError
from ddlf.testing import FakeCluster, FakeRun, in_process_cluster
from ddlf.training import registry
from tests.training.models import Blobs

PAGE = (Path(__file__).parents[1] / "docs" / "howto" / "strategy.md").read_text()
RING, NARROW = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if code.startswith('"""'))
ENTRY = re.search(r'^ring = "(.*)"$', PAGE, re.MULTILINE)[1]


@pytest.fixture(autouse=True)
def installed(tmp_path_factory, monkeypatch):
    """A folder on the path with both modules and their entry points, as ``pip install`` leaves them."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "ring.py").write_text(RING)
    (folder / "narrow.py").write_text(NARROW)
    about = folder / "ring-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: ring\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        f"[ddlf.strategies]\nring = {ENTRY}\n[ddlf.exchanges]\nnarrow = narrow:Narrow\n"
    )
    monkeypatch.syspath_prepend(folder)
    for table in (registry.strategies, registry.exchanges):
        table.cache_clear()
    yield
    for table in (registry.strategies, registry.exchanges):
        table.cache_clear()


async def trained(mode="ring", **settings):
    run = FakeRun(FakeCluster(2), **{"slots": 3, "master_epochs": 3, **settings})
    run.mode = mode
    await run.train_model()
    return run


def state(run):
    return {name: [w.tobytes() for w in group] for name, group in run.run_context.progress.state.items()}


def test_the_strategy_of_the_page_has_at_most_sixty_lines_of_code():
    assert len([line for line in RING.splitlines() if line.strip()]) <= 60


async def test_slots_of_a_ring_keep_weights_of_their_own_and_the_model_is_their_mean():
    run = await trained()
    slots = list(run.run_context.progress.state.values())
    assert len(slots) == 3
    assert not np.array_equal(slots[0][0], slots[1][0])
    np.testing.assert_allclose(run.model.get_weights()[0], np.mean([slot[0] for slot in slots], axis=0), rtol=1e-6)
    assert run.ledger.is_exact(3)


async def test_settings_of_a_ring_can_be_in_the_text_of_the_mode():
    assert state(await trained(mode="ring:mixing=0.3")) == state(await trained(mixing=0.3))
    assert state(await trained()) != state(await trained(mixing=0.3))


async def test_a_resumed_ring_ends_with_the_same_bits_and_refuses_another_mixing(tmp_path):
    whole = await trained()
    await trained(master_epochs=1, checkpoint=tmp_path)
    resumed = await trained(checkpoint=tmp_path, resume="auto")
    assert state(resumed) == state(whole)
    with pytest.raises(CheckpointMismatch, match=r"mixing: 0\.5 in the checkpoint, 0\.3 now"):
        await trained(checkpoint=tmp_path, resume="auto", mixing=0.3, master_epochs=4)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"mode": "ring:mixing=2"}, "mixing must be from 0 to 1, got '2'"),
        ({"merge": "median"}, "merge='median' is for synchronous training"),
        ({"exchange": "sharded"}, "exchange='sharded' is for synchronous training"),
        ({"weights_codec": "delta:int8"}, "weights_codec='delta:' is not for ring training"),
    ],
)
async def test_a_ring_refuses_what_has_no_effect(settings, refused):
    with pytest.raises(ConfigError, match=re.escape(refused)):
        await trained(**settings)


async def test_the_exchange_of_the_page_sends_differences():
    sent = {}
    for exchange in ("narrow", "star"):
        run = await trained(mode="sync", exchange=exchange)
        sent[exchange] = [asked[1].weights["delta"] for asked in run.cluster.workers[0].asked if asked[0] == "train"]
    assert sent["narrow"][-1]
    assert not any(sent["star"])


async def test_a_ring_trains_a_keras_model_on_two_workers():
    async with in_process_cluster(2) as workers:
        app = Blobs(workers)
        app.mode = "ring:mixing=0.5"
        records = await app.train_model()
        assert records[-1].loss < records[0].loss
