// A layer graph, as `ddlf/peers/browser/graph.py` writes it, and its forward pass.

import { logitsOf } from "./activations.js";
import { absolute, add, keyPart, multiply, square, sum } from "./arrays.js";
import { LAYERS } from "./layers/index.js";

export const FORMAT = 1;

// What a layer's function sees of one call: settings, weights by their own names, and what it may do.
class Call {
  constructor(layer, values, number, pass) {
    this.config = layer.config;
    this.arguments = layer.calls[number].arguments;
    this.isTraining = pass.isTraining;
    this.learns = pass.isTraining && layer.trainable;
    this.#layer = layer;
    this.#values = values;
    this.#pass = pass;
  }

  #layer; #values; #pass;

  has(name) {
    return name in this.#layer.weights;
  }

  weight(name) {
    return this.#values[this.#layer.weights[name]];
  }

  // Give a weight that is not trained its next value.
  update(name, value) {
    const path = this.#layer.weights[name];
    this.#values[path] = value;
    this.#pass.updates[path] = value;
  }

  // Return an own key for random numbers.
  key() {
    return keyPart(this.#pass.key, this.#pass.keys++);
  }
}

export class Graph {
  constructor(text) {
    if (text.format !== FORMAT) throw new Error(`the page knows graphs of format ${FORMAT}, and the server sent format ${text.format}: reload the page`);
    const unknown = text.layers.find(({ kind }) => !(kind in LAYERS));
    if (unknown) throw new Error(`the page has no layer ${unknown.kind}, which ${unknown.name} is: reload the page`);
    Object.assign(this, text);
    this.byName = new Map(text.layers.map((layer) => [layer.name, layer]));
  }

  // Return the outputs, their logits or null, and new values of weights that are not trained.
  forward(values, inputs, { isTraining = false, key = null } = {}) {
    const pass = { isTraining, key, keys: 0, updates: {} }, own = { ...values };
    const tensors = [...inputs];
    for (const { layer: name, number, inputs: taken } of this.calls) {
      const layer = this.byName.get(name);
      const results = LAYERS[layer.kind](new Call(layer, own, number, pass), taken.map((n) => tensors[n]));
      tensors.push(...[results].flat());
    }
    const outputs = this.outputs.map((n) => tensors[n]);
    return { outputs, logits: outputs.map((output) => logitsOf.get(output) ?? null), updates: pass.updates };
  }

  // Return the sum of all penalties of weights, or null if there are none.
  penalty(values) {
    const parts = this.weights.filter(({ penalty }) => penalty).flatMap(({ name, penalty: [l1, l2] }) => [
      ...(l1 ? [multiply(l1, sum(absolute(values[name])))] : []), ...(l2 ? [multiply(l2, sum(square(values[name])))] : [])]);
    return parts.length ? parts.reduce(add) : null;
  }
}
