"""A peer in Debian's Chromium, without the usual page: a document of the server that starts the web worker of a peer."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np

from tests.patience import PATIENCE_S

MODEL = """
digits:input shape=[64];
digits:output shape=[10];
digits:layers Dense(units=32, activation=relu), Dense(units=10, activation=softmax);
digits:loss SCE;
train:optimizer SGD(learning_rate=0.1);
train:metrics accuracy;
"""
"""A model of digits for browsers and Python peers."""
DOCUMENT = "/engine/rates.js"
"""A document of the server's origin that does nothing by itself."""
BOOT = """() => {
  const worker = new Worker("/engine/worker.js", { type: "module" }), waiting = new Map();
  let count = 0;
  globalThis.told = [];
  worker.onmessage = ({ data }) => {
    if (data.told) return told.push(data);
    waiting.get(data.id)(data);
    waiting.delete(data.id);
  };
  worker.onerror = ({ message }) => console.error(`worker: ${message}`);
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
  const array = ({ data, shape, kind }) => ({ data: new globalThis[kind](bytes(data)), shape });
  const arrays = (given) => given && { inputs: given.inputs.map(array), labels: given.labels.map(array) };
  globalThis.ask = (what, given = {}) => new Promise((resolve) => {
    waiting.set(++count, resolve);
    worker.postMessage({ ...given, do: what, id: count });
  });
  globalThis.joinWith = ({ data, test, ...more }) => ask("join", { ...more, data: arrays(data), test: arrays(test) });
  globalThis.predicted = async (inputs) => {
    const { outputs: [{ data, shape }] } = await ask("predict", { inputs: [array(inputs)] });
    return { data: [...data], shape };
  };
}"""
SESSION = """async (code) => {
  const answer = await fetch("/join", { headers: { "X-DDLF-Code": code } });
  return [answer.status, await answer.text()];
}"""


def packed(array: Any) -> dict[str, Any]:
    """Return an array for the page."""
    is_integer = array.dtype.kind in "iu"
    data = np.ascontiguousarray(array, dtype="<i4" if is_integer else "<f4")
    kind = "Int32Array" if is_integer else "Float32Array"
    return {"data": base64.b64encode(data.tobytes()).decode(), "shape": list(array.shape), "kind": kind}


class BrowserPeer:
    """A peer in a page.

    Args:
        page: The page, at ``DOCUMENT`` of the server.
    """

    def __init__(self, page: Any) -> None:
        self.page = page

    async def session(self, link: str) -> tuple[int, str]:
        """Trade the code of a link for the cookie, and return status and body of the answer."""
        status, body = await self.page.evaluate(SESSION, link.partition("#")[2])
        return status, body

    async def join(self, x: Any, y: Any, **options: Any) -> dict[str, Any]:
        """Begin to train on data, and return the answer of the worker."""
        await self.page.evaluate(BOOT)
        settings = {"data": {"inputs": [packed(x)], "labels": [packed(y)]}, "device": "wasm", "test": None}
        answer: dict[str, Any] = await self.page.evaluate("joinWith", settings | options)
        return answer

    async def ask(self, action: str, **arguments: Any) -> Any:
        """Send a message to the worker, and return its answer."""
        return await self.page.evaluate("([action, options]) => ask(action, options)", [action, arguments])

    async def messages(self, kind: str) -> list[dict[str, Any]]:
        """Return the messages of one kind that the worker has sent."""
        received: list[dict[str, Any]] = await self.page.evaluate(
            "(kind) => told.filter(({ told }) => told === kind)", kind
        )
        return received

    async def until(self, kind: str, holds: Any) -> dict[str, Any]:
        """Wait until a message of this kind fulfils ``holds``, and return it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                received = await self.messages(kind)
                if matching := [message for message in received if holds(message)]:
                    return matching[0]
                failed = await self.messages("failed") if kind != "failed" else []
                assert not failed, failed
                await asyncio.sleep(0.05)

    async def predict(self, x: Any) -> Any:
        """Return the outputs of the live model."""
        outputs = await self.page.evaluate("predicted", packed(x))
        return np.array(outputs["data"], np.float32).reshape(outputs["shape"])

    async def set(self) -> bytes:
        """Return the live weights as a set."""
        content = await self.page.evaluate("async () => [...new Uint8Array((await ask('get')).set)]")
        return bytes(content)
