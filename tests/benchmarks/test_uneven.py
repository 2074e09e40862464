"""The study of uneven data in its shortest form: a rule that is made for it is better than the mean, one that takes a minority for bad is worse."""

import pytest

from benchmarks import uneven
from tests.mnist import folder_with_mnist


@pytest.mark.usefixtures("one_template")
async def test_rules_differ_on_labels_that_are_dealt_out_unevenly(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DDLF_DATA", str(folder_with_mnist(tmp_path / "data")))
    said = ["--samples", "2000", "--rounds", "6", "--seeds", "1", "--rules", "mean,fedavgm 0.7,krum"]
    found = await uneven.run(uneven.arguments().parse_args(said))
    assert list(found) == ["mean", "fedavgm 0.7", "krum"]
    assert found["fedavgm 0.7"] > found["mean"] > found["krum"]
    assert "dirichlet:0.1, 8 slots, 6 rounds, 2000 samples, 1 seeds" in capsys.readouterr().out
