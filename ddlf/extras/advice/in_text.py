"""Where in a model's text something is written, and how it would be changed there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddlf.extras.advice.source import IGNORE, Ignore, Place

OF_TRAIN = {"optimizer": ("learning_rate", "optimizer", "clipping"), "metric": ("metrics",)}
"""Keys of the block ``train`` that may say something, what says most first."""


class Written:
    """A text.

    Args:
        notation: What was loaded of it.

    Attributes:
        path: The file.
    """

    def __init__(self, notation: Any) -> None:
        self.path: Path = notation.path
        self._text: str = notation.parsed.text
        self._line_of: Callable[[int], int] = notation.line_of
        self._layers: Mapping[str, int] = notation.places
        self._blocks = {head.name: head.block for head in notation.parsed.graph.heads}
        self._inputs = [node.name for node in notation.parsed.graph.nodes if node.operator == "input"]
        self._statements: Mapping[tuple[str, str], int] = notation.statement_places()

    def model(self, what: str, name: str) -> Place | None:
        """Where the text says something of the model: a layer, a loss, a metric, the optimizer; None if it does not.

        Args:
            what: What, as ``Found.at`` has it.
            name: Its name.
        """
        if what == "layer":
            return self._at(self._layers.get(name))
        if what == "loss":
            block = self._blocks.get(name) or next(iter(self._blocks.values()))
            return self._first((block, "loss"), ("train", "loss"), (block, "output"))
        if what in OF_TRAIN:
            return self._first(*(("train", key) for key in OF_TRAIN[what]))
        return None

    def app(self, what: str, name: str) -> Place:
        """Where a text that is the whole app says something, or would."""
        found = self.model(what, name)
        if found is None and what == "setting":
            found = self._first(("train", name))
        if found is None and (what == "data" or (what, name) == ("method", "load_dataset")):
            array, _, block = name.partition("[")
            block = block.strip("]'\"") or (
                next(iter(self._blocks.values())) if array.startswith("y") else self._inputs[0]
            )
            block = self._blocks.get(block, block)
            found = self._first(("train", "data"), (block, "output" if array.startswith("y") else "input"))
        if found is None and what == "layer":  # an input, or what scales one
            found = self._first((name, "input"), ("train", "scaling"), (self._inputs[0], "input"))
        return found or Place(self.path, self._line(min(self._statements.values(), default=0)))

    def ignores(self) -> Iterator[Ignore]:
        """Its comments by which findings are not wanted."""
        for number, line in enumerate(self._text.splitlines(), 1):
            if "ddlf:" not in line or (found := IGNORE.search(line)) is None:
                continue
            alone = not line[: found.start()].strip()
            for id in (found[1] or "").split(","):
                lines = frozenset({number, number + 1} if alone else {number})
                yield Ignore(Place(self.path, number), id.strip(), found[2].strip(), lines)

    def _first(self, *keys: tuple[str, str]) -> Place | None:
        return next((self._at(self._statements[key]) for key in keys if key in self._statements), None)

    def _at(self, at: int | None) -> Place | None:
        return None if at is None else Place(self.path, self._line(at))

    def _line(self, at: int) -> int:
        return self._line_of(at)


def text_of(app: Any) -> Written | None:
    """The text of an app's model; None if it has none."""
    model = vars(app).get("model")
    texts = (
        each for each in (model, getattr(model, "notation", None), getattr(app, "notation", None)) if _is_text(each)
    )
    notation = next(texts, None)
    return None if notation is None else Written(notation)


def _is_text(model: Any) -> bool:
    """Whether an object is a model as text: the part for these may not be installed."""
    return hasattr(type(model), "statement_places")
