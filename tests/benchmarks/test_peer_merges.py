"""The study of peers that meet, in its shortest form: each rule trains, and what it took to the target is in the table."""

import asyncio

import pytest

from benchmarks import peer_merges
from tests.mnist import folder_with_mnist

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_template")]


def test_each_rule_says_what_it_took_to_the_target(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DDLF_DATA", str(folder_with_mnist(tmp_path / "data")))
    said = "--target 0.2 --slots 2 --samples 3000 --steps 2 --looks 4 --epochs 6 --repeats 1"
    options = peer_merges.parser().parse_args([*said.split(), "--rules", "one peer,average"])
    runs = asyncio.run(peer_merges.main(options))
    assert [one["rule"] for one in runs] == ["one peer", "average"]
    for one in runs:
        assert one["best"] >= 0.2
        assert 4 * peer_merges.LAST <= one["updates"] < 140
        assert one["seconds"] > 0
    assert runs[0]["staleness"] == 0
    assert "| average  |      1 of 1 |" in capsys.readouterr().out
