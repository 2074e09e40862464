"""Tests of a data set on the disks of several machines.

Each machine gets the files of one slot and some copies, and an interrupted transfer continues.
"""

import asyncio

import numpy as np
import pytest

from ddlf.algorithms.partition import equal_sizes
from ddlf.algorithms.reading_order import portions
from ddlf.data import spread
from ddlf.data.data_set import DataSet
from ddlf.data.export import damage
from ddlf.data.location import Folder
from ddlf.data.sources import open_source
from ddlf.data.split import sizes_of, split
from ddlf.errors import ConfigError, DatasetError
from ddlf.testing.fake_run import MadeUp

X, Y = np.random.default_rng(0).random((600, 5), np.float32), np.arange(600) % 7


class BrokenOff(Exception):
    """An error that ends a transfer."""


class Machine:
    """A worker that runs functions with its own folder, which replaces their argument."""

    def __init__(self, folder, fails_at=None):
        self.folder, self.fails_at, self.calls = folder, fails_at, []

    async def run_method(self, function, path, *arguments):
        await asyncio.sleep(0)
        self.calls.append(function.__name__)
        if self.fails_at is not None and len(self.calls) > self.fails_at:
            raise BrokenOff
        return function(str(self.folder), *arguments)


@pytest.fixture
def location(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    split(open_source(tmp_path / "a.npz"), Folder(tmp_path / "place"), sizes_of(600, 1, files=12))
    return Folder(tmp_path / "place")


def machines(tmp_path, count=4, **more):
    return [Machine(tmp_path / f"pc{number}", **more) for number in range(count)]


@pytest.mark.parametrize("sizes", [(50,) * 12, (31, 17, 40, 29, 28, 29, 29), (203,), (1,) * 30])
@pytest.mark.parametrize("hosts", [1, 3, 4])
@pytest.mark.parametrize("copies", [1, 2, 3])
def test_shares_cover_slots_and_have_wanted_copies(sizes, hosts, copies):
    manifest = MadeUp(sizes).manifest
    if copies > hosts:
        with pytest.raises(ConfigError, match=f"need {copies} machines"):
            spread.shares(manifest, hosts, copies)
        return
    shares = spread.shares(manifest, hosts, copies)
    assert all(sum(file in share for share in shares) >= copies for file in range(len(sizes)))
    for epoch in range(3):
        for shuffle in ("window:2", "none"):
            slots = portions(
                manifest.sizes, equal_sizes(manifest.samples, hosts), shuffle, seed=epoch, epoch=epoch, stays=True
            )
            for portion, share in zip(slots, shares, strict=True):
                assert set(portion.stretches(manifest.sizes)[:, 0].tolist()) <= set(share)


async def test_send_copies_each_file_once(location, tmp_path):
    targets, progress = machines(tmp_path), []
    assert await spread.send(location, targets, 2, lambda *facts: progress.append(facts)) == [6, 6, 6, 6]
    spread_data = DataSet(location.path)
    assert spread_data.manifest.hosts == 4
    assert spread_data.manifest.version == 2
    assert spread_data.manifest.identity == location.manifest(1).content
    assert all(spread_data.availability())
    for machine, share in zip(targets, spread.shares(spread_data.manifest, 4, 2), strict=True):
        local = DataSet(machine.folder)
        assert local.manifest == spread_data.manifest
        assert [number for number, is_here in enumerate(local.availability()) if is_here] == share
        assert all(np.array_equal(local.load(number)["x"], spread_data.load(number)["x"]) for number in share)
        missing = [str(error) for error in damage(Folder(machine.folder), local.manifest)]
        assert len(missing) == 6
    assert progress[-1][1] == progress[-1][2] == 2 * spread_data.manifest.nbytes
    assert await spread.send(location, targets, 2) == [0] * 4
    assert location.manifest().version == 2


async def test_send_continues_after_interruption_and_damage(location, tmp_path):
    with pytest.raises(BrokenOff):
        await spread.send(location, machines(tmp_path, fails_at=4), 1)
    assert not list(tmp_path.glob("pc*/manifest.json"))
    sent = len(list(tmp_path.glob("pc*/v0001/*.safetensors")))
    assert sent
    targets = machines(tmp_path)
    assert sum(await spread.send(location, targets, 1)) == 12 - sent
    path = next((targets[2].folder / "v0001").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert await spread.send(location, targets, 1) == [0, 0, 1, 0]


async def test_send_refuses_damaged_file(location, tmp_path):
    path = location.path / "v0001/00005.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(DatasetError, match=r"SHA-256 of .*00005\.safetensors is not that"):
        await spread.send(location, machines(tmp_path), 1)
    assert not list(tmp_path.glob("pc*/**/*00005*"))


def test_worker_gives_pieces_of_its_data_set_only(location, tmp_path):
    data, name = DataSet(location.path), location.manifest().files[3].name
    (location.path / "v0001" / "secret").write_bytes(b"!")
    content = np.concatenate([data.piece(name, 0, 100), data.piece(name, 100, 10**6)])
    assert content.tobytes() == (location.path / name).read_bytes()
    for other_name in ("v0001/secret", "../a.npz", str(tmp_path / "a.npz"), "manifest.json"):
        assert data.piece(other_name, 0, 10) is None
