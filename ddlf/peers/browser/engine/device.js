// The choice of a device: some batches are trained on each, and the faster one is taken.

import { start } from "./arrays.js";
import { Model } from "./model.js";
import { Trainer } from "./trainer.js";

const WARM = 2, LEAST = 3, MOST = 200, MEASURED_MS = 500;

async function hasGpu() {
  try {
    return Boolean(await navigator.gpu?.requestAdapter());
  } catch {
    return false;
  }
}

const product = (shape) => shape.reduce((all, n) => all * n, 1);

// Weights to measure with: small, and none is 0.
const someWeights = ({ shapes }) => Object.fromEntries(Object.entries(shapes).map(([name, shape]) => [
  name, Float32Array.from({ length: product(shape) }, (_, n) => 0.01 + 0.04 * ((n * 0.618034) % 1))]));

// Return the batches per second of a model with these data on a device that was started.
async function speedOf(graph, data, batchSize) {
  const model = new Model(structuredClone(graph));
  try {
    model.setWeights(someWeights(model));
    const trainer = new Trainer(model, data, { batchSize });
    for (let n = 0; n < WARM; n++) await trainer.batch();
    const began = performance.now();
    let count = 0, ms = 0;
    while (count < LEAST || (ms < MEASURED_MS && count < MOST)) {
      await trainer.batch();
      count += 1;
      ms = performance.now() - began;
    }
    return (1000 * count) / ms;
  } finally {
    model.free();
  }
}

// Start a device, and return its name and the measured speeds. `wanted` is "auto", "wasm" or "webgpu".
export async function choose(wanted, graph, data, batchSize) {
  const names = wanted !== "auto" ? [wanted] : (await hasGpu()) ? ["wasm", "webgpu"] : ["wasm"], speeds = {}, faults = [];
  for (const name of names) {
    try {
      await start(name);
      speeds[name] = await speedOf(graph, data, batchSize);
    } catch (error) {
      faults.push(error);
    }
  }
  const [device] = Object.keys(speeds).sort((a, b) => speeds[b] - speeds[a]);
  if (device === undefined) throw faults[0];
  await start(device);
  return { device, speeds };
}
