"""A run of workers as one peer: bits, merges, ends and losses, with a real server and light peers.

The workers are in this process. ``test_cluster_processes.py`` has workers, a server and masters that are killed.
"""

import numpy as np
import pytest

from ddlf.algorithms.weights import digest
from ddlf.events import SetPosted
from ddlf.extras import provided
from ddlf.peers.plan import Plan
from ddlf.peers.server import Model, PeerServer
from ddlf.peers.sets import layout_of
from ddlf.testing import in_process_cluster
from tests.peers.test_server import Running
from tests.training.models import Blobs


def named_model():
    """The model of the blobs, with layers whose names do not depend on earlier models of the process."""
    import keras

    layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh", name="first")]
    model = keras.Sequential([*layers, keras.layers.Dense(4, "softmax", name="last")])
    model.compile(keras.optimizers.SGD(0.05), "categorical_crossentropy", metrics=["accuracy"])
    return model


class Serving(Running):
    """A server with the model of the blobs, whose first weights come from a seed."""

    def __init__(self, folder, **plan):
        import keras

        keras.utils.set_random_seed(5)
        self.variables = provided("named_weights", "a test")(named_model())
        named = {name: np.asarray(one) for name, one in self.variables.items()}
        self.layout, self.first = layout_of(named), list(named.values())
        model = Model(
            text="blobs", layout=self.layout, first=self.layout.encode(self.first), trainable=(True,) * len(named)
        )
        self.folder, self.lines, self.peers = folder, [], []
        plan = Plan(**({"validate_s": 0.0, "merge": "average", "updates": 2} | plan))
        self.server = PeerServer(folder, model, plan, say=self.lines.append, control="secret")
        self.server.recover()

    async def link(self):
        [code] = await self.server.invite()
        return f"http://127.0.0.1:{self.port}/#{code}"


class App(Blobs):
    """Its model begins with the first weights of a server."""

    slots, worker_steps = 2, 2
    first = None

    async def create_model(self):
        self.model = named_model()
        if self.first is not None:
            self.model.set_weights(self.first)


@pytest.fixture
async def cluster():
    async with in_process_cluster(2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("DDLF_STATE_DIR", str(tmp_path / "state"))


async def trained(cluster, first, **settings):
    app = App(cluster)
    app.told = []
    app.subscribe(app.told.append)
    vars(app).update(first=first, **settings)
    await app.train_model()
    return app


WAYS = [
    {"mode": "sync"},
    {"mode": "sync", "exchange": "sharded", "outer": "nesterov"},
    {"mode": "async"},
    {"mode": "sync", "exchange": "gradient", "worker_steps": None},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
async def test_peer_that_is_alone_has_the_bits_of_a_run_without_peers(way, cluster, tmp_path):
    async with Serving(tmp_path) as serving:
        alone = await trained(cluster, serving.first, **way)
        peer = await trained(cluster, serving.first, peer=await serving.link(), **way)
        assert serving.server.ledger.counts["posts"] == len([e for e in peer.told if isinstance(e, SetPosted)]) > 2
        if way["mode"] == "sync":
            assert digest(peer.model.get_weights()) == digest(alone.model.get_weights())
        assert len(peer.history) == len(alone.history)
