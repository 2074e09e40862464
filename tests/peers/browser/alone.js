// A worker with the messages of the real one, and the real engine, but without a server: it trains alone.

import { start } from "/engine/arrays.js";
import { Model } from "/engine/model.js";
import { Layout } from "/engine/safetensors.js";
import { Trainer, turn } from "/engine/trainer.js";

const SET_AFTER = 20, REPORT_AFTER = 10;
let trainer = null, layout = null, samples = 0, isRunning = false;
const began = performance.now(), tell = (told, more) => postMessage({ told, ...more });

function report() {
  const means = trainer.means(), posts = Math.floor(trainer.batches / SET_AFTER), seconds = (performance.now() - began) / 1000;
  const accuracy = Object.entries(means).find(([name]) => name.endsWith("accuracy"))?.[1] ?? -1;
  tell("progress", {
    batches: trainer.batches, batchesPerSecond: trainer.batches / seconds, loss: means.loss, accuracy, bytesUp: posts * layout.bytes,
    bytesDown: posts * layout.bytes, posts, merges: Math.max(posts - 1, 0), samples, seconds, epsilon: 1.25,
  });
}

async function run() {
  isRunning = true;
  tell("state", { state: "training" });
  while (isRunning) {
    samples += (await trainer.batch()).samples;
    if (trainer.batches % REPORT_AFTER === 0) report();
    await turn();
  }
}

const acts = {
  async join({ data, seed }) {
    tell("state", { state: "connecting" });
    const { graph } = await (await fetch("/graph")).json(), set = await (await fetch("/set")).arrayBuffer();
    tell("state", { state: "measuring" });
    const device = await start("wasm"), model = new Model(graph, { seed });
    layout = Object.assign(new Layout(set), { bytes: set.byteLength });
    model.setWeights(layout.decode(set));
    trainer = new Trainer(model, data, { seed });
    tell("line", { text: "joined    as peer 1" });
    run().catch(({ message }) => tell("failed", { why: message, hint: "" }));
    return { peer: 1, device, parameters: 0, speeds: { wasm: 100 } };
  },
  pause() { isRunning = false; tell("state", { state: "paused" }); },
  resume() { run(); },
  stop() { isRunning = false; tell("state", { state: "ended", why: "you stopped it" }); },
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
