// Normalizations, with Keras's formulas.

import { add, axisOf, divide, mean, multiply, reshape, sqrt, square, stopped, subtract } from "../arrays.js";
import { unit } from "./merging.js";

function moments(x, axes) {
  const center = mean(x, axes, { keep: true });
  return [center, mean(square(subtract(x, center)), axes, { keep: true })];
}

// Return (x - center) / sqrt(variance + epsilon), scaled and moved by the layer's own weights of this shape.
function normalized(layer, x, center, variance, shape) {
  const scale = divide(1, sqrt(add(variance, layer.config.epsilon)));
  const unitary = multiply(subtract(x, center), scale);
  const scaled = layer.has("gamma") ? multiply(unitary, reshape(layer.weight("gamma"), shape)) : unitary;
  return layer.has("beta") ? add(scaled, reshape(layer.weight("beta"), shape)) : scaled;
}

function batch(layer, [x]) {
  const rank = x.shape.length, axis = axisOf(layer.config.axis, rank), { momentum } = layer.config;
  const shape = x.shape.map((size, n) => (n === axis ? size : 1));
  if (!layer.learns) {
    return normalized(layer, x, reshape(layer.weight("moving_mean"), shape), reshape(layer.weight("moving_variance"), shape), shape);
  }
  const [center, variance] = moments(x, [...x.shape.keys()].filter((n) => n !== axis));
  for (const [name, value] of [["moving_mean", center], ["moving_variance", variance]]) {
    const old = layer.weight(name), seen = reshape(stopped(value), old.shape);
    layer.update(name, add(multiply(old, momentum), multiply(seen, 1 - momentum)));
  }
  return normalized(layer, x, center, variance, shape);
}

const several = (axis, rank) => [axis].flat().map((one) => axisOf(one, rank));

function layerNormalization(layer, [x]) {
  const axes = several(layer.config.axis, x.shape.length), [center, variance] = moments(x, axes);
  return normalized(layer, x, center, variance, x.shape.map((size, n) => (axes.includes(n) ? size : 1)));
}

function group(layer, [x]) {
  const axis = axisOf(layer.config.axis, x.shape.length), size = x.shape[axis];
  const groups = layer.config.groups === -1 ? size : layer.config.groups;
  const split = [...x.shape.slice(0, axis), groups, size / groups, ...x.shape.slice(axis + 1)];
  const apart = reshape(x, split), axes = [...split.keys()].filter((n) => n !== 0 && n !== axis);
  const [center, variance] = moments(apart, axes);
  const shape = split.map((count, n) => (n === axis || n === axis + 1 ? count : 1));
  return reshape(normalized(layer, apart, center, variance, shape), x.shape);
}

function rms(layer, [x]) {
  const axes = several(layer.config.axis, x.shape.length);
  const scale = divide(1, sqrt(add(mean(square(x), axes, { keep: true }), layer.config.epsilon)));
  const shape = x.shape.map((size, n) => (axes.includes(n) ? size : 1));
  return multiply(multiply(x, scale), reshape(layer.weight("scale"), shape));
}

export const NORMALIZATION = {
  BatchNormalization: batch,
  LayerNormalization: layerNormalization,
  GroupNormalization: group,
  RMSNormalization: rms,
  UnitNormalization: (layer, [x]) => unit(x, several(layer.config.axis, x.shape.length)),
};
