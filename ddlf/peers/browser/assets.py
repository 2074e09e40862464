"""The files of the engine, as a server sends them to browsers. Runs on the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

ENGINE = Path(__file__).parent / "engine"
POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self'; connect-src 'self'"
"""The Content-Security-Policy under which the engine runs. WebAssembly needs ``wasm-unsafe-eval``.

A page must not be cross-origin isolated: jax-js would start threads from ``blob:``, which this policy blocks, and wait
for them.
"""
KIND = "text/javascript; charset=utf-8"
"""The content type of all files."""


@cache
def assets() -> Mapping[str, bytes]:
    """Return the content of each file of the engine by its path below the engine, such as ``layers/core.js``.

    The worker of a page is ``worker.js``.
    """
    return {path.relative_to(ENGINE).as_posix(): path.read_bytes() for path in sorted(ENGINE.rglob("*.js"))}
