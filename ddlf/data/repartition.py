"""A data set at a place as a source, for other partition files of the same samples, or for another data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ddlf.data.manifest import Manifest
from ddlf.data.place import Place
from ddlf.data.rows import Rows, put, row_type
from ddlf.data.split import split
from ddlf.errors import ConfigError


class PartitionedSource:
    """A source with the columns of a data set. Samples come in the order of their ids.

    Args:
        place: Place of the data set.

    Raises:
        DatasetError: There is no data set.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self.manifest = place.manifest()
        self.columns = dict(self.manifest.columns)
        self.samples = self.manifest.samples
        self.classes: Sequence[str] = self.manifest.classes

    def rows(self, at_once: int, first: int = 0) -> Iterator[Rows]:
        """Yield the samples in order, from number ``first``, in pieces of at most ``at_once``."""
        for file in self.manifest.files:
            if file.first + file.samples <= first:
                continue
            arrays = self._place.mapped(file, self.columns)
            for start in range(max(first - file.first, 0), file.samples, at_once):
                rows = np.empty(min(at_once, file.samples - start), row_type(self.columns))
                for name, array in arrays.items():
                    if not self.columns[name].ragged:
                        rows[name] = array[start : start + at_once]
                        continue
                    for number in range(len(rows)):
                        put(rows, name, number, array[start + number])
                yield rows


def repartition(
    place: Place,
    source: PartitionedSource,
    sizes: Sequence[int],
    *,
    memory: int = 10**9,
    moved: Callable[[str, int, int], None] = lambda what, done, of: None,
    say: Callable[[str, str], None] = lambda what, text: None,
) -> Manifest:
    """Write the samples of a data set into files of other sizes, in the order of their ids, as its next version.

    Readers of the previous version are not disturbed: its files stay until the next version is made, or until
    ``Place.retire`` is called.

    Args:
        place: Place of the data set.
        source: The data set at this place, as a source.
        sizes: Number of samples of each file.
        memory: Bytes of memory to use.
        moved: Receives the present step, the finished samples and all samples.
        say: Receives a word and a sentence about an earlier call's leftovers, or about its own.

    Raises:
        ConfigError: The memory is too small for one file, or the files already have these sizes.
        DatasetError: A file is damaged, or there is another writer. The present version then stays.
    """
    if list(sizes) == source.manifest.sizes.tolist():
        raise ConfigError(f"{place} has {len(sizes):,} files of these sizes already", hint="name other sizes")
    before, state = source.manifest, source.manifest.content
    return split(source, place, sizes, shuffle=False, memory=memory, state=state, moved=moved, say=say, after=before)
