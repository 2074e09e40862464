"""Many updates -> one. Runs on the master.

An update is ``weights_before - weights_after`` of local training: one array per tensor of ``model.weights``. The merge
is by default the mean over slots, weighted by samples. Divisors are known here only: a worker never divides by the
number of slots, so a lost worker cannot shrink the result.

Each rule is a value whose ``start`` gives the merge of one round, which takes updates in any order of arrival::

    merge = MERGE.read("trimmed:0.2").start(slots, like=weights)
    merge.add(slot, update, samples)  # for each slot
    merged = merge.result()

| rule | what it is | for |
|---|---|---|
| ``mean`` | of each coordinate the mean weighted by samples | honest workers |
| ``median`` | of each coordinate the median, each slot counts once | fewer than half of the slots are bad |
| ``trimmed:0.2`` | of each coordinate the mean without the 20% largest and the 20% smallest | fewer than 20% are bad; closer to the mean |
| ``krum:1,keep=3`` | the mean of the 3 updates that have most others near | 1 may be bad |
| ``geometric`` | the point with the least sum of distances to all updates | fewer than half of the samples are bad |
| ``clipped:1`` | the mean of updates that are no longer than the median | few are too long |
"""

from collections.abc import Sequence

from ddlf.algorithms.mean import Mean, Merge, Rule, RunningMerge
from ddlf.algorithms.named import Family
from ddlf.algorithms.robust import ClippedMean, GeometricMedian, Krum, Median, TrimmedMean
from ddlf.algorithms.weights import Tensor
from ddlf.errors import ConfigError

__all__ = [
    "MERGE",
    "ClippedMean",
    "GeometricMedian",
    "Krum",
    "Mean",
    "Median",
    "Merge",
    "Rule",
    "RunningMerge",
    "TrimmedMean",
    "merged",
]


def merged(
    by: Rule, updates: Sequence[Sequence[Tensor]], counts: Sequence[int], *, checked: bool = False
) -> list[Tensor]:
    """Merge the updates of one round, which are all there; of each slot its update and the samples that it trained on, in slot order.

    Raises:
        ConfigError: There is no update, or there are not as many counts.
        BadUpdate: One does not fit.
    """
    if not updates or len(updates) != len(counts):
        raise ConfigError(f"need updates and as many sample counts, got {len(updates)} and {len(counts)}")
    merge = by.start(len(updates), like=updates[0])
    for slot, (update, count) in enumerate(zip(updates, counts, strict=True)):
        merge.add(slot, update, count, checked=checked)
    return merge.result()


MERGE: Family[Rule] = Family(
    "merge", mean=Mean, median=Median, trimmed=TrimmedMean, krum=Krum, geometric=GeometricMedian, clipped=ClippedMean
)
"""Every merge rule by name."""
