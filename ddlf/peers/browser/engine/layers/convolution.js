// Convolutions: the entries of all windows side by side, and one product with the kernel.

import { activate } from "../activations.js";
import { add, concatenate, cut, matmul, multiply, pad, reshape, transpose } from "../arrays.js";
import { withBias } from "./core.js";
import { alongAxes, entries } from "./windows.js";

const windowOf = ({ kernel_size, strides, dilation_rate, padding }) => ({ size: kernel_size, strides, dilation: dilation_rate, padding });

// Return the convolution of x with a kernel of shape [.. size, channels, filters].
export function convolve(x, kernel, window) {
  const last = x.shape.length - 1, filters = kernel.shape.at(-1);
  const patches = alongAxes(x, window, 0, (parts) => concatenate(parts, last)), inside = patches.shape.at(-1);
  const rows = matmul(reshape(patches, [-1, inside]), reshape(kernel, [inside, filters]));
  return reshape(rows, [...patches.shape.slice(0, -1), filters]);
}

function grouped(x, kernel, window, groups) {
  if (groups === 1) return convolve(x, kernel, window);
  const last = x.shape.length - 1, inside = x.shape[last] / groups, filters = kernel.shape.at(-1) / groups;
  return concatenate([...Array(groups).keys()].map((n) => convolve(
    cut(x, last, n * inside, (n + 1) * inside), cut(kernel, kernel.shape.length - 1, n * filters, (n + 1) * filters), window)), last);
}

function conv(layer, [x]) {
  const made = grouped(x, layer.weight("kernel"), windowOf(layer.config), layer.config.groups);
  return activate(withBias(layer, made), layer.config.activation);
}

// Return the depthwise convolution of x with a kernel of shape [.. size, channels, multiplier].
function deepen(x, kernel, window) {
  const parts = entries(x, window), [channels, times] = kernel.shape.slice(-2), shape = parts[0].shape;
  const slices = reshape(kernel, [parts.length, channels, times]);
  const products = parts.map((part, n) =>
    multiply(reshape(part, [...shape, 1]), reshape(cut(slices, 0, n, n + 1), [channels, times])));
  return reshape(products.reduce(add), [...shape.slice(0, -1), channels * times]);
}

function depthwise(layer, [x]) {
  return activate(withBias(layer, deepen(x, layer.weight("kernel"), windowOf(layer.config))), layer.config.activation);
}

function separable(layer, [x]) {
  const deep = deepen(x, layer.weight("depthwise_kernel"), windowOf(layer.config));
  const point = layer.weight("pointwise_kernel"), ones = layer.config.kernel_size.map(() => 1);
  const made = convolve(deep, point, { size: ones, strides: ones, padding: "valid" });
  return activate(withBias(layer, made), layer.config.activation);
}

// Put `count - 1` zeros between the entries along an axis.
function spread(x, axis, count) {
  if (count === 1) return x;
  const shape = x.shape, apart = reshape(x, [...shape.slice(0, axis + 1), 1, ...shape.slice(axis + 1)]);
  const padded = pad(apart, apart.shape.map((_, n) => [0, n === axis + 1 ? count - 1 : 0]));
  return cut(reshape(padded, [...shape.slice(0, axis), shape[axis] * count, ...shape.slice(axis + 1)]), axis, 0, (shape[axis] - 1) * count + 1);
}

function reversed(x, axis) {
  const parts = [...Array(x.shape[axis]).keys()].map((n) => cut(x, axis, n, n + 1));
  return parts.length === 1 ? x : concatenate(parts.reverse(), axis);
}

// The gradient of a convolution by its input, used forward: kernel of shape [.. size, filters, channels].
function convTranspose(layer, [x]) {
  const { kernel_size: size, strides, padding } = layer.config;
  let kernel = layer.weight("kernel"), spaced = x;
  size.forEach((_, axis) => { kernel = reversed(kernel, axis); spaced = spread(spaced, axis + 1, strides[axis]); });
  const rank = size.length, swapped = transpose(kernel, [...size.keys(), rank + 1, rank]);
  const widths = size.map((window, n) => {
    const whole = padding === "same" ? x.shape[n + 1] * strides[n] : (x.shape[n + 1] - 1) * strides[n] + Math.max(window, strides[n]);
    const needed = padding === "same" ? Math.max(window - strides[n], 0) : 0, before = window - 1 - Math.floor(needed / 2);
    return [before, whole + window - 1 - spaced.shape[n + 1] - before];
  });
  const ones = size.map(() => 1);
  const made = convolve(pad(spaced, [[0, 0], ...widths, [0, 0]]), swapped, { size, strides: ones, padding: "valid" });
  return activate(withBias(layer, made), layer.config.activation);
}

export const CONVOLUTION = {
  Conv1D: conv, Conv2D: conv, Conv3D: conv,
  DepthwiseConv1D: depthwise, DepthwiseConv2D: depthwise,
  SeparableConv1D: separable, SeparableConv2D: separable,
  Conv1DTranspose: convTranspose, Conv2DTranspose: convTranspose,
};
