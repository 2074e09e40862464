// Trains a model on data of this browser, batch after batch, and does everything else between two batches.

import { Means } from "./metrics.js";

// Let messages in that have come meanwhile. A timer would wait for milliseconds.
export function turn() {
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
  #line = Promise.resolve(); #order = new Uint32Array(0); #place = 0; #means;

  // `data` has the inputs and labels.
  constructor(model, data, { batchSize = 32, seed = 0 } = {}) {
    Object.assign(this, { model, batchSize, seed, epochs: 0, batches: 0 });
    this.take(data);
    this.#means = this.#none();
  }

  // Train on these data from the next batch on.
  take({ inputs, labels }) {
    const counts = new Set([...inputs, ...labels].map(({ shape }) => shape[0]));
    if (counts.size !== 1 || counts.has(0)) throw new Error(`inputs and labels have ${[...counts].join(" and ")} samples`);
    Object.assign(this, { inputs, labels, samples: [...counts][0] });
    [this.#order, this.#place] = [new Uint32Array(0), 0];
  }

  // Do something between two batches, with the weights as they are there.
  between(act) {
    const done = this.#line.then(act);
    this.#line = done.catch(() => {});
    return done;
  }

  // Train one batch of the next samples. Each pass over the data has another order.
  batch() {
    return this.between(async () => {
      const places = this.#next(), part = (arrays) => arrays.map((array) => rows(array, places));
      const means = await this.model.train(part(this.inputs), part(this.labels));
      this.#means.add(means, places.length);
      this.batches += 1;
      return { means, samples: places.length };
    });
  }

  // Return the mean loss and metrics since the last call.
  means() {
    const { values } = this.#means;
    this.#means = this.#none();
    return values;
  }

  // Return means over at most `most` samples, drawn at random. Call it between two batches.
  async test({ inputs, labels }, most) {
    const count = inputs[0].shape[0], order = shuffled(count, this.seed + 7919 * this.batches).slice(0, most), means = this.#none();
    for (let begin = 0; begin < order.length; begin += this.batchSize) {
      const places = order.subarray(begin, begin + this.batchSize), part = (arrays) => arrays.map((array) => rows(array, places));
      means.add(await this.model.evaluate(part(inputs), part(labels)), places.length);
    }
    return { means: means.values, samples: order.length };
  }

  #none() {
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
}
