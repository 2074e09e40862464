"""The files and facts that a server of peers sends to browsers: the page, the engine and the layer graph. Runs on the server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True, kw_only=True)
class BrowserModel:
    """A model for browsers: its layer graph, or why they cannot train it.

    Args:
        graph: The layer graph; empty if browsers cannot train the model.
        refusal: Why they cannot; empty if they can.
    """

    graph: Mapping[str, Any]
    refusal: str = ""

    def facts(self, plan: Plan, run: str, peer: int) -> str:
        """Return what a page needs to begin, as JSON."""
        plain = asdict(plan)
        return json.dumps(
            {
                "graph": self.graph,
                "plan": plain,
                "name": self.graph["name"],
                "classes": plain.get("classes", ()),
                "run": run,
                "peer": peer,
                "visible": seen_by(plan),
            }
        )


def seen_by(plan: Plan) -> dict[str, Any]:
    """Return the updates and samples that each party sees, as the page shows them."""
    column = visible.column_for(plan.choice)
    return {
        "update": visible.UPDATE,
        "rows": [(row.party, row.updates) for row in column.rows()],
        "samples": column.seers(shards=plan.shards > 0),
        "before": column.before,
        "metrics": column.metrics,
        "remains": " ".join(column.remaining(plan.choice)),
    }


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
