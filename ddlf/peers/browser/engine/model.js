// A model that trains: a layer graph, its weights by name, its optimizer, and compiled programs.

import { add, compiled, finish, free, fromData, gradient, keyOf, lend, multiply, read, reshape, scalar, seedArray } from "./arrays.js";
import { Graph } from "./graph.js";
import { lossOf } from "./losses.js";
import { measured } from "./metrics.js";
import { firstSlots, numbersOf, stepped } from "./optimizers.js";
import { rateAt } from "./rates.js";

const mapped = (record, f) => Object.fromEntries(Object.entries(record).map(([name, value]) => [name, f(value, name)]));
const pick = (record, names) => Object.fromEntries(names.map((name) => [name, record[name]]));
const PER_ROW = ["cosine_similarity", "kl_divergence", "categorical_crossentropy", "categorical_hinge", "sparse_categorical_crossentropy"];

// Labels of shape [batch] fit predictions of shape [batch, 1].
function fitted(labels, output, kind) {
  const short = labels.shape.length === output.shape.length - 1 && output.shape.at(-1) === 1;
  return short && !PER_ROW.includes(kind) ? reshape(labels, output.shape) : labels;
}

export class Model {
  #programs = {};

  // `seed` decides what dropout drops.
  constructor(text, { seed = 0 } = {}) {
    this.graph = new Graph(text);
    this.shapes = Object.fromEntries(this.graph.weights.map(({ name, shape }) => [name, shape]));
    this.trained = this.graph.weights.filter(({ trained }) => trained).map(({ name }) => name);
    this.kept = this.graph.weights.filter(({ trained }) => !trained).map(({ name }) => name);
    this.values = {};
    this.seed = seed;
    this.restart();
  }

  // Forget the optimizer's slots and steps.
  restart() {
    free(this.slots ?? null);
    this.slots = firstSlots(this.graph.optimizer, pick(this.shapes, this.trained));
    this.steps = 0;
  }

  // Train with a constant learning rate from now on. The optimizer keeps its slots.
  setRate(rate) {
    this.graph.optimizer.rate = { kind: "constant", config: { value: rate } };
  }

  // Set weights from a map of names to Float32Arrays. A missing, unknown or wrong one changes nothing.
  setWeights(weights) {
    for (const [name, shape] of Object.entries(this.shapes)) {
      const size = shape.reduce((all, n) => all * n, 1), data = weights[name];
      if (!data) throw new Error(`the set lacks the weight ${name}`);
      if (data.length !== size) throw new Error(`the weight ${name} has ${data.length} values instead of ${size}`);
    }
    const unknown = Object.keys(weights).find((name) => !(name in this.shapes));
    if (unknown) throw new Error(`the model has no weight ${unknown}`);
    const values = mapped(this.shapes, (shape, name) => fromData(weights[name], shape));
    free(this.values);
    this.values = values;
  }

  // Return a copy of all weights as a map of names to Float32Arrays.
  async weights() {
    const copies = {};
    for (const name of Object.keys(this.shapes)) copies[name] = new Float32Array(await read(this.values[name]));
    return copies;
  }

  // Train one batch: arrays are {data, shape}. Return loss and metrics of the batch before the step.
  async train(inputs, labels) {
    const { optimizer } = this.graph, rate = rateAt(optimizer.rate, this.steps);
    const numbers = mapped(numbersOf(optimizer, rate, this.steps), scalar), seed = seedArray(this.seed * 1000003 + this.steps);
    const program = (this.#programs.train ??= compiled((...given) => this.#step(...given)));
    const { values, slots, means } = program(
      lend(pick(this.values, this.trained)), lend(pick(this.values, this.kept)), lend(this.slots), this.#arrays(inputs), this.#arrays(labels), numbers, seed);
    free(this.slots);
    this.slots = slots;
    free(pick(this.values, Object.keys(values)));
    Object.assign(this.values, values);
    this.steps += 1;
    await finish(this.values);
    return this.#results(means);
  }

  async evaluate(inputs, labels) {
    const program = (this.#programs.evaluate ??= compiled((values, given, wanted) => this.#judge(values, given, wanted, {}).means));
    return this.#results(program(lend(this.values), this.#arrays(inputs), this.#arrays(labels)));
  }

  async predict(inputs) {
    const program = (this.#programs.predict ??= compiled((values, given) => this.graph.forward(values, given).outputs));
    const outputs = program(lend(this.values), this.#arrays(inputs)), copies = [];
    for (const output of outputs) copies.push({ data: new Float32Array(await read(output)), shape: [...output.shape] });
    free(outputs);
    return copies;
  }

  free() {
    free([this.values, this.slots]);
    for (const program of Object.values(this.#programs)) program.dispose();
  }

  #arrays(given) {
    return given.map(({ data, shape }) => fromData(data, shape));
  }

  #step(trained, kept, slots, inputs, labels, numbers, seed) {
    const judge = (weights) => {
      const { loss, means, updates } = this.#judge({ ...weights, ...kept }, inputs, labels, { isTraining: true, key: keyOf(seed) });
      return [loss, { means, updates }];
    };
    const [, { means, updates }, gradients] = gradient(judge, trained);
    const next = stepped(this.graph.optimizer, trained, gradients, slots, numbers);
    return { values: { ...next.weights, ...updates }, slots: next.slots, means };
  }

  // Return the loss, the means of losses and metrics, and new values of weights that are not trained.
  #judge(values, inputs, labels, how) {
    const { outputs, logits, updates } = this.graph.forward(values, inputs, how), means = {};
    const parts = this.graph.losses.map((loss, n) => {
      const prediction = { output: outputs[n], logits: logits[n] }, wanted = fitted(labels[n], outputs[n], loss.kind);
      for (const metric of loss.metrics) means[metric.name] = measured(metric, wanted, prediction);
      const own = lossOf(loss, wanted, prediction);
      if (this.graph.losses.length > 1) means[loss.name] = own;
      return loss.weight === 1 ? own : multiply(loss.weight, own);
    });
    const penalty = this.graph.penalty(values), loss = (penalty === null ? parts : [...parts, penalty]).reduce(add);
    return { loss, means: { ...means, loss }, updates };
  }

  async #results(means) {
    const results = {};
    for (const [name, mean] of Object.entries(means)) results[name] = (await read(mean))[0];
    free(means);
    return results;
  }
}
