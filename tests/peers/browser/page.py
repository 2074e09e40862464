"""A page with the engine in Debian's Chromium, under the policy that pages of peers have."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.monitor.dashboard.browser import chromium, opened

ENGINE = Path(__file__).parents[3] / "ddlf" / "peers" / "browser" / "engine"
POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'"
HTML = b"<!doctype html><title>engine</title><script type=module src=/cases.js></script>"
BOOT = """async (device) => {
  const [arrays, model, metrics, cases] = await Promise.all(
    ["/engine/arrays.js", "/engine/model.js", "/engine/metrics.js", "/cases.js"].map((name) => import(name)));
  globalThis.engine = { ...arrays, ...model, ...metrics, ...cases };
  return arrays.start(device);
}"""
COUNT = """
const all = [];
globalThis.Map = class extends Map { constructor(...given) { super(...given); all.push(this); } };
const isBuffers = (map) => { const [first] = map.values(); return first && typeof first === "object" && "ptr" in first && "ref" in first; };
globalThis.buffersInUse = () => all.filter(isBuffers).reduce((sum, map) => sum + map.size, 0);
"""
"""Counts the buffers of jax-js, which keeps them in a map."""


class _Files(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path in ("/", "/favicon.ico"):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(HTML)
        else:
            super().do_GET()

    def translate_path(self, path: str) -> str:
        head, _, rest = path.lstrip("/").partition("/")
        return str(ENGINE / rest) if head == "engine" else str(Path(__file__).parent / head)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Serve the engine on loopback, and yield the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Files)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.asynccontextmanager
async def engine_page(device: str = "wasm", flags: tuple[str, ...] = ()) -> AsyncIterator[Any]:
    """Yield a page whose ``engine`` has the modules of the engine."""
    with served() as url:
        async with chromium(*flags) as browser, opened(browser, url) as page:
            await page.add_init_script(COUNT)
            await page.reload()
            assert await page.evaluate(BOOT, device) == device
            yield page
