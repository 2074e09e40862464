"""Remembers the cards that were lost, so that no worker takes them again before they are repaired. Runs in daemons and on
the master.

Each user has a folder with the locks of cards and with one file for each lost card. A file counts until the machine
restarts, or until ``ddlf doctor`` has computed on the card.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")
ENDING = ".lost"


def folder_of_cards() -> Path:
    """Return this user's folder with facts about the cards of this machine."""
    folder = Path(tempfile.gettempdir()) / f"ddlf-cards-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def lost_cards() -> dict[str, str]:
    """Return why each lost card is not used, by its unique name."""
    found, boot = {}, _boot()
    for path in sorted(folder_of_cards().glob(f"*{ENDING}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            facts = json.loads(path.read_text())
            if facts["boot"] == boot:
                found[str(facts["uuid"])] = str(facts["why"])
    return found


def remember_lost(uuid: str, why: str) -> None:
    """Let no worker take a card again.

    Args:
        uuid: Unique name of the card.
        why: A sentence about it.
    """
    facts = {"uuid": uuid, "why": f"{why} at {time.strftime('%H:%M:%S')}", "boot": _boot()}
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
