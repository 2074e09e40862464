"""Data sets without data: they only have counts. Runs on the master."""

from __future__ import annotations

from collections.abc import Sequence

from ddlf.data.data_set import DataSet
from ddlf.data.manifest import Column, Manifest, PartitionFile


class MadeUp:
    """A fake data set of partition files, with the attributes that training needs.

    Args:
        sizes: Number of samples of each file.
        version: Number of the version.
        hosts: The attribute of ``Manifest``.

    Attributes:
        manifest: The attribute of ``DataSet``.
        on_disk: The attribute of ``DataSet``.
        in_order: The attribute of ``DataSet``.
        inexact: The attribute of ``DataSet``.
        sources: The attribute of ``DataSet``.
    """

    on_disk, in_order, inexact = True, False, ""
    sources = DataSet.sources

    def __init__(self, sizes: Sequence[int], version: int = 1, hosts: int = 0) -> None:
        files, first = [], 0
        for number, samples in enumerate(sizes):
            name = f"v{version:04}/{number:05}.safetensors"
            files.append(PartitionFile(name, samples, samples, "0" * 64, first))
            first += samples
        self.manifest = Manifest({"x": Column("uint8", ())}, files, version, hosts=hosts)
        self._versions = [self]

    def repartition(self, sizes: Sequence[int]) -> None:
        """Add a next version with the same samples in other files."""
        self._versions.append(MadeUp(sizes, len(self._versions) + 1))

    def at(self, version: int) -> MadeUp:
        """Return the data set in another version; 0 means this one."""
        return self._versions[version - 1] if version else self

    def newer(self, version: int) -> MadeUp | None:
        """Return the newest version if it is newer than ``version``, else None."""
        return self._versions[-1] if len(self._versions) > version else None
