"""The updates and samples that each party sees, in a table. The screens and a page for readers follow from it. Pure.

``COLUMNS`` has a column for each combination of settings, and ``column_for`` returns the column of a training. A column has a
cell for each party. ``SECURITY.md`` has the tables for readers; ``ddlf run --dry-run`` and the page of a peer show one
column. ``tests/privacy/test_visible.py`` names the tests behind the cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from ddlf.algorithms.merge import MERGE, revealed_by
from ddlf.privacy.contradictions import Choice

UPDATE = "An update is the change that data make to the model. It can reveal facts about these data."


class Party(Enum):
    """A party that may see updates or samples, with its name in the table."""

    SERVER = "the server, or the master"
    PEER = "another peer"
    WORKER = "another worker"
    NETWORK = "a reader of the network"
    USER = "another user of a machine"
    HOLDER = "anybody with the final model"


class Updates(Enum):
    """The updates that a party sees, by a word for cells."""

    EACH = "each"
    SHARE = "share"
    STEPS = "steps"
    SOME = "some"
    SUM = "sum"
    NOISED = "noised"
    MERGED = "merged"
    NONE = "none"

    @property
    def phrase(self) -> str:
        """The meaning of the word, as screens show it."""
        return PHRASES[self]


PHRASES = {
    Updates.EACH: "each single update, as it is",
    Updates.SHARE: "each single update, with one share of the noise",
    Updates.STEPS: "each single update, with noise from each step",
    Updates.SOME: "some single updates, as they are",
    Updates.SUM: "no single update, only sums of three or more",
    Updates.NOISED: "only sums of updates, with noise",
    Updates.MERGED: "only the model, which merges all updates",
    Updates.NONE: "nothing",
}


class Samples(Enum):
    """The samples that a party sees."""

    NONE = "none"
    SOME = "some"
    ALL = "all"
    BY_CODE = "none*"

    @property
    def phrase(self) -> str:
        """The meaning of the word, as screens show it."""
        return "none, unless its code reads them" if self is Samples.BY_CODE else self.value


@dataclass(frozen=True, slots=True)
class Cell:
    """The updates and samples that one party sees."""

    updates: Updates
    samples: Samples = Samples.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A cell as screens show it: the party's name, and phrases."""

    party: str
    updates: str
    samples: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The cells of all parties with one combination of settings.

    Args:
        name: A short name for the head of the table.
        how: The settings, as Markdown.
        applies: Whether a choice of settings has this column.
        cells: The cell of each party; a party without a cell does not exist there.
        also: Other facts that the server or master learns, as a clause.
        metrics: Whether it learns losses and accuracies.
        before: How an update is protected before it leaves a peer or the server, as sentences; empty if it is not.
        remains: The remaining risks, as sentences.
        depends_on_merge: Whether the merge rule may reveal parts of single updates, which is then a further risk.
    """

    name: str
    how: str
    applies: Callable[[Choice], bool]
    cells: Mapping[Party, Cell]
    also: str
    metrics: bool = True
    before: str = ""
    remains: tuple[str, ...]
    depends_on_merge: bool = False

    def remaining(self, choice: Choice) -> tuple[str, ...]:
        """Return the remaining risks of a training by its settings, as sentences."""
        return (*self.remains, choice.reveals) if self.depends_on_merge and choice.reveals else self.remains

    def rows(self, *, shards: bool = False) -> Iterator[Row]:
        """Yield the rows of a screen.

        Args:
            shards: Whether the server lends its own samples to peers.
        """
        for party, cell in self.cells.items():
            samples = LENT.get(party, cell.samples) if shards else cell.samples
            yield Row(party=self.name_of(party), updates=cell.updates.phrase, samples=samples.phrase)

    def seers(self, *, shards: bool = False) -> str:
        """Return the parties that see samples, as a clause for screens.

        Args:
            shards: Whether the server lends its own samples to peers.
        """
        clauses = [
            f"{row.party} sees {row.samples}" for row in self.rows(shards=shards) if row.samples != Samples.NONE.phrase
        ]
        return ", ".join(clauses) or "nobody else sees them"

    def name_of(self, party: Party) -> str:
        """Return the name of a party on screens and in the tables."""
        names = NAMES_OF_PEERS if Party.PEER in self.cells else NAMES_OF_WORKERS
        return names.get(party, party.value)


NAMES_OF_PEERS = {
    Party.SERVER: "the server",
    Party.PEER: "a peer that trains with you",
    Party.USER: "another user of your machine",
}
NAMES_OF_WORKERS = {Party.SERVER: "the master"}
LENT = {Party.SERVER: Samples.ALL, Party.PEER: Samples.SOME}
"""Samples that parties see if they are the server's own."""


def _cells(server: Cell, member: Party, other_members: Cell, holder: Updates) -> Mapping[Party, Cell]:
    nothing = Cell(Updates.NONE)
    return {
        Party.SERVER: server,
        member: other_members,
        Party.NETWORK: nothing,
        Party.USER: nothing,
        Party.HOLDER: Cell(holder),
    }


def _peers(server: Updates, other_peers: Updates, holder: Updates) -> Mapping[Party, Cell]:
    return _cells(Cell(server), Party.PEER, Cell(other_peers), holder)


def _workers(
    server: Updates, other_workers: Updates, holder: Updates, samples: Samples = Samples.NONE
) -> Mapping[Party, Cell]:
    of_master = Samples.BY_CODE if samples is Samples.NONE else samples
    return _cells(Cell(server, of_master), Party.WORKER, Cell(other_workers, samples), holder)


OF_PEERS = "the name, the number of samples and the times of posts of each peer"
OF_PEERS_WITH_METRICS = "the name, the number of samples, the times of posts, the loss and the accuracy of each peer"
NO_METRICS = "The loss and the accuracy stay with the peer."
NO_NOISE = "No noise (lasting random numbers) is added to hide facts about data."
RUNS_CODE = (
    "The master's code runs on the workers. The setting protects from mistakes, but a master with other code can see"
    " everything, also the data."
)
MASKS_RUN_CODE = (
    "The master's code runs on the workers. Masks protect from mistakes and from a curious reader of the master's memory,"
    " records and network, but a master with other code can see everything, also the data."
)
FEW_WORKERS = (
    "In a round of one or two workers, and in asynchronous training, a worker can compute the update of another one."
)

SWAPS = Column(
    name="swaps",
    how="`ddlf peers serve`",
    applies=lambda c: c.trainers != "workers" and c.way == "swap",
    cells=_peers(Updates.EACH, Updates.SOME, Updates.MERGED),
    also=OF_PEERS_WITH_METRICS,
    remains=(NO_NOISE, "At each swap, one other peer can get your model, as it is."),
)
ROUNDS = Column(
    name="rounds",
    how="`ddlf peers serve --way rounds`",
    applies=lambda c: c.trainers != "workers" and c.way == "rounds" and not c.has_noise and not c.secure,
    cells=_peers(Updates.EACH, Updates.MERGED, Updates.MERGED),
    also=OF_PEERS_WITH_METRICS,
    remains=(NO_NOISE, "In a round of one or two posts, a peer can compute the update of another one."),
    depends_on_merge=True,
)
CLIPPED = Column(
    name="noise",
    how="`ddlf peers serve --way rounds --quorum 3 --clip 1 --noise 1 --trust server`",
    applies=lambda c: c.trainers != "workers" and c.has_noise and c.trust != "nobody",
    cells=_peers(Updates.EACH, Updates.NOISED, Updates.NOISED),
    also=OF_PEERS,
    metrics=False,
    before=f"The server shortens each update and adds noise to their sum, before others get it. {NO_METRICS}",
    remains=(
        "The server sees each update before it adds noise: random numbers that hide single updates in a sum. A dishonest"
        " server could leave out the noise.",
    ),
)
NOBODY = Column(
    name="trust nobody",
    how="`ddlf peers serve --way rounds --quorum 3 --clip 1 --noise 1 --trust nobody`",
    applies=lambda c: c.trainers != "workers" and c.has_noise and c.trust == "nobody",
    cells=_peers(Updates.SHARE, Updates.NOISED, Updates.NOISED),
    also=OF_PEERS,
    metrics=False,
    before=f"Each peer shortens its update and adds its share of the noise, before it leaves. {NO_METRICS}",
    remains=(
        "One share is less than the whole noise, which only the sum has. With a quorum of 1, it is the whole noise.",
    ),
)
SECURE = Column(
    name="secure sum",
    how="`ddlf peers serve --way rounds --secure-aggregation`",
    applies=lambda c: c.trainers != "workers" and c.secure,
    cells=_peers(Updates.SUM, Updates.SUM, Updates.MERGED),
    also=OF_PEERS,
    metrics=False,
    before=f"Each peer hides its update behind random masks, which cancel each other in the sum. {NO_METRICS}",
    remains=(
        NO_NOISE,
        "A dishonest server that replaces the keys of the masks sees each update. To notice it, compare the code that you"
        " see in training with that of another peer.",
    ),
)
PRIVATE = Column(
    name="private",
    how="`private = True` in an app",
    applies=lambda c: c.trainers == "workers" and c.private and not c.has_noise and not c.secure,
    cells=_workers(Updates.EACH, Updates.MERGED, Updates.MERGED),
    also="the number of samples, their shapes and types, the metrics and the printed lines of each worker",
    remains=(RUNS_CODE, NO_NOISE, FEW_WORKERS),
    depends_on_merge=True,
)
PRIVATE_NOISED = Column(
    name="private, noise",
    how="`private = True` with `update_clip` and `noise_multiplier`",
    applies=lambda c: c.trainers == "workers" and c.private and c.has_noise and not c.of_samples and not c.secure,
    cells=_workers(Updates.EACH, Updates.NOISED, Updates.NOISED),
    also="the number of samples, their shapes and types, and the printed lines of each worker",
    metrics=False,
    before="The master shortens each update and adds noise to their sum, before workers get it.",
    remains=(RUNS_CODE,),
)
PRIVATE_SAMPLES = Column(
    name="private, samples",
    how="`private = True` with `update_clip`, `noise_multiplier` and `privacy_unit = 'sample'`",
    applies=lambda c: c.trainers == "workers" and c.private and c.has_noise and c.of_samples,
    cells=_workers(Updates.STEPS, Updates.MERGED, Updates.MERGED),
    also="the number of samples, their shapes and types, and the printed lines of each worker",
    metrics=False,
    before="In each step, the worker shortens the gradient of each sample and adds noise to their sum.",
    remains=(
        RUNS_CODE,
        "The noise hides each single sample, but not all samples of a person or a worker.",
        "In a round of one or two workers, or with krum or median, another worker can get single updates, with noise.",
    ),
)
PRIVATE_MASKED = Column(
    name="private, masks",
    how="`private = True` with `secure_aggregation = True`",
    applies=lambda c: c.trainers == "workers" and c.private and c.secure and not c.has_noise,
    cells=_workers(Updates.SUM, Updates.SUM, Updates.MERGED),
    also="the number of samples, their shapes and types, and the printed lines of each worker",
    metrics=False,
    before="Each worker hides its update behind random masks, which cancel each other in the sum.",
    remains=(MASKS_RUN_CODE, NO_NOISE),
)
PRIVATE_MASKED_NOISED = Column(
    name="private, masks, noise",
    how="`private = True` with `secure_aggregation = True`, `update_clip` and `noise_multiplier`",
    applies=lambda c: c.trainers == "workers" and c.private and c.secure and c.has_noise,
    cells=_workers(Updates.NOISED, Updates.NOISED, Updates.NOISED),
    also="the number of samples, their shapes and types, and the printed lines of each worker",
    metrics=False,
    before="Each worker shortens its update, adds a share of the noise, and hides it behind random masks, which cancel each other in the sum.",
    remains=(MASKS_RUN_CODE,),
)
PLAIN = Column(
    name="plain",
    how="an app without `private`",
    applies=lambda c: c.trainers == "workers" and not c.private,
    cells=_workers(Updates.EACH, Updates.SOME, Updates.MERGED, Samples.ALL),
    also="the metrics and the printed lines of each worker",
    remains=(
        "All nodes have the same samples.",
        "Workers see single updates if they merge them (`exchange='sharded'`).",
    ),
)

COLUMNS: tuple[Column, ...] = (
    SWAPS,
    ROUNDS,
    CLIPPED,
    NOBODY,
    SECURE,
    PRIVATE,
    PRIVATE_NOISED,
    PRIVATE_SAMPLES,
    PRIVATE_MASKED,
    PRIVATE_MASKED_NOISED,
    PLAIN,
)
"""All columns. One of them applies to each choice without a contradiction."""


def column_for(choice: Choice) -> Column:
    """Return the column of a training by its settings, which do not contradict each other."""
    [column] = [column for column in COLUMNS if column.applies(choice)]
    return column


def tables() -> list[str]:
    """Return the lines in Markdown of a table for peers, one for workers, and the meaning of their words."""
    lines = []
    for member in (Party.PEER, Party.WORKER):
        columns = [column for column in COLUMNS if member in column.cells]
        lines += [f"| party | {' | '.join(column.name for column in columns)} |", f"|---|{'---|' * len(columns)}"]
        for party in columns[0].cells:
            cells = [column.cells[party] for column in columns]
            texts = [f"{cell.updates.value} / {cell.samples.value}" for cell in cells]
            lines.append(f"| {columns[0].name_of(party)} | {' | '.join(texts)} |")
        lines.append("")
    lines += ["| word | updates that the party sees |", "|---|---|"]
    lines += [f"| {update.value} | {update.phrase} |" for update in Updates]
    return [
        *lines,
        "",
        f"{Samples.BY_CODE.value}: {Samples.BY_CODE.phrase}, because the master's code runs on the workers.",
    ]


def notes() -> list[str]:
    """Return an item of a list in Markdown for each column: its settings, and what the cells do not tell."""
    return [
        f"- **{column.name}**: {column.how}. The {_server(column)} also learns {column.also}. {' '.join(_all_risks(column))}"
        for column in COLUMNS
    ]


def _all_risks(column: Column) -> tuple[str, ...]:
    if not column.depends_on_merge:
        return column.remains
    revealed = sorted(filter(None, (revealed_by(MERGE.read(name)) for name in MERGE.names)))
    return (*column.remains, *revealed)


def _server(column: Column) -> str:
    return "server" if Party.PEER in column.cells else "master"
