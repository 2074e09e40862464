// A worker with the messages of the real one, and the real engine, but without a server: it trains alone.

import { start } from "/engine/arrays.js";
import { Model } from "/engine/model.js";
import { Layout } from "/engine/safetensors.js";
import { Trainer } from "/engine/trainer.js";

const SET_AFTER = 20;
let trainer = null, layout = null, posts = 0, samples = 0;
const began = performance.now(), tell = (told, more) => postMessage({ told, ...more });

function report({ batches, samples: trained, seconds, means }) {
  posts = Math.floor(batches / SET_AFTER);
  samples += trained;
  const accuracy = Object.entries(means).find(([name]) => name.endsWith("accuracy"))?.[1] ?? -1;
  tell("progress", {
    batches, batchesPerSecond: trained / 32 / seconds, loss: means.loss, accuracy, bytesUp: posts * layout.bytes, bytesDown: posts * layout.bytes, posts,
    merges: Math.max(posts - 1, 0), samples, seconds: (performance.now() - began) / 1000,
  });
}

const acts = {
  async join({ data, seed }) {
    tell("state", { state: "connecting" });
    const { graph } = await (await fetch("/graph")).json(), set = await (await fetch("/set")).arrayBuffer();
    tell("state", { state: "measuring" });
    const device = await start("wasm"), model = new Model(graph, { seed });
    layout = Object.assign(new Layout(set), { bytes: set.byteLength });
    model.setWeights(layout.decode(set));
    trainer = new Trainer(model, data, { seed, tell: report, fail: ({ message }) => tell("failed", { why: message, hint: "" }) });
    trainer.start();
    tell("line", { text: "joined    as peer 1" });
    tell("state", { state: "training" });
    return { peer: 1, device, parameters: 0, speeds: { wasm: 100 } };
  },
  async pause() { await trainer.pause(); tell("state", { state: "paused" }); },
  async resume() { trainer.start(); tell("state", { state: "training" }); },
  async stop() { await trainer.pause(); tell("state", { state: "ended", why: "you stopped it" }); },
  share: () => ({}),
  get: () => trainer.between(async () => ({ set: layout.encode(await trainer.model.weights()) })),
  predict: ({ inputs }) => trainer.between(async () => ({ outputs: await trainer.model.predict(inputs) })),
};

onmessage = async ({ data: { do: what, id, ...more } }) => {
  try {
    postMessage({ id, ...(await acts[what](more)) });
  } catch (error) {
    postMessage({ id, error: error.message });
  }
};
