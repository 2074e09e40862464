"""The files and facts that a server of peers sends to browsers: the page, the engine and the layer graph. Runs on the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ddlf.errors import ConfigError
from ddlf.peers.browser import assets
from ddlf.peers.plan import Plan
from ddlf.privacy import visible

PAGE = Path(assets.__file__).parent / "page"
KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": assets.KIND,
    ".svg": "image/svg+xml",
}
"""The content type of each kind of file. Other files are not sent."""
INDEX = "page/index.html"


@dataclass(frozen=True, slots=True)
class File:
    """A file as a browser gets it."""

    kind: str
    content: bytes


@cache
def files() -> Mapping[str, File]:
    """Return all files by their paths: ``""`` is the page, ``page/...`` its parts, and ``engine/...`` the engine.

    They are read once, so a path in a request never reaches the disk.
    """
    files_by_path = {f"engine/{name}": File(assets.KIND, content) for name, content in assets.assets().items()}
    for path in sorted(PAGE.rglob("*")):
        if path.suffix in KINDS:
            files_by_path[f"page/{path.relative_to(PAGE).as_posix()}"] = File(KINDS[path.suffix], path.read_bytes())
    return files_by_path | ({"": files_by_path[INDEX]} if INDEX in files_by_path else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """The updates and samples that each party sees, as the page shows them.

    Args:
        update: The meaning of "update", as a sentence.
        rows: The name of each party, and the updates that it sees, as phrases.
        samples: The parties that see samples, as a clause.
        before: How an update is protected before others see it; empty if it is not.
        metrics: Whether the server learns losses and accuracies.
        remains: The remaining risks, as sentences.
    """

    update: str
    rows: tuple[tuple[str, str], ...]
    samples: str
    before: str
    metrics: bool
    remains: str


@dataclass(frozen=True, kw_only=True)
class PageModel:
    """The answer to ``/graph``: what the page of a peer needs to begin.

    Args:
        graph: The layer graph.
        plan: The plan.
        name: Name of the model.
        classes: Names of the classes; empty if labels are numbers.
        run: Name of the run.
        peer: Number of the peer; 0 before it has joined.
        visible: The updates and samples that each party sees.
    """

    graph: Mapping[str, Any]
    plan: Plan
    name: str
    classes: tuple[str, ...]
    run: str
    peer: int
    visible: Visible


@dataclass(frozen=True, kw_only=True)
class BrowserModel:
    """A model for browsers: its layer graph, or why they cannot train it.

    Args:
        graph: The layer graph; empty if browsers cannot train the model.
        refusal: Why they cannot; empty if they can.
    """

    graph: Mapping[str, Any]
    refusal: str = ""

    def for_page(self, plan: Plan, run: str, peer: int) -> PageModel:
        """Return what the page of a peer needs to begin."""
        return PageModel(
            graph=self.graph,
            plan=plan,
            name=str(self.graph["name"]),
            classes=plan.classes,
            run=run,
            peer=peer,
            visible=seen_by(plan),
        )


def seen_by(plan: Plan) -> Visible:
    """Return the updates and samples that each party sees."""
    column = visible.column_for(plan.choice)
    return Visible(
        update=visible.UPDATE,
        rows=tuple((row.party, row.updates) for row in column.rows()),
        samples=column.seers(shards=plan.shards > 0),
        before=column.before,
        metrics=column.metrics,
        remains=" ".join(column.remaining(plan.choice)),
    )


def browser_model(model: Any, weights: Mapping[str, Any]) -> BrowserModel:
    """Return a Keras model for browsers. This is slow: call it before the server starts.

    Args:
        model: The compiled model.
        weights: Its variables by their names in sets.
    """
    from ddlf.peers.browser.graph import layer_graph

    try:
        return BrowserModel(graph=layer_graph(model, weights))
    except ConfigError as error:
        return BrowserModel(graph={}, refusal=f"{error.message}; {error.hint}")


NO_BROWSERS = BrowserModel(graph={}, refusal="this server has no model for browsers; Python peers can train it")
