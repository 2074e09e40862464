"""Run the short form of the trial of attacks: each attack once, in swaps and in rounds."""

import pytest

from tests.trials.attacks import BAR, FOUND, train

POSTS = 15


@pytest.fixture(scope="module")
def clean():
    return {way: train(way, 4, 0, "", 0, posts=POSTS).accuracy for way in ("swap", "rounds")}


@pytest.mark.parametrize("attack", FOUND)
@pytest.mark.parametrize("way", ["swap", "rounds"])
def test_one_bad_peer_of_four_does_no_harm_and_no_honest_peer_is_struck(clean, way, attack):
    run = train(way, 4, 1, attack, 0, posts=POSTS)
    assert run.accuracy >= clean[way] - BAR
    assert run.struck == 0


@pytest.mark.parametrize("attack", ["x1000", "flipped x10"])
def test_without_the_check_the_bad_peer_does_harm(clean, attack):
    """Show that these attacks do harm without the check, so the test above is meaningful."""
    assert train("swap", 4, 1, attack, 0, posts=POSTS, longest=0.0).accuracy < clean["swap"] - BAR


@pytest.mark.parametrize("seed", [0, 2])
def test_a_slow_peer_with_other_labels_is_not_rejected_after_the_others_have_converged(seed):
    """The trainings of such a peer change the weights much more than the other trainings. An earlier check rejected half of
    them, and counted some as strikes.
    """
    run = train("swap", 4, 0, "", seed, posts=120, halves=1, slower=4)
    assert run.struck == 0
    assert not run.table.rejected


@pytest.mark.parametrize("way", ["swap", "rounds"])
def test_honest_peers_with_other_labels_are_not_struck(way):
    for halves in (1, 2):
        assert train(way, 4, 0, "", 0, posts=POSTS, halves=halves).struck == 0
