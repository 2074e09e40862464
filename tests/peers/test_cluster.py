"""Tests of a run of workers that is one peer: bits, merges, ends and losses, with a real server and light peers.

The workers are in this process. ``test_cluster_processes.py`` kills workers, a server and masters.
"""

import shutil

import numpy as np
import pytest

from ddlf.algorithms.weights import digest
from ddlf.errors import ConfigError
from ddlf.events import PeersTold, SetPosted, SetTaken
from ddlf.extras import provided
from ddlf.peers import ledger
from ddlf.peers.cluster import ClusterPeer, Posting
from ddlf.peers.plan import Plan
from ddlf.peers.served_model import Model
from ddlf.peers.server import PeerServer
from ddlf.peers.sets import layout_of
from ddlf.testing import in_process_cluster
from ddlf.training.context import travels
from tests.patience import PATIENCE_S
from tests.peers.test_server import Running
from tests.training.models import Blobs, Quick


def named_model():
    """Return the model of the blobs. The names of its layers do not depend on earlier models of the process."""
    import keras

    layers = [keras.Input((8,)), keras.layers.Dense(16, "tanh", name="first")]
    model = keras.Sequential([*layers, keras.layers.Dense(4, "softmax", name="last")])
    model.compile(keras.optimizers.SGD(0.05), "categorical_crossentropy", metrics=["accuracy"])
    return model


class Serving(Running):
    """A server with the model of the blobs. The first weights come from a seed."""

    def __init__(self, folder, **plan):
        import keras

        folder.mkdir(exist_ok=True)
        keras.utils.set_random_seed(5)
        self.variables = provided("named_weights", "a test")(named_model())
        named = {name: np.asarray(variable) for name, variable in self.variables.items()}
        self.layout, self.first = layout_of(named), list(named.values())
        model = Model(
            text="blobs", layout=self.layout, first=self.layout.encode(self.first), trainable=(True,) * len(named)
        )
        self.folder, self.lines, self.peers = folder, [], []
        plan = Plan(**({"validate_s": 0.0, "merge": "average", "updates": 2} | plan))
        self.server = PeerServer(folder, model, plan, say=self.lines.append, control="secret")
        self.server.recover()
        self.wire = self.server.wire

    async def __aexit__(self, *exc):
        members = self.server.ledger.members.values()
        if not exc[0]:  # the server waits for goodbyes that are not yet on the disk
            await self.until(lambda: self.server.ledger.over or not any(m.present for m in members if m.name == "App"))
        await super().__aexit__(*exc)

    async def link(self):
        [code] = await self.server.invite()
        return f"http://127.0.0.1:{self.port}/#{code}"


class App(Quick):
    """An app with a model that begins with the first weights of a server."""

    slots, worker_steps = 2, 2
    first = None

    async def create_model(self):
        self.model = named_model()
        if self.first is not None:
            self.model.set_weights(self.first)


class Compiled(App):
    """The same app, with gradients of Keras."""

    train = Blobs.train


@pytest.fixture
async def cluster():
    async with in_process_cluster(2) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("DDLF_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture(autouse=True)
def leases_outlast_a_busy_machine(monkeypatch):
    """Lengthen the leases, because master, workers, server and peers share one process. ``test_coming_back.py`` tests leases."""
    monkeypatch.setattr(ledger, "LEASE_S", float(PATIENCE_S))


@pytest.fixture(autouse=True)
def answers_come_before_the_next_round(monkeypatch):
    """Wait for each answer before the next round, because ``Quick`` trains a round in a millisecond."""
    take = Posting._take

    def patient(self, timeout_s):
        take(self, PATIENCE_S if self._connection.waits else timeout_s)

    monkeypatch.setattr(Posting, "_take", patient)


async def trained(cluster, first, **settings):
    app = (Compiled if settings.get("exchange") == "gradient" else App)(cluster)
    app.emitted = []
    app.subscribe(app.emitted.append)
    vars(app).update(first=first, **settings)
    await app.train_model()
    return app


WAYS = [
    {"mode": "sync"},
    {"mode": "sync", "exchange": "sharded", "outer": "nesterov"},
    {"mode": "async"},
    {"mode": "sync", "exchange": "gradient", "worker_steps": None},
]


@pytest.mark.parametrize(
    "way",
    [*WAYS[1:3], *(pytest.param(way, marks=pytest.mark.slow) for way in (WAYS[0], WAYS[3]))],
    ids=lambda way: "-".join(map(str, way.values())),
)
async def test_single_peer_has_the_bits_of_a_run_without_peers(way, cluster, tmp_path):
    async with Serving(tmp_path) as serving:
        alone = await trained(cluster, serving.first, **way)
        peer = await trained(cluster, serving.first, peer=await serving.link(), **way)
        assert serving.server.ledger.counts["posts"] == len([e for e in peer.emitted if isinstance(e, SetPosted)]) > 2
        if way["mode"] == "sync":
            assert digest(peer.model.get_weights()) == digest(alone.model.get_weights())
        assert len(peer.history) == len(alone.history)


@pytest.mark.parametrize(
    ("way", "codec"),
    [(WAYS[0], "float16"), (WAYS[1], "float32"), (WAYS[2], "bfloat16")],
    ids=["sync-float16", "sharded-float32", "async-bfloat16"],
)
async def test_set_of_another_peer_is_merged_by_the_formula(way, codec, cluster, tmp_path, monkeypatch):
    # in asynchronous training, the number of earlier posts of each peer may vary
    merge, share = ("average", 1 / 2) if way["mode"] == "async" else ("weighted", 4 / 5)
    async with Serving(tmp_path, merge=merge, updates=3, codec=codec) as serving:
        other, other_weights = await serving.peer(), [np.full_like(array, 0.25) for array in serving.first]
        merges, exchanged = [], ClusterPeer.exchanged

        async def watched(self, weights):
            result = await exchanged(self, weights)
            if result is not weights:
                merges.append((self._progress.version, weights, result))
            return result

        monkeypatch.setattr(ClusterPeer, "exchanged", watched)
        after = {}

        async def keep(record):
            if record.version == 1:
                for _ in range(4):
                    await other.post(serving.wire.encode(other_weights))
            if merges and record.version == merges[0][0]:
                after["weights"] = app.model.get_weights()

        app = App(cluster)
        app.emitted = []
        app.subscribe(app.emitted.append)
        vars(app).update(first=serving.first, peer=await serving.link(), on_round=keep, **way)
        await app.train_model()
        event = next(event for event in app.emitted if isinstance(event, SetTaken))
        assert event.how == "merge"
        version, own_weights, merged = merges[0]
        assert event.version == version
        # the set of this peer had 1 training, the set of the other peer 4
        for w, p, combined, stored in zip(own_weights, other_weights, merged, after["weights"], strict=True):
            np.testing.assert_allclose(combined, share * p + (1 - share) * w, rtol=0, atol=1e-6)
            np.testing.assert_array_equal(combined, stored)
        posts, takes = (sum(isinstance(event, kind) for event in app.emitted) for kind in (SetPosted, SetTaken))
        [left] = [event.why for event in app.emitted if isinstance(event, PeersTold) and event.what == "left"]
        assert f"after {posts} posts: {takes} set{'s' * (takes != 1)} of others merged" in left
        counts = serving.server.ledger.counts
        assert counts["contained"] >= 1
        assert counts.get("rejected", 0) == 0


async def test_end_of_the_training_ends_the_run_with_the_last_set(cluster, tmp_path):
    async with Serving(tmp_path, updates=1) as serving:

        async def stop(record):
            if record.round == 3:
                await serving.server._command("stop", "")

        app = await trained(cluster, serving.first, peer=await serving.link(), on_round=stop, master_epochs=40)
        assert app.run_context.progress.converged
        assert "stopped by ddlf peers stop" in app.run_context.progress.reason
        [over] = [event for event in app.emitted if isinstance(event, PeersTold) and event.what == "over"]
        assert "stopped by ddlf peers stop" in over.why
        last = serving.layout.decode(serving.server.sets.travelling[serving.server.ledger.base])
        assert digest(app.model.get_weights()) == digest([np.asarray(array) for array in last])
        assert len(app.history) < 40


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_run_with_fewer_commits_than_a_post_needs_emits_an_event(mode, cluster, tmp_path):
    async with Serving(tmp_path, updates=1000) as serving:
        app = await trained(cluster, serving.first, peer=await serving.link(), mode=mode, master_epochs=1)
        [rarely] = [event for event in app.emitted if isinstance(event, PeersTold) and event.what == "rarely"]
        assert f"posts after 1,000 commits, and this run has {len(app.history)}:" in rarely.why


async def test_rounds_of_peers_continue_from_the_base_of_the_server(cluster, tmp_path):
    async with Serving(tmp_path / "peers", way="rounds", merge="mean", updates=2) as serving:
        alone = await trained(cluster, serving.first)
        app = await trained(cluster, serving.first, peer=await serving.link())
        assert serving.server.ledger.round > 3
        assert {event.how for event in app.emitted if isinstance(event, SetTaken)} == {"replace"}
        for array, expected in zip(app.model.get_weights(), alone.model.get_weights(), strict=True):
            # base - (base - set) equals the set, except for rounding
            np.testing.assert_allclose(array, expected, rtol=0, atol=1e-5)


async def test_resumed_run_is_the_same_peer_and_has_the_same_bits(cluster, tmp_path):
    """Sets travel as bfloat16, but the weights of the run stay exact after the first set."""
    async with Serving(tmp_path / "peers", codec="bfloat16") as serving:
        first = serving.wire.decode(serving.wire.encode(serving.first))
        assert digest(first) != digest(serving.first)
        alone = await trained(cluster, first)
        link = await serving.link()

        def stop(record):
            if record.round == 5:
                app.stop_training()

        app = App(cluster)
        vars(app).update(first=serving.first, peer=link, checkpoint=str(tmp_path / "kept"), on_round=stop)
        await app.train_model()
        assert len(app.history) == 5
        posts = serving.server.ledger.members[1].number
        again = await trained(
            cluster, None, peer=link, checkpoint=str(tmp_path / "kept"), resume="auto", master_epochs=2
        )
        assert list(serving.server.ledger.members) == [1]
        assert serving.server.ledger.members[1].number > posts
        assert digest(again.model.get_weights()) == digest(alone.model.get_weights())


@pytest.mark.slow
async def test_run_that_is_resumed_in_rounds_begins_with_the_base_of_its_last_post(cluster, tmp_path):
    """The run ended before its last round closed. A post that begins with an older base counts in no round."""
    async with Serving(tmp_path / "peers", way="rounds", merge="mean", updates=2) as serving:
        alone = await trained(cluster, serving.first)
        options = {"peer": await serving.link(), "checkpoint": str(tmp_path / "kept")}

        def stop(record):
            if record.round == 5:
                first.stop_training()

        first = App(cluster)
        vars(first).update(first=serving.first, on_round=stop, **options)
        await first.train_model()
        again = await trained(cluster, None, resume="auto", master_epochs=2, **options)
        assert len(first.history) == 5
        assert len(again.history) == len(alone.history)
        assert "late" not in serving.server.ledger.counts
        for array, expected in zip(again.model.get_weights(), alone.model.get_weights(), strict=True):
            np.testing.assert_allclose(array, expected, rtol=0, atol=1e-5)


async def test_run_from_an_older_checkpoint_than_its_last_post_merges_the_set_of_the_server(cluster, tmp_path):
    async with Serving(tmp_path / "peers", updates=1) as serving:
        link = await serving.link()

        def fail(record):
            if record.round == 6:
                raise RuntimeError("the master fails")

        app = App(cluster)
        how = {"peer": link, "checkpoint": str(tmp_path / "kept"), "checkpoint_every": 4}
        vars(app).update(first=serving.first, on_round=fail, **how)
        with pytest.raises(RuntimeError, match="the master fails"):
            await app.train_model()
        for newer in sorted((tmp_path / "kept").glob("round-*"))[1:]:  # like after kill -9
            shutil.rmtree(newer)
        again = await trained(cluster, None, resume="auto", **how)
        [replaced] = [event for event in again.emitted if isinstance(event, PeersTold) and event.what == "replaced"]
        assert replaced.why.startswith("the run continues from set")
        assert list(serving.server.ledger.members) == [1]


async def test_record_of_a_run_and_its_workers_do_not_get_the_code(cluster, tmp_path):
    async with Serving(tmp_path / "peers") as serving:
        link = await serving.link()
        code = link.partition("#")[2]
        app = App(cluster)
        vars(app).update(first=serving.first, peer=link, out=str(tmp_path / "runs"), checkpoint=str(tmp_path / "kept"))
        assert "peer" not in travels(app)
        await app.train_model()
        files = [path for name in ("runs", "kept") for path in (tmp_path / name).rglob("*") if path.is_file()]
        assert files
        assert not any(code.encode() in path.read_bytes() for path in files)


REFUSED = [
    ({"mode": "downpour"}, "a run with mode='downpour' cannot be a peer"),
    ({"mode": "lbfgs"}, "a run with mode='lbfgs' cannot be a peer"),
    ({"exchange": "split"}, "a run with exchange='split' cannot be a peer"),
    ({"outer": "streaming:fragments=2"}, "peer has no effect with outer='streaming"),
    ({"batchnorm": "local"}, "peer has no effect on the weights that each slot keeps"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
async def test_runs_that_cannot_merge_sets_into_their_weights_are_refused(settings, sentence):
    app = App()
    app.worker_steps = None
    vars(app).update(peer="http://127.0.0.1:1/#code", **settings)
    with pytest.raises(ConfigError) as error:
        await app.run_context.check()
    assert sentence in str(error.value)
    assert "#code" not in str(error.value)


@pytest.mark.parametrize("link", ["http://127.0.0.1:1/", "ftp://x/#secret", 5])
async def test_bad_links_are_refused_without_showing_the_code(link):
    app = App()
    app.peer = link
    with pytest.raises(ConfigError) as error:
        await app.run_context.check()
    assert "secret" not in str(error.value)


async def test_other_models_are_refused(cluster, tmp_path):
    class Other(App):
        async def create_model(self):
            await Blobs.create_model(self)

    async with Serving(tmp_path) as serving:
        app = Other(cluster)
        app.peer = await serving.link()
        with pytest.raises(ConfigError, match="your model has other weights than the server's"):
            await app.train_model()
        assert serving.server.ledger.invitations  # the link is unused
