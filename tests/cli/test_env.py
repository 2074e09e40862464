"""``ddlf env``: what a bug report needs, and nothing that is nobody's business."""

import json

import pytest

from ddlf.cli import main
from ddlf.rpc.tokens import new_token


@pytest.fixture
def env(tmp_path, monkeypatch, capsys):
    """Runs the command in a home folder of its own; returns what it prints."""
    home = tmp_path / "home" / "ann"
    (home / "lab").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "lab")
    for name in ("DDLF_CONFIG", "DDLF_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments):
        with pytest.raises(SystemExit, match=r"^0$"):
            main.main(["env", *arguments])
        return capsys.readouterr().out

    run.home = home
    return run


def test_versions_machine_and_settings_with_their_origin(env):
    (env.home / "lab" / "cluster.yaml").write_text("workers: [secret-host:9000, 10.1.2.3:9000]\nrun: {seed: 7}\n")
    text = env("--mode", "async")
    assert "numpy 2." in text
    assert "mode = async  (--mode)" in text
    assert "seed = 7  (cluster.yaml:2)" in text
    assert "cluster.yaml (2 workers)" in text
    assert "secret-host" not in text
    assert "10.1.2.3" not in text


def test_no_secret_is_printed_and_the_home_folder_is_shortened(env, monkeypatch):
    token, more = new_token(), new_token()
    (env.home / "token").write_text(f"{token}\n")
    (env.home / "token").chmod(0o600)
    monkeypatch.setenv("DDLF_TOKEN", more)
    monkeypatch.setenv("DDLF_API_KEY", "hunter2")
    monkeypatch.setenv("TF_VAR_db", "hunter2")
    monkeypatch.setenv("DDLF_TOKEN_FILE", str(env.home / "token"))
    text = env()
    assert "DDLF_TOKEN=(set)" in text
    assert "DDLF_API_KEY=(set)" in text
    assert "DDLF_TOKEN_FILE=~/token" in text
    assert "DDLF_TOKEN_FILE ~/token" in text
    for secret in (token, more, "hunter2", str(env.home)):
        assert secret not in text


def test_json_is_the_same_as_data(env):
    found = json.loads(env("--json", "--local", "3"))
    assert found["cluster"] == "3 workers on this machine"
    assert found["settings"] == ["all have their defaults"]


@pytest.mark.parametrize("text", ["1 / 0\n", "import no_such_module\n"])
def test_an_app_that_cannot_be_loaded_is_no_reason_to_print_nothing(env, text):
    (env.home / "lab" / "app.py").write_text(text)
    assert "cannot be had: " in env("app.py")


def test_a_broken_cluster_file_or_token_is_said(env):
    (env.home / "lab" / "cluster.yaml").write_text("workers: []\n")
    (env.home / "lab" / "token").write_text("short\n")
    text = env("--token-file", "token")
    assert "cluster.yaml:1:" in text
    assert "readable by others" in text
