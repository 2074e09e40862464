"""A web server for a folder of data sets that fails on purpose. Runs on the master, for workers on the same machine."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ddlf.errors import ConfigError

KINDS = ("error", "throttle", "stall", "cut", "damage")


def check_shares(shares: dict[str, float]) -> None:
    """Refuse invalid fractions of requests that shall fail.

    Args:
        shares: Fractions by kind of fault.

    Raises:
        ConfigError: A kind does not exist, or the fractions are out of range.
    """
    if unknown := set(shares) - set(KINDS):
        raise ConfigError(f"no fault of a store is named {', '.join(sorted(unknown))}", hint=f"use {', '.join(KINDS)}")
    if any(share < 0 for share in shares.values()) or sum(shares.values()) > 1:
        raise ConfigError(f"shares must be from 0 to 1 together, got {shares}")


class FaultyStore:
    """Serves a folder at ``url``, read-only, until it is closed. It is a context manager.

    Args:
        folder: Folder to serve.
        seed: Seed for the choice of failing requests.

    Attributes:
        url: Address to use as a place.
        served: How often each file was sent without a fault, by its path below the folder.
        failed: How often each kind of fault happened.
        ranges: Whether it serves ranges of files, like most servers.
        ranged: Number of bytes that were sent in ranges.
    """

    def __init__(self, folder: str | Path, *, seed: int = 0) -> None:
        self._folder = Path(folder).resolve()
        self._chance, self._lock = random.Random(seed), threading.Lock()
        self._shares: dict[str, float] = {}
        self._ended = threading.Event()
        self.served: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.ranges, self.ranged = True, 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"store": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FaultyStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server, and end all requests that still wait."""
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fail(self, **shares: float) -> None:
        """Make a fraction of the requests fail from now on. Without an argument, none fail.

        Args:
            shares: Fractions by kind, from 0 to 1, together at most 1. ``error`` answers 500, ``throttle`` answers 503,
                ``stall`` sends half and then stays silent, ``cut`` sends half and hangs up, ``damage`` flips a bit.

        Raises:
            ConfigError: A kind does not exist, or the fractions are out of range.
        """
        check_shares(shares)
        with self._lock:
            self._shares = dict(shares)

    def _fault(self) -> str:
        with self._lock:
            thrown, kind = self._chance.random(), ""
            for name, share in self._shares.items():
                if 0 <= thrown < share:
                    kind = name
                    self.failed[name] += 1
                thrown -= share
        return kind


class _Handler(BaseHTTPRequestHandler):
    store: FaultyStore
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = unquote(self.path).strip("/")
        path = (self.store._folder / name).resolve()
        if not path.is_relative_to(self.store._folder) or not path.is_file():
            self._answer(404, b"")
            return
        data, kind = path.read_bytes(), self.store._fault()
        if kind in ("error", "throttle"):
            self._answer(500 if kind == "error" else 503, b"")
            return
        if kind == "damage":
            data = data[:-1] + bytes([data[-1] ^ 1])
        if not kind:
            with self.store._lock:  # count before the answer is sent
                self.store.served[name] += 1
        status, part = self._range(data)
        half = len(part) // 2
        self._answer(status, part[:half] if kind in ("stall", "cut") else part, len(part))
        if kind == "stall":
            self.wfile.flush()
            self.store._ended.wait()
        if kind in ("stall", "cut"):
            self.close_connection = True

    def do_HEAD(self) -> None:
        path = (self.store._folder / unquote(self.path).strip("/")).resolve()
        exists = path.is_relative_to(self.store._folder) and path.is_file()
        self._answer(200 if exists else 404, b"", path.stat().st_size if exists else 0)

    def _range(self, data: bytes) -> tuple[int, bytes]:
        """Return the requested range of a file, with the status of the answer."""
        requested = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not (requested and self.store.ranges):
            return 200, data
        part = data[int(requested[1]) : int(requested[2]) + 1]
        with self.store._lock:
            self.store.ranged += len(part)
        return 206, part

    def _answer(self, status: int, data: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        if self.store.ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        try:
            self.wfile.write(data)
        except ConnectionError:  # the client has disconnected
            self.close_connection = True

    def log_message(self, *args: Any) -> None:
        """Do not print the requests, as the standard library's server would do."""
