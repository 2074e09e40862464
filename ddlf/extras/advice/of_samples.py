"""Rules of class D that compare samples: with each other, with their labels, and over parts. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddlf.extras.advice.facts import Array, Facts
from ddlf.extras.advice.of_outputs import DISTANCES
from ddlf.extras.advice.rule import Change, Found, Rule

SHARED_SHARE, SHARED_COUNT = 0.01, 2
"""So much of a part may be in training, too, before it is more than chance."""
DEVIATIONS, LARGE_SHARE = 3, 0.05
"""From how many that are twice in training by chance on it is more, and the share that is a leak wherever it comes from."""
FEW, EACH = 20, 10
"""Samples up to which a problem is a toy, and that a class is to have."""
TURNED, HANDFUL = 3, 50
"""How many times as large as training another part may be, and samples from which on it may be meant so: of others there may be no labels."""
CONTRADICTING = 0.01
FEW_WRONG, WRONG = 3, (0.005, 0.01)
"""Likely wrong labels that are worth a word, also as a share, and the share that is worth a warning: models have their own errors."""
OVERLAPPING, LEAST_OVERLAPPING = 0.1, 10
"""Share of a part's windows that may go on from one of training: those at a cut do, and no more."""
RELATED, SURELY, LESS = 4.0, 15.0, 4.5
"""Deviations from labels that are exchanged below which nothing is told of labels, above which much is, and how many fewer than in training are no
chance."""
OFTENER = 3.0
"""Times as often as within training a combination of whole numbers must be in another part, before it is more than chance."""


def plural(count: int, one: str) -> str:
    """A number with its noun."""
    return f"{count:,} {one}{'' if count == 1 else 'es' if one.endswith(('ss', 'ch')) else 's'}"


def _is_trivial(facts: Facts) -> bool:
    return facts.rows.repeats_by_nature or facts.rows.looked < 20


def _is_counted(facts: Facts) -> bool:
    """Whether inputs are whole numbers, as tokens and categories, of which there are only so many combinations."""
    return all(one.whole and len(one.sample) == 1 for one in facts.of("x", "train"))


def _shared(facts: Facts) -> Iterator[Found]:
    if _is_trivial(facts):
        return
    own = 1 - facts.rows.distinct / facts.rows.looked
    for shared in facts.rows.shared:
        share = shared.count / shared.of
        if not shared.count or (_is_counted(facts) and share < OFTENER * own):
            continue
        by_chance = 2 * own * shared.of  # a sample of training meets half as many on its own side
        usual = by_chance + DEVIATIONS * math.sqrt(by_chance)
        many = share >= SHARED_SHARE and shared.count >= SHARED_COUNT and (share >= LARGE_SHARE or shared.count > usual)
        whole = share > 0.5
        x = f"x_{shared.part}"
        lines = (
            "known = {row.tobytes() for row in self.x_train}",
            f"new = [row.tobytes() not in known for row in self.{x}]",
            f"self.{x}, self.y_{shared.part} = self.{x}[new], self.y_{shared.part}[new]",
        )
        can = not whole and facts.array(x) and facts.array(f"y_{shared.part}") and facts.array("x_train")
        pairs = ", ".join(f"{a} = {b}" for a, b in shared.pairs)
        yield Found(
            f"{shared.count:,} of {shared.of:,} samples of x_{shared.part} are in x_train, too (numbers in training and there: {pairs})",
            ("data", x),
            tuple(b for _, b in shared.pairs),
            (Change("data", lines),) if can else (),
            severity="W" if many else "I",
            fix="split the data once, into parts that have nothing in common" if whole else "",
        )


def _doubled(facts: Facts) -> Iterator[Found]:
    rows = facts.rows
    if facts.seen.get("taken") and rows.looked >= 20 and rows.repeats_by_nature:
        yield Found(
            f"the batches that are given for training have {rows.distinct:,} different samples, of {rows.looked:,}",
            ("data", "x_train"),
            severity="W",
            fix="look at __getitem__: batch number i is to be of the samples from i * batch_size on",
        )
        return
    if _is_trivial(facts) or not rows.doubled or _is_counted(facts):
        return
    pairs = ", ".join(f"{a} = {b}" for a, b in rows.doubled)
    yield Found(
        f"{rows.looked - rows.distinct:,} of {rows.looked:,} training samples are there before ({pairs})",
        ("data", "x_train"),
        tuple(b for _, b in rows.doubled),
    )


def _contradicting(facts: Facts) -> Iterator[Found]:
    rows = facts.rows
    labels = next((one.labels for one in facts.of("y", "train")), None)
    if labels is None or labels.kind not in ("numbers", "one_hot") or _is_trivial(facts):
        return
    if rows.contradicting > max(1.0, CONTRADICTING * rows.looked):
        pairs = ", ".join(f"{a} and {b}" for a, b in rows.pairs)
        yield Found(
            f"{rows.contradicting:,} training samples are equal to another one that has another label ({pairs})",
            ("data", "y_train"),
            tuple(number for pair in rows.pairs for number in pair),
        )


def _leaks(facts: Facts) -> Iterator[Found]:
    for name, feature in facts.rows.leaks:
        yield Found(
            f"feature {feature} of {name} is the label itself, in other numbers or cut into ranges", ("data", name)
        )
    if facts.rows.follows is not None and any(one.loss in (*DISTANCES, "mape", "msle") for one in facts.heads):
        name, feature, alike = facts.rows.follows
        yield Found(
            f"feature {feature} of {name} follows the target by itself (correlation {alike:.4f}), and no other comes near that",
            ("data", name),
            severity="I",
            fix="ask whether it is known when the model is to be used, or is made of the target",
        )


def _sorted(facts: Facts) -> Iterator[Found]:
    for array in facts.of("y", "train"):
        if array.labels is not None and array.labels.is_sorted:
            kinds = len(classes(array))
            kept = facts.settings.get("shuffle") == "none" and (facts.from_files or facts.seen.get("taken"))
            yield Found(
                f"{array.name} is sorted: {plural(kinds, 'class') if kinds else 'equal labels'} one behind the other"
                + (", and shuffle is none, so that a batch has one label" if kept else ""),
                ("data", array.name),
                severity="W" if kept else None,
                fix="leave shuffle out, or take 'global'" if kept else "",
                changes=(Change("setting", "global", "shuffle"),) if kept else (),
            )


def _overlapping(facts: Facts) -> Iterator[Found]:
    for part, count, of in facts.rows.overlapping:
        if count >= LEAST_OVERLAPPING and count > OVERLAPPING * of:
            yield Found(
                f"{count:,} of {of:,} windows of x_{part} that were looked at are one of x_train moved by a step, with all others of their steps",
                ("data", f"x_{part}"),
            )


def _unrelated(facts: Facts) -> Iterator[Found]:
    found = facts.seen.get("related") or {}
    mine = found.get("of", "y_train")
    theirs = mine.replace("_train", "_test")
    train, asked = found.get("train", (math.inf, 0))
    test, others = found.get("test", (math.inf, 0))
    what = "neighbours, frequencies and straight lines tell {0} of {1} samples no better than labels that are exchanged by chance"
    if train < RELATED:
        tokens = all(one.whole and one.dtype.startswith(("int", "uint")) for one in facts.of("x", "train"))
        yield Found(
            what.format(mine, f"{asked:,}"),
            ("data", mine),
            severity="I" if tokens else None,  # what words say together none of these may see
        )
    elif test < RELATED and (train > SURELY or train * math.sqrt(others / max(asked, 1)) - test > LESS):
        yield Found(
            f"of x_train {what.format(theirs, f'{others:,}')}, and do tell {mine}",
            ("data", theirs),
            fix="look whether x_test and y_test were shuffled apart, or their classes have other numbers than in training",
        )


def classes(array: Array) -> set[int]:
    return {number for number, count in array.labels.counts.items() if count} if array.labels is not None else set()


def is_of_classes(facts: Facts, array: Array) -> bool:
    """Whether labels are numbers of classes, rather than other whole numbers."""
    if array.labels is None or array.labels.kind not in ("numbers", "one_hot"):
        return False
    heads = [one for one in facts.heads if one.target in ("", array.name)]
    sparse = any(one.loss in ("sce", "cce", "bce", "kld") for one in heads)
    return array.labels.kind == "one_hot" or sparse


def _missing(facts: Facts) -> Iterator[Found]:
    for array in facts.of("y", "train"):
        if not is_of_classes(facts, array):
            continue
        mine = classes(array)
        for part in ("val", "test"):
            other = facts.array(array.name.replace("_train", f"_{part}"))
            if other is None or other.labels is None or other.labels.kind != array.labels.kind:  # type: ignore[union-attr]
                continue
            theirs = classes(other)
            if unknown := sorted(theirs - mine):
                yield Found(
                    f"{other.name} has {plural(len(unknown), 'class')} that {array.name} lacks: {first(unknown)}",
                    ("data", other.name),
                )
            enough = other.shape[0] >= 10 * len(mine)
            if enough and len(mine) <= 1000 and (lacking := sorted(mine - theirs)):
                yield Found(
                    f"{other.name} lacks {plural(len(lacking), 'class')} of {len(mine)}: {first(lacking)}",
                    ("data", other.name),
                )


def first(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


def _few_samples(facts: Facts) -> Iterator[Found]:
    for array in facts.of("y", "train"):
        known = len(classes(array))
        if is_of_classes(facts, array) and known > 1 and FEW < facts.samples < EACH * known:
            yield Found(
                f"there are {facts.samples:,} samples of {known} classes: {facts.samples / known:.1f} of each",
                ("data", array.name),
            )
    for part in ("val", "test"):
        other = facts.array(f"x_{part}")
        if other is not None and facts.samples < HANDFUL and facts.samples * TURNED < other.shape[0]:
            yield Found(
                f"there are {facts.samples:,} samples for training, and {other.shape[0]:,} in x_{part}",
                ("data", "x_train"),
                fix="look whether the split has exchanged them: the larger part is for training",
            )


def _doubted(facts: Facts) -> Iterator[Found]:
    found = facts.seen.get("doubted")
    if found and found["count"] >= max(FEW_WRONG, WRONG[0] * found["of"]):
        pairs = ", ".join(f"{number} is {given} and looks like {likely}" for number, given, likely in found["pairs"])
        name = facts.heads[0].target if facts.heads else "y_train"
        yield Found(
            f"{found['count']:,} of {found['of']:,} labels of {name} are likely wrong: {pairs}",
            ("data", name),
            found["samples"],
            severity="W" if found["count"] >= WRONG[1] * found["of"] else "I",
        )


SAMPLES = (
    Rule(
        id="D05",
        severity="W",
        title="training samples in the test",
        look=_shared,
        why="The model has memorized these samples, so the measured accuracy is too high.",
        fix="Remove these samples from the test.",
        source="Karpathy, A Recipe for Training Neural Networks, 2019; Barz and Denzler, arXiv:1902.00423",
    ),
    Rule(
        id="D06",
        severity="I",
        title="duplicate training samples",
        look=_doubled,
        why="A duplicate counts twice, and a random split can put its copies into training and test.",
        fix="Remove duplicates before you split the data: numpy.unique(x, axis=0, return_index=True).",
        source="measured: iris has one such row",
    ),
    Rule(
        id="D07",
        severity="W",
        title="equal samples with different labels",
        look=_contradicting,
        why="No model can be right on both; what it learns from one, the other undoes.",
        fix="Check how you match labels with samples. Typical causes are an index off by one and a file that was shuffled alone.",
        source="UMLAUT, doi:10.1145/3411764.3445538; Northcutt et al., arXiv:1911.00068",
    ),
    Rule(
        id="D08",
        severity="W",
        title="a feature that reveals the label",
        look=_leaks,
        why="The model learns only that column, which is unknown when you use the model.",
        fix="Drop the column in load_dataset.",
        source="Kaufman et al., Leakage in Data Mining, KDD 2011, doi:10.1145/2020408.2020496",
    ),
    Rule(
        id="D09",
        severity="I",
        title="samples sorted by label",
        look=_sorted,
        why="DDLF mixes the samples, but a split by position or your own loop would miss classes.",
        fix="Shuffle once, with a fixed seed, before data is split.",
        source="measured: iris and wine are sorted by class",
    ),
    Rule(
        id="D10",
        severity="W",
        title="a class missing from training or test",
        look=_missing,
        why="The model cannot learn a class without training samples, and the test does not measure a class without test samples.",
        fix="Shuffle before the data is split, or split each class by itself (train_test_split(..., stratify=y)).",
        source="UMLAUT, doi:10.1145/3411764.3445538",
    ),
    Rule(
        id="D23",
        severity="W",
        title="test windows that overlap training windows",
        look=_overlapping,
        why="When windows are shuffled before the split, training has seen nearly every step of the test.",
        fix="Split the series by time first, then make windows of each part.",
        source="Kaufman et al., Leakage in Data Mining, KDD 2011, doi:10.1145/2020408.2020496",
    ),
    Rule(
        id="D24",
        severity="W",
        level="batch",
        title="labels unrelated to their samples",
        look=_unrelated,
        why="When samples or labels were shuffled alone, or an index is off, the model can only memorize.",
        fix="Look at some samples with their labels. Shuffle both with the same permutation, or not at all.",
        source="Humbatova et al., arXiv:1910.11015; Ojala and Garriga, Permutation Tests for Studying Classifier Performance, JMLR 2010",
    ),
    Rule(
        id="D22",
        severity="W",
        title="few samples of each class",
        look=_few_samples,
        why="The model memorizes a handful of samples, which say little about others.",
        fix="Check whether load_dataset drops most of the data. Otherwise use more data, augmentation or a pretrained model.",
        source="Humbatova et al., DeepCrime, ISSTA 2021, doi:10.1145/3460319.3464825: training data removed",
    ),
    Rule(
        id="D18",
        severity="W",
        level="cluster",
        title="labels that are probably wrong",
        look=_doubted,
        why="A wrong training label teaches a mistake, and a wrong test label counts a right prediction as wrong.",
        fix="Look at these samples, and correct or drop the wrong ones. --format json lists all of them.",
        source="Northcutt et al., Confident Learning, arXiv:1911.00068; cleanlab",
    ),
)
