"""Tests of ``ddlf env``, which prints the facts for a bug report, but no secrets."""

import json

import pytest

from ddlf.cli import main
from ddlf.rpc.tokens import new_token
from ddlf.worker.source import source


@pytest.fixture
def env(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command in a new home folder, and returns the output."""
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


def test_env_prints_versions_machine_and_settings(env):
    (env.home / "lab" / "cluster.yaml").write_text("workers: [secret-host:9000, 10.1.2.3:9000]\nrun: {seed: 7}\n")
    text = env("--mode", "async")
    assert f"0.1.0, source {source().digest}, in " in text
    assert "numpy 2." in text
    assert "mode = async  (--mode)" in text
    assert "seed = 7  (cluster.yaml:2)" in text
    assert "cluster.yaml (2 workers)" in text
    assert "secret-host" not in text
    assert "10.1.2.3" not in text


def test_env_hides_secrets_and_shortens_the_home_folder(env, monkeypatch):
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


def test_env_json_has_the_same_data(env):
    facts = json.loads(env("--json", "--local", "3"))
    assert facts["cluster"] == "3 workers on this machine"
    assert facts["settings"] == ["all have their defaults"]


@pytest.mark.parametrize("text", ["1 / 0\n", "import no_such_module\n"])
def test_env_prints_the_rest_when_the_app_cannot_be_loaded(env, text):
    (env.home / "lab" / "app.py").write_text(text)
    assert "cannot be had: " in env("app.py")


def test_env_reports_a_broken_cluster_file_or_token(env):
    (env.home / "lab" / "cluster.yaml").write_text("workers: []\n")
    (env.home / "lab" / "token").write_text("short\n")
    text = env("--token-file", "token")
    assert "cluster.yaml:1:" in text
    assert "readable by others" in text
