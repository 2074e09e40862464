"""Slices of a checkpoint on their way back: whoever is to hold one reads it, where its folder is seen. Runs on master and workers.

A folder is the same one if its manifest has the same bytes; one of the run of now, whose manifest is not written yet, if it has the same writer. So a
slice that is missing is told from a folder that is another machine's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ddlf.errors import CheckpointCorrupt
from ddlf.training.checkpoints.durable import MANIFEST, damaged
from ddlf.training.checkpoints.slices import Slices, is_seen, look_at, read, slice_name
from ddlf.training.checkpoints.tensors import Array


def place_of(slices: Slices, number: int) -> dict[str, Any]:
    """Where a slice is, from 0, as it travels."""
    file = next(file for file in slices.files if file["name"] == slice_name(number))
    return {
        "folder": str(slices.root),
        "session": slices.session,
        "manifest": slices.manifest,
        "in": [str(slices.folder), str(slices.final)],  # it is complete meanwhile
        "file": {name: file[name] for name in ("name", "bytes", "sha256")},
        "of": slices.of,
    }


def numbers_of(slices: Slices, groups: Collection[str]) -> list[int]:
    """The slices, from 0, that have parts of some groups of arrays."""
    return [
        number
        for number, file in enumerate(slices.files)
        if any(name.partition(" ")[0] in groups for name in file["arrays"])
    ]


def found_at(place: Mapping[str, Any], *, load: bool) -> tuple[dict[str, Any], dict[str, Array]]:
    """Look for a slice on this machine, and read it.

    Args:
        place: From ``place_of``.
        load: Whether its arrays are wanted; else it is held against its hash alone, with nothing of it in memory.

    Returns:
        Whether its checkpoint is ``seen`` here; what is ``wrong`` with the slice there, for ``raised``, if anything is. And its arrays.
    """
    while (folder := _seen(place)) is not None:
        path = folder / place["file"]["name"]
        try:
            if load:
                return {"seen": True}, read(path, place["file"], place["of"])
            look_at(path, place["file"], place["of"])
        except CheckpointCorrupt as error:
            if not folder.is_dir():  # it was completed in this moment, and has its name now
                continue
            return {"seen": True, "wrong": [error.file, error.expected, error.got, error.message]}, {}
        return {"seen": True}, {}
    return {"seen": False}, {}


def raised(answer: Mapping[str, Any]) -> CheckpointCorrupt | None:
    """The error that an answer of ``found_at`` tells of, with the same sentence."""
    if "wrong" not in answer:
        return None
    file, expected, got, text = map(str, answer["wrong"])
    return damaged(Path(file), expected, got, text=text)


def _seen(place: Mapping[str, Any]) -> Path | None:
    """The checkpoint's folder as it is here; None if it is not the one that is meant."""
    for folder in map(Path, place["in"]):
        if not place["manifest"]:
            if is_seen(place) and folder.is_dir():
                return folder
            continue
        try:
            if hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest() == place["manifest"]:
                return folder
        except OSError:
            continue
    return None
