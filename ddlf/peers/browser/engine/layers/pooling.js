// Pools. Of equal maxima the first one in a window takes the whole gradient, as in Keras.

import { add, divide, constant, greater, max, mean, where } from "../arrays.js";
import { alongAxes, coverages, offsets } from "./windows.js";

const windowOf = ({ pool_size, strides, padding }) => ({ size: pool_size, strides, padding });

function maxPool(layer, [x]) {
  return alongAxes(x, windowOf(layer.config), -Infinity, (parts) => parts.reduce((best, next) => where(greater(next, best), next, best)));
}

// Return how many entries of each window lie within the input.
function inside(shape, window) {
  const covered = coverages(shape, window);
  const counts = covered.map(({ count, before }, n) => [...Array(count).keys()].map((place) => {
    const begin = place * window.strides[n] - before, end = begin + window.size[n];
    return Math.min(end, shape[n + 1]) - Math.max(begin, 0);
  }));
  const whole = covered.map(({ count }) => count);
  return { counts: Float32Array.from(offsets(whole), (place) => place.reduce((all, at, n) => all * counts[n][at], 1)), whole };
}

function averagePool(layer, [x]) {
  const window = windowOf(layer.config), total = alongAxes(x, window, 0, (parts) => parts.reduce(add)), { counts, whole } = inside(x.shape, window);
  if (new Set(counts).size === 1) return divide(total, counts[0]);
  return divide(total, constant(counts, [1, ...whole, 1]));
}

const spatial = (x) => x.shape.slice(1, -1).map((_, n) => n + 1);

// A pool over everything is a reduction whose equal maxima share the gradient.
function globalMax(layer, [x]) {
  return max(x, spatial(x), { keep: layer.config.keepdims });
}

function globalAverage(layer, [x]) {
  return mean(x, spatial(x), { keep: layer.config.keepdims });
}

export const POOLING = {
  MaxPooling1D: maxPool, MaxPooling2D: maxPool, MaxPooling3D: maxPool,
  AveragePooling1D: averagePool, AveragePooling2D: averagePool, AveragePooling3D: averagePool,
  GlobalMaxPooling1D: globalMax, GlobalMaxPooling2D: globalMax, GlobalMaxPooling3D: globalMax,
  GlobalAveragePooling1D: globalAverage, GlobalAveragePooling2D: globalAverage, GlobalAveragePooling3D: globalAverage,
};
