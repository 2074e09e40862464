// Layers that merge several inputs.

import { add, axisOf, concatenate, divide, larger, matmul, multiply, reshape, smaller, sqrt, square, subtract, sum, transpose } from "../arrays.js";

// Return inputs of different ranks with axes of size 1 after the batch, as Keras's merging layers see them.
function aligned(xs) {
  const rank = Math.max(...xs.map((x) => x.shape.length));
  return xs.map((x) => reshape(x, [x.shape[0], ...Array(rank - x.shape.length).fill(1), ...x.shape.slice(1)]));
}

const merging = (operation) => (layer, xs) => aligned(xs).reduce((all, x) => operation(all, x));

export function unit(x, axis) {
  const squares = sum(square(x), axis, { keep: true });
  return divide(x, sqrt(larger(squares, 1e-12)));
}

function dot(layer, [a, b]) {
  const { axes, normalize } = layer.config;
  const [left, right] = axes.map((axis, n) => axisOf(axis, [a, b][n].shape.length));
  let [x, y] = normalize ? [unit(a, left), unit(b, right)] : [a, b];
  const others = (shape, axis) => [...shape.keys()].filter((n) => n !== 0 && n !== axis);
  const [ofX, ofY] = [others(x.shape, left), others(y.shape, right)];
  const [shapeX, shapeY] = [ofX.map((n) => x.shape[n]), ofY.map((n) => y.shape[n])];
  const size = (shape) => shape.reduce((all, n) => all * n, 1), batch = x.shape[0], inner = x.shape[left];
  x = reshape(transpose(x, [0, ...ofX, left]), [batch, size(shapeX), inner]);
  y = reshape(transpose(y, [0, right, ...ofY]), [batch, inner, size(shapeY)]);
  const shape = [batch, ...shapeX, ...shapeY];
  return reshape(matmul(x, y), shape.length === 1 ? [batch, 1] : shape);
}

export const MERGING = {
  Add: merging(add),
  Subtract: merging(subtract),
  Multiply: merging(multiply),
  Maximum: merging(larger),
  Minimum: merging(smaller),
  Average: (layer, xs) => divide(aligned(xs).reduce((all, x) => add(all, x)), xs.length),
  Concatenate: (layer, xs) => concatenate(xs, axisOf(layer.config.axis, xs[0].shape.length)),
  Dot: dot,
};
