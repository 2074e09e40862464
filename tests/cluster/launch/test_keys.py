"""Tests of the keys of launchers: reading them from a text or a mapping, and refusals."""

import re

import pytest
from pydantic import Field

from ddlf.cluster.cluster import Cluster
from ddlf.cluster.config.cluster_file import load_config
from ddlf.cluster.launch.command import Commanded
from ddlf.cluster.launch.keys import Bytes, Keys, Names, parse_keys, read_keys
from ddlf.cluster.launch.launcher import Workers, from_keys, installed
from ddlf.errors import ConfigError


class DemoKeys(Keys):
    hosts: Names = ()
    memory: Bytes | None = None
    env: dict[str, str] = Field(default_factory=dict)


def read(text, workers=None):
    return read_keys(DemoKeys, "demo", parse_keys(text, "demo"), workers)


def test_text_becomes_values_of_their_types():
    keys = read("workers=2..8,start_timeout=2m,hosts=pc01,pc02,memory=2GiB,env.A=1,env.B=x=y")
    assert keys.workers == Workers(2, 8)
    assert keys.start_timeout == 120
    assert keys.hosts == ("pc01", "pc02")
    assert keys.memory == 2**31
    assert keys.env == {"A": "1", "B": "x=y"}
    assert read("") == DemoKeys()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("worker=2", "launcher demo has no key 'worker'; did you mean 'workers'?"),
        (
            "colour=2",
            "launcher demo has no key 'colour'; it has: env, hosts, memory, network, start_timeout, workers",
        ),
        ("fast", "launcher demo: 'fast' is not KEY=VALUE; as in: --launcher demo:start_timeout=60"),
        ("env=A,env.B=1", "launcher demo: env is given twice; write env.NAME=VALUE for each"),
        ("workers=2,workers=3", "launcher demo: workers is given twice; leave one of them out"),
        (
            "workers=5..2",
            "launcher demo: workers must be 1-1024 workers, and a range begins with its smaller number, got 5..2",
        ),
        (
            "workers=0",
            "launcher demo: workers must be 1-1024 workers, and a range begins with its smaller number, got 0",
        ),
        ("workers=many", "launcher demo: workers must be a number of workers such as 4, or 2..8, got 'many'"),
        (
            "start_timeout=soon",
            "launcher demo: start_timeout must be above 0 and such as 90, 90s, 10m or 2h, got 'soon'",
        ),
        (
            "start_timeout=-1",
            "launcher demo: start_timeout must be above 0 and such as 90, 90s, 10m or 2h, got '-1'",
        ),
        ("memory=2XB", "launcher demo: memory must be above 0 and such as 2GiB or 800MB, got '2XB'"),
        (
            "network=10.1.0.0/99",
            "launcher demo: network '10.1.0.0/99' does not appear to be an IPv4 or IPv6 network",
        ),
    ],
)
def test_wrong_text_is_named(text, sentence):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert str(caught.value) == sentence


def test_number_of_workers_agrees_or_is_refused():
    assert read("workers=4", Workers(4, 4)).workers == Workers(4, 4)
    with pytest.raises(ConfigError, match="workers=4, but --workers is 2"):
        read("workers=4", Workers(2, 8))


def test_launcher_is_made_from_a_mapping_a_file_and_cluster_on(tmp_path):
    keys = {"command": "qsub {worker}", "workers": "2..3", "folder": str(tmp_path)}
    for launcher in (from_keys("command", keys), Cluster.on("command", **keys)._launcher):
        assert isinstance(launcher, Commanded)
        assert (len(launcher.addresses), launcher.least) == (3, 2)
    file = tmp_path / "cluster.yaml"
    file.write_text("launcher:\n  command:\n    command: qsub {worker}\n    workers: 3\n")
    assert load_config(file).launcher_name == "command"
    assert Cluster.from_config(file).N == 3
    file.write_text("launcher: {command: {worker: 3}}\n")
    with pytest.raises(ConfigError, match="launcher command has no key 'worker'"):
        Cluster.from_config(file)
    for wrong in ("[command]", "{command: 3}", "{command: {}, slurm: {}}"):
        file.write_text(f"launcher: {wrong}\n")
        with pytest.raises(ConfigError, match="launcher must be"):
            load_config(file)


def test_name_of_an_own_launcher_cannot_be_taken(monkeypatch):
    from importlib.metadata import EntryPoint

    from ddlf.cluster.launch import launcher

    monkeypatch.setattr(launcher, "entry_points", lambda group: [EntryPoint("slurm", "other:Slurm", group)])
    with pytest.raises(
        ConfigError, match=re.escape("the package of other:Slurm brings a launcher 'slurm', which DDLF has already")
    ):
        installed("slurm")


def test_least_and_min_workers_agree(tmp_path):
    keys = {"command": "qsub {worker}", "workers": "2..3"}
    with pytest.raises(ConfigError, match="min_workers is 3, but the launcher begins with 2 workers"):
        Cluster(from_keys("command", keys), min_workers=3)
