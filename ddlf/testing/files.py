"""Data sets of which there is nothing but numbers. Runs on the master."""

from __future__ import annotations

from collections.abc import Sequence

from ddlf.data.manifest import Column, Manifest, PartitionFile


class MadeUp:
    """What training asks of a data set of partition files.

    Args:
        sizes: Samples in each file.
        version: Number of the version.
        hosts: As of ``Manifest``.

    Attributes:
        manifest: As of ``DataSet``.
        on_disk: As of ``DataSet``.
        in_order: As of ``DataSet``.
        inexact: As of ``DataSet``.
    """

    on_disk, in_order, inexact = True, False, ""

    def __init__(self, sizes: Sequence[int], version: int = 1, hosts: int = 0) -> None:
        files, first = [], 0
        for number, samples in enumerate(sizes):
            name = f"v{version:04}/{number:05}.safetensors"
            files.append(PartitionFile(name, samples, samples, "0" * 64, first))
            first += samples
        self.manifest = Manifest({"x": Column("uint8", ())}, files, version, hosts=hosts)
        self._versions = [self]

    def repartition(self, sizes: Sequence[int]) -> None:
        """Have the same samples in other files, as the next version."""
        self._versions.append(MadeUp(sizes, len(self._versions) + 1))

    def at(self, version: int) -> MadeUp:
        """As of ``DataSet``."""
        return self._versions[version - 1] if version else self

    def newer(self, version: int) -> MadeUp | None:
        """As of ``DataSet``."""
        return self._versions[-1] if len(self._versions) > version else None
