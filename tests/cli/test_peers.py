"""``ddlf peers``: what is refused before anything starts."""

import socket

import pytest

from ddlf.cli.main import main


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
        (("serve", "a.nnm", "--resume", "last"), "name a model"),
        (("serve", "--resume", "last", "--merge", "average"), "--merge cannot change"),
        (("serve", "a.nnm", "--shards", 3), "the server's own data, and there are none"),
        (("serve", "a.nnm", "--data", "digits", "--shards", 0), "1 shard or more"),
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
        (("join", "http://127.0.0.1:1/#code", "--data", "a.npz", "--app", "a.py"), "--data"),
        (("join", "http://127.0.0.1:1/#code", "--data", "digits"), "if its training is over, it has ended"),
        (("join", "nonsense", "--data", "digits"), "is not a link"),
        (("join", "http://127.0.0.1:1/", "--data", "digits"), "no code behind its #"),
        (("join", "ftp://127.0.0.1:1/#code", "--data", "digits"), "is not a link"),
        (("join", "http://127.0.0.1:1/#code", "--data", "no.npz"), "neither a file nor a data set"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(capsys, words, sentence):
    assert sentence in refused(capsys, *words)


def test_options_of_rounds_are_refused_in_swaps(capsys, tmp_path):
    model = tmp_path / "a.nnm"
    model.write_text("a:input shape=[4];\na:output shape=[2];\na:layers Dense(units=2);\na:loss MSE;\n")
    found = refused(capsys, "serve", model, "--quorum", 2, "--out", tmp_path)
    assert "--quorum has no effect in swaps" in found


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--merge", "nonsense"), "nonsense"),
        (("--updates", 0), "updates must be"),
        (("--proxy", "http://peers.example"), "is not a URL with https"),
        (("--host", "203.0.113.7"), "cannot be used"),
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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in refused(capsys, "serve", model, "--port", port)
    assert "there is no file" in refused(capsys, "serve", tmp_path / "no.nnm")
