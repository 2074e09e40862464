"""A page with the engine in Debian's Chromium, under the content security policy of a peer's page."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ddlf.peers.browser.assets import KIND, POLICY, assets
from tests.monitor.dashboard.browser import chromium, opened

HERE = Path(__file__).parent
HTML = b"<!doctype html><title>engine</title><script type=module src=/cases.js></script>"
BOOT = """async (device) => {
  const [arrays, model, metrics, cases] = await Promise.all(
    ["/engine/arrays.js", "/engine/model.js", "/engine/metrics.js", "/cases.js"].map((name) => import(name)));
  globalThis.engine = { ...arrays, ...model, ...metrics, ...cases };
  return arrays.start(device);
}"""
COUNT = """
let all = [], most = 1000;
const living = () => all.map((one) => one.deref()).filter((map) => map);
globalThis.Map = class extends Map {
  constructor(...given) {
    super(...given);
    all.push(new WeakRef(this));
    if (all.length > most) { // forget the maps that are gone, or this count itself would fill the memory
      all = all.filter((one) => one.deref());
      most = 1000 + 2 * all.length;
    }
  }
};
const isBuffers = (map) => { const [first] = map.values(); return first && typeof first === "object" && "ptr" in first && "ref" in first; };
globalThis.buffersInUse = () => living().filter(isBuffers).reduce((sum, map) => sum + map.size, 0);
"""
"""Script that counts the buffers of jax-js, which keeps them in a map."""


class _Files(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        head, _, rest = self.path.lstrip("/").partition("/")
        if head == "engine":
            self._send(assets().get(rest), KIND)
        elif head == "cases.js":
            self._send((HERE / head).read_bytes(), KIND)
        else:
            self._send(HTML, "text/html")

    def _send(self, content: bytes | None, kind: str) -> None:
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(content or b"")

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def served() -> Iterator[str]:
    """Serve the engine on loopback, and yield the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Files) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextlib.asynccontextmanager
async def engine_page(device: str = "wasm", flags: tuple[str, ...] = ()) -> AsyncIterator[Any]:
    """Yield a page with the modules of the engine in its global variable ``engine``."""
    with served() as url:
        async with chromium(*flags) as browser, opened(browser, url) as page:
            await page.add_init_script(COUNT)
            await page.reload()
            assert await page.evaluate(BOOT, device) == device
            yield page
