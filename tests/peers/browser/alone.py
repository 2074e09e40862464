"""Run the page of one peer in Chromium, with the real engine. A simple file server replaces the server of peers."""

from __future__ import annotations

import contextlib
import importlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlf.peers.browser.assets import assets
from ddlf.peers.front import HEADERS
from tests.monitor.dashboard.browser import opened

if TYPE_CHECKING:
    from playwright.async_api import Browser

PAGE = Path(importlib.import_module("ddlf.peers.browser").__file__ or "").parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
CODE = "a-code-of-one-time"


def digits_model(seed: int = 0) -> Any:
    """Return a compiled model of digits with 8 x 8 points."""
    keras = importlib.import_module("keras")
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((8, 8, 1)), keras.layers.Conv2D(8, 3, activation="relu"), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(10, activation="softmax")], name="digits")
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


class Alone:
    """The files and answers of the simple server.

    Args:
        model: A compiled Keras model.
        classes: Names of the classes.

    Attributes:
        codes: Codes that can still be used.
        answers: Status and text that replace the usual answer of a path.
    """

    def __init__(self, model: Any, classes: tuple[str, ...] = ()) -> None:
        from ddlf.extras import provided
        from ddlf.peers.browser.graph import layer_graph
        from ddlf.peers.pages import seen_by
        from ddlf.peers.plan import Plan
        from ddlf.peers.sets import layout_of

        named = provided("named_weights", "tests")(model)
        layout = layout_of({name: np.asarray(array) for name, array in named.items()})
        self.set = bytes(layout.encode([np.array(array) for array in named.values()]))
        self.graph = {"graph": layer_graph(model, named), "plan": {}, "name": model.name, "classes": list(classes)}
        self.graph["visible"] = asdict(seen_by(Plan()))
        self.codes = {CODE}
        self.answers: dict[str, tuple[int, bytes]] = {}

    def answer(self, path: str, code: str, cookie: str) -> tuple[int, bytes, str]:
        """Return status, content and type of the answer to a request."""
        if path in self.answers:
            return *self.answers[path], "text/plain"
        if path == "/join":
            is_known = code in self.codes
            self.codes.discard(code)
            return (200, b"{}", "application/json") if is_known else (403, b"unknown code", "text/plain")
        if path == "/graph":
            is_known = "key=" in cookie or code in self.codes
            if code and not is_known:
                return 403, b"unknown code", "text/plain"
            return (200 if is_known else 401), json.dumps(self.graph if is_known else {}).encode(), "application/json"
        if path == "/set":
            return 200, self.set, "application/octet-stream"
        if path == "/engine/worker.js":
            return 200, Path(__file__).with_name("alone.js").read_bytes(), KINDS[".js"]
        if path.startswith("/engine/"):
            return 200, assets()[path.removeprefix("/engine/")], KINDS[".js"]
        file = PAGE / ("index.html" if path == "/" else path.removeprefix("/page/"))
        return (200, file.read_bytes(), KINDS[file.suffix]) if file.is_file() else (404, b"", "text/plain")


@contextlib.contextmanager
def served(alone: Alone) -> Iterator[str]:
    """Serve on loopback, and yield the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            status, content, kind = alone.answer(
                path, self.headers.get("X-DDLF-Code", ""), self.headers.get("Cookie", "")
            )
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Security-Policy", HEADERS["Content-Security-Policy"])
            if path == "/join" and status == 200:
                self.send_header("Set-Cookie", "key=1; HttpOnly; SameSite=Strict")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.asynccontextmanager
async def joined(browser: Browser, alone: Alone, *, code: str = CODE, **options: Any) -> AsyncIterator[Any]:
    """Yield the page of a peer that has opened its link."""
    with served(alone) as url:
        async with opened(browser, f"{url}/#{code}", **options) as page:
            yield page
