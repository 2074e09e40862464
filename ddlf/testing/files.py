"""Data sets of which there is nothing but numbers. Runs on the master."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ddlf.storage.manifest import Column, Manifest, PartitionFile


def made_up(sizes: Sequence[int]) -> Any:
    """What training asks of a data set of partition files.

    Args:
        sizes: Samples in each file.
    """
    files, first = [], 0
    for number, samples in enumerate(sizes):
        files.append(PartitionFile(f"v0001/{number:05}.safetensors", samples, samples, "0" * 64, first))
        first += samples
    return SimpleNamespace(manifest=Manifest({"x": Column("uint8", ())}, files))
