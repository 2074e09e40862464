"""The worker behind a page: it trains while the page does other things."""

import base64
import json

import pytest
from safetensors.numpy import load, save

from tests.later import Later
from tests.patience import PATIENCE_S
from tests.peers.browser.page import engine_page

pytestmark = pytest.mark.slow
models = Later("tests.peers.browser.models")
np = Later("numpy")
BEGIN = """async ({ text, set }) => {
  const { graph, batches } = JSON.parse(text);
  const bytes = (part) => Uint8Array.from(atob(part), (letter) => letter.charCodeAt(0)).buffer;
  const data = { inputs: engine.opened(batches[0].inputs), labels: engine.opened(batches[0].labels) };
  const worker = new Worker("/engine/worker.js", { type: "module" }), waiting = new Map();
  let count = 0;
  globalThis.told = [];
  worker.onmessage = ({ data: message }) => {
    if (message.told) return told.push(message);
    waiting.get(message.id)(message);
    return waiting.delete(message.id);
  };
  globalThis.ask = (what, more = {}) => new Promise((resolve) => {
    waiting.set(++count, resolve);
    worker.postMessage({ do: what, id: count, ...more });
  });
  globalThis.asked = async (what, part) => {
    const { set, ...answer } = await ask(what, part ? { set: bytes(part) } : {});
    return set ? { ...answer, set: btoa(String.fromCharCode(...new Uint8Array(set))) } : answer;
  };
  return ask("open", { graph, set: bytes(set), data, batchSize: 2 });
}"""


def as_set(case):
    """Return the weights of a case as a set, written by the library of safetensors."""
    return base64.b64encode(save({name: np.ascontiguousarray(value) for name, value in case.weights.items()})).decode()


async def test_worker_trains_while_the_page_is_blocked_and_between_batches_takes_and_gives_sets():
    case = models.compiled("worker", "mse", lambda rng: models.numbers(rng, 5, 3), metrics=["mae"])
    first = as_set(case)
    async with engine_page() as page:
        page.set_default_timeout(PATIENCE_S * 1000)
        opened = await page.evaluate(BEGIN, {"text": json.dumps(case.written), "set": first})
        assert opened["device"] == "wasm"
        assert opened["parameters"] == case.model.count_params()
        assert (await page.evaluate("asked('get')"))["set"] == first  # the same bytes as the library's

        await page.evaluate("asked('start')")
        await page.evaluate(
            "async () => { while (!told.length) await new Promise((resolve) => setTimeout(resolve, 10)); }"
        )
        before, after = await page.evaluate(
            """async () => {
              const { batches: before } = await asked("get");
              const end = performance.now() + 500;
              while (performance.now() < end);
              return [before, (await asked("get")).batches];
            }"""
        )
        assert after > before + 1

        paused = (await page.evaluate("asked('pause')"))["batches"]
        assert paused >= after
        assert (await page.evaluate("asked('get')"))["batches"] == paused
        reports = await page.evaluate("told")
        assert sum(report["samples"] for report in reports) > 2 * (len(reports) - 1)
        assert set(reports[0]["means"]) == {"loss", "mae"}

        trained = load(base64.b64decode((await page.evaluate("asked('get')"))["set"]))
        assert any((trained[name] != value).any() for name, value in load(base64.b64decode(first)).items())
        assert (await page.evaluate("([set]) => asked('put', set)", [first]))["batches"] == paused
        assert (await page.evaluate("asked('get')"))["set"] == first

        for what, given, sentence in (
            ("put", save({"dense/kernel": np.zeros((2, 2), "f4")}), "another model"),
            ("put", b"\x08\x00\x00\x00\x00\x00\x00\x00{", "cut off"),
            ("dance", b"", "cannot do dance"),
        ):
            more = [what, base64.b64encode(given).decode()]
            answer = await page.evaluate("([what, set]) => asked(what, set)", more)
            assert sentence in answer["error"]
        assert (await page.evaluate("asked('get')"))["set"] == first
        assert await page.evaluate("asked('close')")
        assert page.wrong == []
