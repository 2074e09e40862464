"""Tests of the folder with the locks of cards.

All users may write to its parent folder, so the folder must belong to this user only.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from ddlf.errors import ConfigError
from ddlf.worker.assignment import Assignment, CardWish
from ddlf.worker.lost_cards import folder_of_cards


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of this user's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"ddlf-cards-{os.geteuid()}"


def test_folder_is_created_once_for_this_user_only(folder):
    assert folder_of_cards() == folder_of_cards() == folder
    assert folder.stat().st_mode & 0o777 == 0o700


def test_folder_of_another_user_is_refused(folder, monkeypatch):
    uid = os.geteuid()
    folder_of_other_user = folder.with_name(f"ddlf-cards-{uid + 1}")
    folder_of_other_user.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(ConfigError, match=rf"ddlf-cards-{uid + 1}, .* belongs to another user \(uid {uid}\)"):
        folder_of_cards()


def test_link_to_folder_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a folder"):
        folder_of_cards()


def test_folder_that_other_users_can_write_to_is_refused_when_a_worker_takes_a_card(cards, folder):
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match="can be changed by other users") as caught:
        Assignment.take(CardWish(("0",)))
    assert "TMPDIR" in (caught.value.hint or "")
