// Layers that only move entries: they have no weights.

import { broadcastTo, cut, pad, reshape, transpose } from "../arrays.js";

function flatten(layer, [x]) {
  return reshape(x, [x.shape[0], x.shape.slice(1).reduce((all, n) => all * n, 1)]);
}

function repeatVector(layer, [x]) {
  const [batch, size] = x.shape;
  return broadcastTo(reshape(x, [batch, 1, size]), [batch, layer.config.n, size]);
}

function zeroPadding(layer, [x]) {
  return pad(x, [[0, 0], ...layer.config.padding, [0, 0]]);
}

function cropping(layer, [x]) {
  return layer.config.cropping.reduce((all, [before, after], n) => cut(all, n + 1, before, all.shape[n + 1] - after), x);
}

// Repeat each entry along an axis.
function repeated(x, axis, times) {
  if (times === 1) return x;
  const [head, tail] = [x.shape.slice(0, axis + 1), x.shape.slice(axis + 1)];
  const apart = broadcastTo(reshape(x, [...head, 1, ...tail]), [...head, times, ...tail]);
  return reshape(apart, [...x.shape.slice(0, axis), x.shape[axis] * times, ...tail]);
}

function upSampling(layer, [x]) {
  return layer.config.size.reduce((all, times, n) => repeated(all, n + 1, times), x);
}

export const SHAPING = {
  Flatten: flatten,
  Reshape: (layer, [x]) => reshape(x, [x.shape[0], ...layer.config.target_shape]),
  Permute: (layer, [x]) => transpose(x, [0, ...layer.config.dims]),
  RepeatVector: repeatVector,
  ZeroPadding1D: zeroPadding, ZeroPadding2D: zeroPadding, ZeroPadding3D: zeroPadding,
  Cropping1D: cropping, Cropping2D: cropping, Cropping3D: cropping,
  UpSampling1D: upSampling, UpSampling2D: upSampling, UpSampling3D: upSampling,
};
