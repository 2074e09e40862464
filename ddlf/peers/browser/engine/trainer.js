// Trains a model on data of this browser, batch after batch, and does everything else between two batches.

import { Means } from "./metrics.js";

// Let messages in that have come meanwhile. A timer would wait for milliseconds.
function turn() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => { port1.close(); resolve(); };
    port2.postMessage(null);
  });
}

// Return an order of samples that looks random, from a seed: mulberry32 and Fisher-Yates.
function shuffled(count, seed) {
  let state = seed >>> 0;
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let value = Math.imul(state ^ (state >>> 15), state | 1);
    value ^= value + Math.imul(value ^ (value >>> 7), value | 61);
    return ((value ^ (value >>> 14)) >>> 0) / 2 ** 32;
  };
  const order = Uint32Array.from({ length: count }, (_, n) => n);
  for (let n = count - 1; n > 0; n--) {
    const other = Math.floor(next() * (n + 1));
    [order[n], order[other]] = [order[other], order[n]];
  }
  return order;
}

// Return some rows of an array {data, shape}.
function rows({ data, shape }, places) {
  const size = shape.slice(1).reduce((all, n) => all * n, 1), taken = new data.constructor(places.length * size);
  places.forEach((place, n) => taken.set(data.subarray(place * size, (place + 1) * size), n * size));
  return { data: taken, shape: [places.length, ...shape.slice(1)] };
}

export class Trainer {
  #line = Promise.resolve(); #isRunning = false; #order = new Uint32Array(0); #place = 0;

  // `data` has the inputs and labels, `tell` gets {batches, samples, seconds, means} about once per `everyMs`.
  constructor(model, { inputs, labels }, { batchSize = 32, seed = 0, everyMs = 200, tell = () => {}, fail = () => {} } = {}) {
    const counts = new Set([...inputs, ...labels].map(({ shape }) => shape[0]));
    if (counts.size !== 1 || counts.has(0)) throw new Error(`inputs and labels have ${[...counts].join(" and ")} samples`);
    Object.assign(this, { model, inputs, labels, batchSize, seed, everyMs, tell, fail, samples: [...counts][0], epochs: 0, batches: 0 });
  }

  // Do something between two batches, with the weights as they are there.
  between(act) {
    const done = this.#line.then(act);
    this.#line = done.catch(() => {});
    return done;
  }

  start() {
    if (this.#isRunning) return;
    this.#isRunning = true;
    this.#run().catch((error) => { this.#isRunning = false; this.fail(error); });
  }

  // Stop after the batch that is being trained.
  async pause() {
    this.#isRunning = false;
    await this.between(() => {});
  }

  async evaluate({ inputs, labels }) {
    const means = this.#means(), count = inputs[0].shape[0];
    for (let begin = 0; begin < count; begin += this.batchSize) {
      const places = [...Array(Math.min(this.batchSize, count - begin)).keys()].map((n) => begin + n);
      const part = (arrays) => arrays.map((array) => rows(array, places));
      await this.between(async () => means.add(await this.model.evaluate(part(inputs), part(labels)), places.length));
    }
    return means.values;
  }

  #means() {
    return new Means(this.model.graph.losses.flatMap(({ metrics }) => metrics));
  }

  #next() {
    if (this.#place >= this.#order.length) {
      this.#order = shuffled(this.samples, this.seed + this.epochs++);
      this.#place = 0;
    }
    const begin = this.#place;
    this.#place += this.batchSize;
    return this.#order.subarray(begin, this.#place);
  }

  async #run() {
    let means = this.#means(), samples = 0, batches = 0, began = performance.now();
    const report = () => {
      if (batches) this.tell({ batches: this.batches, samples, seconds: (performance.now() - began) / 1000, means: means.values });
      [means, samples, batches, began] = [this.#means(), 0, 0, performance.now()];
    };
    while (this.#isRunning) {
      await this.between(async () => {
        if (!this.#isRunning) return;
        const places = this.#next();
        means.add(await this.model.train(this.inputs.map((array) => rows(array, places)), this.labels.map((array) => rows(array, places))), places.length);
        this.batches += 1;
        batches += 1;
        samples += places.length;
      });
      if (performance.now() - began >= this.everyMs) report();
      await turn();
    }
    report();
  }
}
