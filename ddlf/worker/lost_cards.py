"""Remembers the cards that were lost, so that no worker takes them again before they are repaired. Runs in daemons and on
the master.

Each user has a folder with the locks of cards and with one file for each lost card. A file counts until the machine
restarts, or until ``ddlf doctor`` has computed on the card.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
import time
from pathlib import Path

from ddlf.errors import ConfigError

BOOT = Path("/proc/sys/kernel/random/boot_id")
ENDING = ".lost"


def folder_of_cards() -> Path:
    """Return this user's folder with facts about the cards of this machine.

    Raises:
        ConfigError: Another user has made it, or can write to it. All users may write to the folder around it.
    """
    folder = Path(tempfile.gettempdir()) / f"ddlf-cards-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    if facts.st_uid != os.geteuid():
        wrong = f"belongs to another user (uid {facts.st_uid})"
    elif not stat.S_ISDIR(facts.st_mode):
        wrong = "is not a folder"
    elif facts.st_mode & 0o022:
        wrong = "can be changed by other users"
    else:
        return folder
    raise ConfigError(
        f"{folder}, where workers keep the locks of cards, {wrong}",
        hint="remove it, or set TMPDIR to another folder, the same one for all your workers",
    )


def lost_cards() -> dict[str, str]:
    """Return why each lost card is not used, by its unique name."""
    reasons, boot = {}, _boot()
    for path in sorted(folder_of_cards().glob(f"*{ENDING}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads(path.read_text())
            if facts["boot"] == boot:
                reasons[str(facts["uuid"])] = str(facts["why"])
    return reasons


def remember_lost(uuid: str, reason: str) -> None:
    """Let no worker take a card again.

    Args:
        uuid: Unique name of the card.
        reason: A sentence about it.
    """
    facts = {"uuid": uuid, "why": f"{reason} at {time.strftime('%H:%M:%S')}", "boot": _boot()}
    path = _file(uuid)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(facts))
    temporary.replace(path)


def forget_lost(uuid: str) -> bool:
    """Let workers take a card again, because it computes. Return whether it was lost."""
    try:
        _file(uuid).unlink()
    except FileNotFoundError:
        return False
    return True


def _file(uuid: str) -> Path:
    return folder_of_cards() / f"{uuid.replace('/', '-')}{ENDING}"


def _boot() -> str:
    with contextlib.suppress(OSError):
        return BOOT.read_text().strip()
    return ""
