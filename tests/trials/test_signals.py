"""Run the short form of the trial that sends signals to runs with checkpoints."""

import random

import pytest

from tests.patience import PATIENCE_S
from tests.trials import signals
from tests.trials.signals import KINDS, Stage, damaged, digest, series, undisturbed


@pytest.fixture(scope="module")
def stage():
    with Stage(made_up=True) as stage:
        yield stage


def test_signals_at_any_moment_damage_no_checkpoint_and_change_no_bit(stage, monkeypatch):
    for limit in ("LIMIT_S", "IGNORED_S"):
        monkeypatch.setattr(signals, limit, PATIENCE_S)
    whole_s, expected = undisturbed(stage)
    kinds, chance = [kind for kind in KINDS if not kind.workers], random.Random(1)
    for outcome in series(stage, chance, whole_s, expected, kinds, 4):
        assert outcome.problems == []


def test_check_finds_problems(stage):
    folder = stage.folder()
    (folder / "app.py").write_text((folder / "app.py").read_text().replace("= 15, 3,", "= 2, 4,"))
    stage.run(folder).wait()
    before = digest(folder)
    newest = folder / "kept" / "round-000002" / "manifest.json"
    newest.write_bytes(newest.read_bytes()[:-9])
    assert [text.partition(":")[0] for text in damaged(folder)] == ["round-000002"]
    assert digest(folder) != before
    term, twice, worker = KINDS[0], KINDS[1], KINDS[4]
    assert [kind.fits(code) for kind, code in ((term, 143), (twice, -15), (term, 130), (worker, 143))] == [
        *(True, True, False, False)
    ]
