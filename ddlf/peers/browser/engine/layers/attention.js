// Attention.

import { activate } from "../activations.js";
import { add, constant, matmul, multiply, reshape, transpose } from "../arrays.js";

const softmax = { kind: "softmax" };

// Project [batch, time, features] to [batch, heads, time, size].
function heads(layer, x, name) {
  const kernel = layer.weight(`${name}/kernel`), [features, count, size] = kernel.shape, [batch, time] = x.shape;
  let rows = matmul(reshape(x, [batch * time, features]), reshape(kernel, [features, count * size]));
  if (layer.has(`${name}/bias`)) rows = add(rows, reshape(layer.weight(`${name}/bias`), [count * size]));
  return transpose(reshape(rows, [batch, time, count, size]), [0, 2, 1, 3]);
}

// Keep only earlier steps of the keys.
function causal(scores) {
  const [, , queries, keys] = scores.shape;
  const allowed = Float32Array.from({ length: queries * keys }, (_, n) => (n % keys <= Math.floor(n / keys) ? 0 : -1e30));
  return add(scores, constant(allowed, [1, 1, queries, keys]));
}

function multiHead(layer, [query, value, key = value]) {
  const { key_dim: size } = layer.config;
  const q = multiply(heads(layer, query, "query"), 1 / Math.sqrt(size));
  let scores = matmul(q, transpose(heads(layer, key, "key"), [0, 1, 3, 2]));
  if (layer.arguments.use_causal_mask) scores = causal(scores);
  const mixed = transpose(matmul(activate(scores, softmax), heads(layer, value, "value")), [0, 2, 1, 3]);
  const [batch, time, count, width] = mixed.shape, kernel = layer.weight("attention_output/kernel");
  let rows = matmul(reshape(mixed, [batch * time, count * width]), reshape(kernel, [count * width, kernel.shape[2]]));
  if (layer.has("attention_output/bias")) rows = add(rows, layer.weight("attention_output/bias"));
  return reshape(rows, [batch, time, kernel.shape[2]]);
}

export const ATTENTION = { MultiHeadAttention: multiHead };
