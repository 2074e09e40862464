// Layers that disturb training. Their random numbers are the peer's own: a seed in the model has no effect.

import { divide, less, uniform, where } from "../arrays.js";

function dropped(layer, x, shape) {
  const { rate } = layer.config;
  if (!layer.isTraining || rate === 0) return x;
  return where(less(uniform(layer.key(), shape), 1 - rate), divide(x, 1 - rate), 0);
}

// Channels are dropped whole.
function spatial(layer, [x]) {
  return dropped(layer, x, x.shape.map((size, n) => (n === 0 || n === x.shape.length - 1 ? size : 1)));
}

function dropout(layer, [x]) {
  const { noise_shape: shape } = layer.config;
  return dropped(layer, x, shape === null ? x.shape : shape.map((size, n) => size ?? x.shape[n]));
}

export const NOISE = { Dropout: dropout, SpatialDropout1D: spatial, SpatialDropout2D: spatial, SpatialDropout3D: spatial };
