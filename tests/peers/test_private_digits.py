"""Tests of the app and the texts in the first steps of the docs, in the way that ``ddlf peers serve`` reads them."""

import asyncio
import re
from pathlib import Path

import numpy as np

import ddlf
from ddlf.cli.target import find_target
from ddlf.peers.joining import peer_of_app, peer_of_data
from ddlf.peers.model import arrays_of, settled_text
from ddlf.peers.plan import Offer, Plan
from ddlf.peers.serving import read_model
from tests.peers.test_server import Running

ROOT = Path(__file__).parents[2]
APP = ROOT / "apps/private_digits.py"


def test_the_app_of_private_digits_can_be_served():
    served = read_model(APP, "digits", find_target, 0)
    assert sum(weight.size for weight in served.model.layout.decode(served.model.first)) == 2410
    assert served.can_test
    assert served.unused == ()
    assert served.batch_size == find_target(APP).batch_size == 16
    assert not served.other_scale


def test_a_training_step_of_the_app_is_named_since_peers_do_not_run_it():
    """The app also has a ``create_model`` that is not a coroutine."""
    assert read_model(ROOT / "apps/custom_loop.py", None, find_target, 0).unused == ("CustomLoop.train",)


def test_a_peer_of_an_app_with_plain_methods_loads_its_data():
    peer = peer_of_app("http://127.0.0.1:1/#code", find_target(ROOT / "apps/custom_loop.py"))
    assert peer._make(None).samples == 1437


async def test_held_out_samples_do_not_count_in_the_weight_of_a_peer(tmp_path, monkeypatch):
    """Every fifth sample of ``x`` and ``y`` is held out, like in a browser. With a test part, all other data is used for training."""
    monkeypatch.setenv("DDLF_STATE_DIR", str(tmp_path / "state"))
    (x, y), _ = ddlf.load_digits()
    x, y = x[:50] + 0.5, y[:50].argmax(1)
    parts = {"x_train": x[:50], "y_train": y[:50], "x_test": x[:5], "y_test": y[:5]}
    served = read_model(ROOT / "apps/models/private_digits.nnm", None, find_target, 0)
    (tmp_path / "run").mkdir()
    async with Running(tmp_path / "run", model=served.model) as running:
        for data, lines in (({"x": x, "y": y}, []), (parts, [])):
            [code] = await running.server.invite()
            peer = peer_of_data(f"http://127.0.0.1:{running.port}/#{code}", data, say=lines.append)
            await asyncio.to_thread(peer.run, most_updates=1)
            assert any(f"{peer.trained.samples} samples stay here" in line for line in lines)
        assert [member.samples for member in running.server.ledger.members.values()] == [40, 50]


def test_test_pictures_of_another_scale_than_those_of_browsers_are_named(tmp_path):
    (x, y), _ = ddlf.load_digits()
    np.savez(tmp_path / "test.npz", x=x, y=y.argmax(1))
    served = read_model(ROOT / "apps/models/private_digits.nnm", str(tmp_path / "test.npz"), find_target, 0)
    assert served.other_scale == "the test data go from -0.5 to 0.5; browsers make pictures 0 to 1"


def test_a_peer_with_pictures_of_another_scale_gets_a_message():
    text = settled_text((ROOT / "apps/models/private_digits.nnm").read_text(), "digits.nnm", None).text
    offer = Offer(plan=Plan(), model=text, layout="")
    (x, y), _ = ddlf.load_digits()
    for factor, scale in (
        (1, []),
        (255, ["your data go from 0 to 255; browsers make pictures 0 to 1, and all peers should agree"]),
    ):
        lines = []
        data = {"x": (x + 0.5) * factor, "y": y}
        peer_of_data("http://127.0.0.1:1/#code", data, say=lines.append)._make(offer)
        assert [line.removeprefix("scale     ") for line in lines if line.startswith("scale")] == scale


async def test_the_app_and_built_in_pictures_have_values_from_0_to_1_like_in_a_browser():
    app = find_target(APP)()
    await app.load_dataset()
    for x in (app.x_train, app.x_test, arrays_of("digits")["x_train"], arrays_of("digits")["x_test"]):
        assert (x.min(), x.max(), x.dtype) == (0, 1, np.float32)


def test_the_first_text_of_the_docs_needs_no_data_and_trains_in_browsers(tmp_path):
    [text] = re.findall(r"```text\n(digits:.*?)```", (ROOT / "docs/howto/peers.md").read_text(), re.DOTALL)
    (tmp_path / "digits.nnm").write_text(text)
    for path in (tmp_path / "digits.nnm", ROOT / "apps/models/private_digits.nnm"):
        served = read_model(path, None, find_target, 0)
        assert served.model.browser.refusal == ""
        ships = path.parent != tmp_path
        assert (served.batch_size, served.unused) == ((16, ("train:data", "train:master_epochs")) if ships else (0, ()))
        assert sum(weight.size for weight in served.model.layout.decode(served.model.first)) == 2410
