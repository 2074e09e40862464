// Dense and embedding layers, activations as layers.

import { activate } from "../activations.js";
import { add, asInteger, greater, matmul, multiply, oneHot, reshape, take, where } from "../arrays.js";

export function withBias(layer, x) {
  return layer.has("bias") ? add(x, layer.weight("bias")) : x;
}

// Multiply the last axis by a matrix.
export function project(x, kernel) {
  if (x.shape.length === 2) return matmul(x, kernel);
  const rows = reshape(x, [-1, x.shape.at(-1)]);
  return reshape(matmul(rows, kernel), [...x.shape.slice(0, -1), kernel.shape[1]]);
}

// A training looks rows up by a product with ones and zeros: jax-js cannot compile the gradient of `take`.
function embed(layer, [x]) {
  const table = layer.weight("embeddings"), places = reshape(asInteger(x), [-1]);
  const rows = layer.isTraining ? matmul(oneHot(places, table.shape[0]), table) : take(table, places, 0);
  return reshape(rows, [...x.shape, table.shape[1]]);
}

export const CORE = {
  Dense: (layer, [x]) => activate(withBias(layer, project(x, layer.weight("kernel"))), layer.config.activation),
  Embedding: embed,
  Identity: (layer, [x]) => x,
  Activation: (layer, [x]) => activate(x, layer.config.activation),
  ReLU: (layer, [x]) => activate(x, { kind: "relu", config: layer.config }),
  LeakyReLU: (layer, [x]) => activate(x, { kind: "leaky_relu", config: layer.config }),
  ELU: (layer, [x]) => activate(x, { kind: "elu", config: layer.config }),
  PReLU: (layer, [x]) => where(greater(x, 0), x, multiply(layer.weight("alpha"), x)),
  Softmax: (layer, [x]) => activate(x, { kind: "softmax", config: layer.config }),
  Rescaling: (layer, [x]) => add(multiply(x, layer.config.scale), layer.config.offset),
};
