"""The keys of a user's peers, which programs keep for later ones. Runs on the peer.

A program holds the key of its link until it ends. So a later program with the same link is the same peer, and another one
at the same time is another peer, if the link is for several.
"""

from __future__ import annotations

import fcntl
import json
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

from ddlf.events.facts import to_data
from ddlf.peers.sessions import PIN, Link, Session, hashed
from ddlf.rpc.tokens import create_private, state_folder
from ddlf.training.checkpoints.releases import RELEASES


class OwnKey:
    """The key of a link that this program uses, unless the code of the link is to be used.

    Args:
        link: The link.

    Attributes:
        key: The key; empty if the code of the link is to be used.
        other_programs: Number of other programs of this user here that are peers of this link now.
    """

    def __init__(self, link: Link) -> None:
        self.key, self.other_programs = "", 0
        self._link = link
        self._file: BinaryIO | None = None
        for number in count(1):
            try:
                file = _path(link, number).open("rb")
            except FileNotFoundError:
                return
            if holds(file):
                self._file, self.key = file, str(json.load(file)["key"])
                return
            file.close()
            self.other_programs += 1

    def keep(self, session: Session) -> None:
        """Keep the key of a new session, and hold it."""
        self.key = session.key
        content = json.dumps({"origin": self._link.origin, **to_data(session)}).encode()
        for number in count(self.other_programs + 1):
            path = _path(self._link, number)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                create_private(path, content)
                self._file = path.open("rb")
                holds(self._file)
                return

    def release(self) -> None:
        """Let other programs use the key. Safe to call again."""
        if self._file is not None:
            self._file.close()


def forget(link: Link) -> None:
    """Delete the first key of a link."""
    _path(link, 1).unlink(missing_ok=True)


def account_folder(link: Link) -> Path:
    """Return the folder with the account of what peers of a link have released here."""
    return _path(link, 1).with_suffix("")


def has_account(link: Link) -> bool:
    """Return whether a peer of this link has an account of its releases here."""
    return (account_folder(link) / RELEASES).exists()


def _path(link: Link, number: int) -> Path:
    """Return the file of the key of one of a link's peers here."""
    name = hashed(link.code.partition(PIN)[0] + link.origin)[:32]
    return state_folder() / "peers" / f"{name}{f'-{number}' * (number > 1)}.json"


def holds(file: BinaryIO) -> bool:
    """Take a file for this program alone, and return whether no other program has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has no locks
        return True
    return True
