"""Train from a failing store. The bits must equal a training from a folder, and no complete file may be fetched twice.

    python -m tests.trials.stores [--store s3|http] [--share 0.1] [--files 20] [--epochs 3]

``s3`` is a bucket of moto's server in this process (``pip install s3fs 'moto[server]'``), ``http`` a ``FaultyStore``. A
share of the requests fails: with status 500, with status 503, with a truncated body, or with a body that stalls. Two
workers train from a folder, then from the store without a cache, and two other workers from the store with a cache. The
exit code is 1 unless all of this is true:

- The SHA-256 of the weights is the same.
- With the cache, each partition file is fetched once, apart from retries.
- Without it, each file is fetched at most once in each epoch, since a worker may still have it in memory. Each node
  fetches the first file once more, because it reads a sample to build the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import ddlf.data
from ddlf import Cluster
from ddlf.algorithms.weights import digest
from ddlf.data.location import Folder
from ddlf.data.sources import open_source
from ddlf.data.split import split
from ddlf.testing import FaultyStore
from tests.training.models import Blobs, blobs
from tests.trials.options import read_options

KINDS = ("error", "throttle", "cut", "stall")
BUCKET = "ddlf-trial"
SLOTS = 2
FIRST = "v0001/00000.safetensors"


class Stored(Blobs):
    """An app that trains on points in partition files.

    Attributes:
        location: The address of the partition files.
    """

    location = ""
    shuffle = "window:2"

    async def load_dataset(self) -> None:
        """Open the partition files."""
        self.train_data = ddlf.data.open(self.location)


class FaultyBucket:
    """A bucket of moto's server on a thread of this process. It has the attributes and ``fail`` of ``FaultyStore``.

    Args:
        folder: The folder with the content of the bucket.
        seed: Seed for the choice of failing requests.
    """

    def __init__(self, folder: Path, *, seed: int = 0) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):  # type: ignore[misc]
            def log(self, *args: Any) -> None:
                """Print nothing."""

        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._chance, self._lock, self._ended = random.Random(seed), threading.Lock(), threading.Event()
        self._shares: dict[str, float] = {}
        self.served: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.url = f"s3://{BUCKET}/data"
        # The environment of this process, which its workers inherit, has the credentials and the address.
        os.environ.update(AWS_ACCESS_KEY_ID="testing", AWS_SECRET_ACCESS_KEY="testing", AWS_DEFAULT_REGION="us-east-1")
        os.environ["FSSPEC_S3_ENDPOINT_URL"] = f"http://127.0.0.1:{self._server.server_port}"
        import fsspec
        from fsspec.config import conf, set_conf_env

        set_conf_env(conf)  # fsspec reads it only at its import, which may have happened for another store
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        files = fsspec.filesystem("s3", skip_instance_cache=True)
        files.makedirs(BUCKET, exist_ok=True)  # all of moto's servers in a process have the same buckets
        if files.exists(self.url):
            files.rm(self.url, recursive=True)
        files.put(str(folder), self.url, recursive=True)

    def fail(self, **shares: float) -> None:
        """See ``FaultyStore``."""
        with self._lock:
            self._shares = dict(shares)

    def close(self) -> None:
        """End the server."""
        self._ended.set()
        self._server.shutdown()

    def _answer(self, environ: Any, start: Any) -> Iterable[bytes]:
        name, kind = environ["PATH_INFO"].partition("/data/")[2], ""
        body: list[Any] = []
        chunks = self._app(environ, lambda *head, **_: body.append(head))
        data = b"".join(chunks)
        with self._lock:
            thrown = self._chance.random()
            for fault, share in self._shares.items():
                if 0 <= thrown < share:
                    kind = fault
                thrown -= share
            if kind in ("cut", "stall") and (len(data) < 2 or environ["REQUEST_METHOD"] != "GET"):
                kind = ""
            if kind:
                self.failed[kind] += 1
            elif environ["REQUEST_METHOD"] == "GET" and name:
                self.served[name] += 1
        if kind in ("error", "throttle"):
            start("500 Internal Server Error" if kind == "error" else "503 Slow Down", [("Content-Length", "0")])
            return [b""]
        status, headers = body[0][:2]
        start(status, headers)
        return self._part(data, kind) if kind else [data]

    def _part(self, data: bytes, kind: str) -> Iterator[bytes]:
        yield data[: len(data) // 2]
        if kind == "stall":
            self._ended.wait(120)
        raise ConnectionAbortedError  # hangs up


async def trained(cluster: Cluster, location: str, epochs: int) -> str:
    """Train from a location, and return the SHA-256 of the weights."""
    app = Stored(cluster)
    app.location = location
    await app.train_sync(master_epochs=epochs)
    assert app.ledger.is_exact(epochs)
    return digest(app.model.get_weights())


async def compare(kind: str, share: float, files: int, epochs: int, kinds: Iterable[str] = KINDS) -> bool:
    """Train in all three ways, and print the results. Return whether all promises hold."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        x, y = blobs(10 * files)
        np.savez(folder / "a.npz", x=x, y=y)
        split(open_source(folder / "a.npz"), Folder(folder / "data"), [10] * files)
        store = FaultyBucket(folder / "data") if kind == "s3" else FaultyStore(folder / "data")
        stack.callback(store.close)
        expected, fine = "", True
        for cap, ways in (("0", {"folder": 0, "uncached": epochs}), ("1GB", {"cached": 1})):
            os.environ.update(
                DDLF_CACHE=str(folder / "cache"), DDLF_CACHE_SIZE=cap
            )  # workers inherit the environment at their start
            async with Cluster.local(SLOTS) as cluster:
                for way, times in ways.items():
                    store.served.clear()
                    store.failed.clear()
                    store.fail(**{fault: share / len(list(kinds)) for fault in kinds} if times else {})
                    sha = await trained(cluster, str(folder / "data") if way == "folder" else store.url, epochs)
                    store.fail()
                    expected = expected or sha
                    served = {file: count for file, count in store.served.items() if file.endswith(".safetensors")}
                    first = served.get(FIRST, 0) - (SLOTS + 1 if way == "uncached" else 0)
                    fetched = [first if file == FIRST else count for file, count in served.items()]
                    right = (
                        sha == expected and len(fetched) == (files if times else 0) and max(fetched, default=0) <= times
                    )
                    fine = fine and right and (not times or sum(store.failed.values()) > 0)
                    print(
                        f"{way:<9} {sha[:16]}  each of {files} files {min(served.values(), default=0)}-{max(served.values(), default=0)} times, "
                        f"went wrong {dict(store.failed)}{'' if right else '  NOT AS IT SHOULD BE'}",
                        flush=True,
                    )
    return fine


if __name__ == "__main__":
    options = read_options(__doc__, store=("s3", "http"), share=0.1, files=20, epochs=3)
    sys.exit(not asyncio.run(compare(options.store, options.share, options.files, options.epochs)))
