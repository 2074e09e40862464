"""Tests of the refusals of ``ddlf peers`` before a server or a training starts."""

import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ddlf.cli.main import main
from ddlf.cli.options import add_options
from ddlf.cli.parsing import Parser
from ddlf.cli.run import resumed_from
from ddlf.errors import ConfigError, ConnectError
from ddlf.peers import joining, running_server
from ddlf.peers.running_server import ListedPeer, Overview, RunningServer

A_LINK = "http://127.0.0.1:1/#code"
SAMPLE = ("--privacy-unit", "sample")


def refused(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main(["peers", *map(str, words)])
    assert ended.value.code
    return capsys.readouterr().err


def test_commands_without_a_server_say_how_to_start_one(capsys):
    for words in (("list",), ("invite",), ("kick", "1"), ("merge",), ("stop",)):
        assert "ddlf peers serve MODEL" in refused(capsys, *words)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("serve",), "name a model"),
        (("serve", "a.nnm", "--resume", "last"), "a.nnm and --resume last cannot be served together"),
        (("serve", "--resume", "last", "--merge", "average"), "--merge cannot change"),
        (("serve", "a.nnm", "--shards", 3), "the server's own data, and there are none"),
        (("serve", "a.nnm", "--data", "digits", "--shards", 0), "--shards: must be 1 or more, got 0"),
        (("serve", "a.nnm", "--data", "digits", "--partition", "power:1"), "--partition has no effect"),
        (("serve", "--resume", "last", "--data", "digits", "--shards", 3), "--shards cannot change"),
        (
            ("serve", "a.nnm", "--end", "150%"),
            "an accuracy below 1, such as 0.97 or 97%, or seconds, such as 600; got '150%'",
        ),
        (
            ("serve", "a.nnm", "--end", "1.5x"),
            "an accuracy below 1, such as 0.97 or 97%, or seconds, such as 600; got '1.5x'",
        ),
        (("serve", "a.nnm", "--end", "97%"), "there is no file a.nnm"),
        (("serve", "a.nnm", "--updates", "ten"), "--updates: not a whole number: 'ten'"),
        (("serve", "a.nnm", "--seconds", "-1"), "--seconds: seconds, such as 1.5; got '-1'"),
        (("serve", "a.nnm", "--port", "99999"), "--port: must be 0-65535, got 99999"),
        (("serve", "a.nnm", "--invite", "-1"), "--invite: must be 0-100, got -1"),
        (("kick", "bob"), "the number of a peer, as `ddlf peers list` shows it; got 'bob'"),
        (
            ("serve", "a.nnm", "--way", "rounds", "--merge", "krum:bad=1"),
            "the merge krum:bad=1 needs 5 posts in a round, and a round closes with 1; add --quorum 5",
        ),
        (("serve", "a.nnm", "--merge", "trimmed:0.2"), "the merge trimmed works with --way rounds"),
        (("serve", "a.nnm", "--way", "rounds", "--merge", "elastic"), "the merge elastic works with --way swap"),
        (("serve", "a.nnm", "--noise", "0"), "--noise: a finite number above 0, such as 1.5; got '0'"),
        (("serve", "a.nnm", "--noise", "-1"), "--noise: a finite number above 0"),
        (("serve", "a.nnm", "--clip", "nan"), "--clip: a finite number above 0"),
        (("serve", "a.nnm", "--clip", "1"), "a clip without noise cannot work: a clipped update tells"),
        (("serve", "a.nnm", "--clip", "1", "--noise", "1"), "noise in swaps cannot work: a peer gets the set of one"),
        (("join", "http://127.0.0.1:1/#code", "--data", "a.npz", "--app", "a.py"), "--data"),
        (("join", "http://127.0.0.1:1/#code.c0ffee", "--data", "digits"), "the link is not whole: 64 letters"),
        (("join", "http://127.0.0.1:1/#code", "--data", "digits"), "if its training is over, it has ended"),
        (("join", "nonsense", "--data", "digits"), "is not a link"),
        (("join", A_LINK, "--data", "digits", "--clip", "1"), "--clip of a peer needs --privacy-unit sample"),
        (("join", A_LINK, "--data", "digits", *SAMPLE), "--privacy-unit sample needs --clip and --noise"),
        (("join", A_LINK, *SAMPLE, "--clip", "1", "--noise", "1"), "hides your samples, and a shard is the server's"),
        (
            ("join", A_LINK, "--data", "digits", *SAMPLE, "--clip", "1", "--noise", "1", "--seed", "1"),
            "--seed has no effect with --privacy-unit sample",
        ),
        (("serve", "digits.nnm", *SAMPLE), "a browser cannot hide single samples, and a Python peer does it by itself"),
        (("join", "http://127.0.0.1:1/", "--data", "digits"), "no code behind its #"),
        (("join", "ftp://127.0.0.1:1/#code", "--data", "digits"), "is not a link"),
        (("join", "http://127.0.0.1:1/#code", "--data", "no.npz"), "neither a file nor a data set"),
        (
            ("join", A_LINK, "--data", "digits", "--save", "/nowhere/a.keras"),
            "the folder of '/nowhere/a.keras' does not",
        ),
        (("join", A_LINK, "--data", "digits", "--save", "a.h5"), "a model is saved as a .keras"),
        (("serve", "a.nnm", "--seed", 2**32), "--seed: must be 0-4294967295, got 4294967296"),
    ],
)
def test_impossible_options_are_refused_in_one_sentence(capsys, words, sentence):
    assert sentence in refused(capsys, *words)


NAMED = "a:input shape=[4];\na:output shape=[2];\na:layers {};\na:loss {};\n"
TEXTS = {
    "no loss": (NAMED.format("Dense(units=2)", "MSE").rpartition("a:loss")[0], "has no loss for its output 'a'; write"),
    "Lambda": (NAMED.format("Lambda(function=2), Dense(units=2)", "MSE"), "a.nnm:3:10: Lambda is not allowed"),
    "own layer": (NAMED.format("Twice(), Dense(units=2)", "MSE"), "a.nnm:3:10: Keras has no layer 'Twice'"),
    "own loss": (NAMED.format("Dense(units=2)", "my_loss"), "a.nnm:4:8: there is no loss 'my_loss'"),
    "patience": (
        NAMED.format("Dense(units=2)", "MSE") + "train:patience 3;\n",
        "has no effect without validation data",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), TEXTS.values(), ids=TEXTS)
def test_a_text_that_peers_cannot_train_is_refused_before_keras_is_imported(
    capsys, tmp_path, monkeypatch, text, sentence
):
    monkeypatch.setitem(sys.modules, "keras", None)  # so that an import of Keras fails
    monkeypatch.chdir(tmp_path)
    Path("a.nnm").write_text(text)
    output = refused(capsys, "serve", "a.nnm", "--port", 0)
    assert sentence in output
    assert output.startswith("error  ")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--shards", 3000), "1,437 training samples cannot be divided into 3,000 shards; --shards 1437 at most"),
        (("--classes", "cat,dog"), "there are 2 names of classes, and the model has 10 outputs"),
    ],
)
def test_shards_and_classes_that_do_not_fit_are_refused_before_keras_is_imported(
    capsys, tmp_path, monkeypatch, words, sentence
):
    monkeypatch.setitem(sys.modules, "keras", None)
    text = "a:input shape=[64];\na:output shape=[10];\na:layers Dense(units=10);\na:loss SCE;\n"
    (tmp_path / "a.nnm").write_text(text)
    assert sentence in refused(capsys, "serve", tmp_path / "a.nnm", "--data", "digits", "--port", 0, *words)


def test_options_of_a_named_training_belong_into_its_settings(capsys):
    for option, name in (("--end", "end"), ("--batch-size", "batch_size")):
        output = refused(capsys, "train", "digits", option, 30)
        assert f"unknown option {option}: it is a setting of the training: write {name} into settings.json" in output


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("async def main(cluster): ...", "has main(), and no app; name a file with a subclass of ddlf.IApp"),
        ("import asyncio\nasync def work(): ...\nasyncio.run(work())", "runs by itself when it is imported"),
        ("x = 1", "has nothing to run"),
        (
            "import ddlf\nclass A(ddlf.IApp): ...\nclass B(ddlf.IApp): ...",
            "has several apps: A, B; end the file with ddlf.main(A), or name a file with one app",
        ),
    ],
)
@pytest.mark.parametrize("words", [("serve",), ("join", "http://127.0.0.1:1/#code", "--app")], ids=" ".join)
def test_a_file_without_an_app_is_refused_before_keras_is_imported(
    capsys, tmp_path, monkeypatch, words, code, sentence
):
    monkeypatch.setitem(sys.modules, "keras", None)
    (tmp_path / "plain.py").write_text(code)
    assert sentence in refused(capsys, *words, tmp_path / "plain.py")


@pytest.mark.parametrize("more", [("--data", "digits"), ()], ids=["data", "shard"])
def test_a_bad_link_is_refused_before_keras_is_imported(capsys, monkeypatch, more):
    monkeypatch.setitem(sys.modules, "keras", None)
    for link, sentence in (("nonsense", "is not a link"), ("http://127.0.0.1:1/", "no code behind its #")):
        assert sentence in refused(capsys, "join", link, *more)


def test_one_sample_is_refused_before_the_link_is_used(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "keras", None)
    np.savez(tmp_path / "one.npz", x=np.zeros((1, 64)), y=np.zeros(1))
    assert "has one sample" in refused(capsys, "join", "http://127.0.0.1:1/#code", "--data", tmp_path / "one.npz")


def test_a_peer_saves_its_model_also_if_the_server_is_gone(capsys, tmp_path, monkeypatch):
    class Model:
        def save(self, path):
            Path(path).write_text("trained")

    class Alone:
        updates, leave = 3, None
        trained = SimpleNamespace(model=Model())

        def run(self, most_updates):
            raise ConnectError("the server does not answer")

    monkeypatch.setattr(joining, "peer_of_data", lambda *_, **__: Alone())
    path = tmp_path / "mine.keras"
    assert "the server does not answer" in refused(capsys, "join", A_LINK, "--data", "digits", "--save", path)
    assert path.read_text() == "trained"
    path.unlink()
    Alone.updates = 0  # it was refused before it trained
    refused(capsys, "join", A_LINK, "--data", "digits", "--save", path)
    assert not path.exists()


def test_the_list_has_no_gap_for_a_peer_without_a_name(capsys, monkeypatch):
    peers = (
        ListedPeer(peer=1, samples=1, posts=2, connected=True, present=True),
        ListedPeer(peer=2, name="b", samples=9, posts=1, connected=True, present=True, strikes=2, out_s=43.2),
    )
    overview = Overview(run="run", way="swap", codec="float32", set_bytes=1, missing_posts=2, peers=peers)
    server = RunningServer(
        origin="http://127.0.0.1:1", pin="", control="", pid=1, folder=".", address="127.0.0.1", port=1
    )
    monkeypatch.setattr(running_server, "running_servers", lambda: [server])
    monkeypatch.setattr(RunningServer, "overview", lambda _: overview)
    with pytest.raises(SystemExit) as ended:
        main(["peers", "list"])
    assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3:] == [
        "the round needs 2 more posts, and all peers that are here have posted or were rejected",
        "peer 1  here, 1 sample, 2 posts",
        "peer 2  b  here, out for 43 s, 2 strikes, 9 samples, 1 post",
    ]


def test_a_run_of_the_other_kind_is_refused_with_the_command_that_continues_it(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DDLF_RUN_DIR", "runs")
    for name, file in (("20260101-000000-peers-a", "plan.json"), ("20260102-000000-App", "summary.json")):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        for file_name in ("state.json", file):
            (folder / file_name).write_text("{}")
    output = refused(capsys, "serve", "--resume", "App")
    assert "runs/20260102-000000-App is a run without peers; continue it with: ddlf run APP --resume runs/" in output
    add_options(parser := Parser())
    for name in ("peers-a", "runs/20260101-000000-peers-a"):
        with pytest.raises(ConfigError, match=f"by peers; continue it with: ddlf peers serve --resume {name}"):
            resumed_from(parser.parse_args(["--resume", name]))
    (tmp_path / "runs/20260101-000000-peers-a/plan.json").unlink()
    assert "no run in 'runs' has peers; start one with" in refused(capsys, "serve", "--resume", "last")


def test_a_run_without_a_journal_or_a_plan_is_refused(capsys, tmp_path):
    """A server that began again in this folder would replace the training without a word."""
    run = tmp_path / "20260101-000000-peers-a"
    run.mkdir()
    (run / "state.json").write_text("{}")
    (run / "plan.json").write_text('{"plan": {}}')
    assert f"{run} has no journal, so there is nothing to continue" in refused(capsys, "serve", "--resume", run)
    (run / "journal-000001").touch()  # a file system without its last bytes
    assert f"{run} has no journal, so there is nothing to continue" in refused(capsys, "serve", "--resume", run)
    (run / "journal-000001").write_bytes(b"DPJ1")
    (run / "plan.json").write_text('{"plan"')
    assert f"{run / 'plan.json'} cannot be read; copy this file back" in refused(capsys, "serve", "--resume", run)


def test_options_of_rounds_are_refused_in_swaps(capsys, tmp_path):
    model = tmp_path / "a.nnm"
    model.write_text("a:input shape=[4];\na:output shape=[2];\na:layers Dense(units=2);\na:loss MSE;\n")
    output = refused(capsys, "serve", model, "--quorum", 2, "--out", tmp_path)
    assert "--quorum has no effect in swaps" in output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--merge", "nonsense"), "nonsense"),
        (("--updates", 0), "--updates: must be 1 or more, got 0"),
        (("--proxy", "http://peers.example"), "is not a URL with https"),
        (("--proxy", "https://peers.example/here"), "has a path, and links have none"),
        (("--host", "203.0.113.7"), "the address 203.0.113.7 cannot be used: Cannot assign requested address; name an"),
    ],
)
def test_serve_refuses_options_before_it_imports_keras(capsys, tmp_path, monkeypatch, words, sentence):
    monkeypatch.setattr("ddlf.peers.serving.read_model", lambda *_, **__: pytest.fail("it has built the model"))
    model = tmp_path / "a.nnm"
    model.write_text("a:input shape=[4];\n")
    assert sentence in refused(capsys, "serve", model, *words)


def test_serve_refuses_a_taken_port_and_a_missing_file(capsys, tmp_path):
    model = tmp_path / "a.nnm"
    model.write_text("a:input shape=[4];\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in refused(capsys, "serve", model, "--port", port)
    assert "there is no file" in refused(capsys, "serve", tmp_path / "no.nnm")
