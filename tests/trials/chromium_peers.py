"""Run measurements of ``benchmarks`` with peers in Debian's Chromium.

``python -m tests.trials.chromium_peers accuracy [options of benchmarks.cluster_peer accuracy]``
``python -m tests.trials.chromium_peers webnn [options of benchmarks.webnn]``

The first command compares two workers and one peer in Chromium with three workers. The second one is the WebNN experiment
with a Chromium for each peer. Such a peer trains at the full speed of its core, so compare batches and not seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cluster_peer, webnn
from tests.monitor.dashboard.browser import chromium, opened
from tests.peers.browser.joining import DOCUMENT, BrowserPeer

ROOT = Path(__file__).parents[2]
LOOK_S = 0.1
LAST = ("ended", "over")
"""The final states of a peer: it has left, or the training is over."""


async def take_part(browser: Any, link: str, x: Any, y: Any, **options: Any) -> dict[str, Any]:
    """Train in a new page until the peer has left, and return its progress."""
    url = link.partition("/#")[0]
    async with opened(browser, url + DOCUMENT) as page:
        peer = BrowserPeer(page)
        status, body = await peer.session(link)
        if status != 200:
            raise RuntimeError(body)
        answer = await peer.join(x, y, **options)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        while not [message for message in await peer.messages("state") if message["state"] in LAST]:
            if failed := await peer.messages("failed"):
                raise RuntimeError(str(failed))
            await asyncio.sleep(LOOK_S)
        return (await peer.messages("progress"))[-1]


async def be_a_peer(link: str, file: str, batches: int) -> None:
    """Train on a file, and leave after this number of batches."""
    with np.load(file) as data:
        x, y = data["x_train"], data["y_train"]
    async with chromium() as browser:
        progress = await take_part(browser, link, x, y, name="chromium", mostUpdates=batches)
    print(f"trained {progress['batches']} batches", flush=True)


async def be_a_peer_of_webnn(samples: int) -> None:
    """Take part in one run for each line of standard input, like the peers of ``benchmarks.webnn``."""
    from ddlf.data.datasets import load_mnist

    (x, y), _ = load_mnist()
    async with chromium() as browser:
        print("ready", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            request = json.loads(line)
            progress = await take_part(browser, request["link"], x[:samples], y[:samples], seed=request["seed"])
            print(json.dumps({"updates": progress["batches"], "merges": progress["merges"]}), flush=True)


def chromium_peer(folder: Path, link: str, file: str, batches: int) -> subprocess.Popen[str]:
    """Start a peer in Chromium that leaves after this number of batches."""
    words = [sys.executable, "-m", "tests.trials.chromium_peers", "peer", link, str(folder / file), str(batches)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(words: Sequence[str]) -> None:
    """Run the command that the command line names."""
    match list(words):
        case ["peer", link, file, batches]:
            asyncio.run(be_a_peer(link, file, int(batches)))
        case ["webnn-peer", samples]:
            asyncio.run(be_a_peer_of_webnn(int(samples)))
        case ["accuracy", *more]:
            cluster_peer.PEERS["chromium"] = chromium_peer
            cluster_peer.main(["accuracy", "--kind", "chromium", *more])
        case ["webnn", *more]:
            options = webnn.parser().parse_args(more)
            options.samples = options.samples or 10_000  # the page receives each sample
            webnn.main(options, peer=("tests.trials.chromium_peers", "webnn-peer", options.samples))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(sys.argv[1:])
