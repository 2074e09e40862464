"""Run the trial of the screens that explain who sees updates and samples, for one setting of peers and one of workers."""

import pytest

from tests.trials import who_sees


@pytest.mark.slow
def test_screens_of_peers_and_of_workers_are_made(tmp_path):
    files = [file for number in (2, 4) for file in who_sees.make(who_sees.SCREENS[number], tmp_path / str(number))]
    assert [file.name for file in files] == ["2.png", "2p.png", "4.txt"]
    assert all(file.stat().st_size > 1000 for file in files)
