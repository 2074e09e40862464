// Activations by Keras's names, with Keras's slopes at points where a slope is a choice.

import {
  absolute, add, clip, divide, erf, exp, expm1, greater, larger, less, lessEqual, log, log1p, max, multiply,
  negative, smaller, sqrt, square, stopped, subtract, sum, tanh, where,
} from "./arrays.js";

const relu = (x) => where(greater(x, 0), x, 0); // slope 0 at 0
const sigmoid = (x) => multiply(0.5, add(tanh(multiply(0.5, x)), 1));
const size = (x) => where(greater(x, 0), x, negative(x)); // slope -1 at 0, so that softplus has its 0.5 there
const softplus = (x) => add(relu(x), log1p(exp(negative(size(x)))));

function shifted(x, axis) {
  return subtract(x, stopped(max(x, axis, { keep: true })));
}

function softmax(x, { axis = -1 } = {}) {
  const powers = exp(shifted(x, axis));
  return divide(powers, sum(powers, axis, { keep: true }));
}

export function logSoftmax(x, { axis = -1 } = {}) {
  const logits = shifted(x, axis);
  return subtract(logits, log(sum(exp(logits), axis, { keep: true })));
}

function generalRelu(x, { negative_slope = 0, max_value = null, threshold = 0 }) {
  if (negative_slope === 0 && max_value === null && threshold === 0) return relu(x);
  const bounded = max_value === null ? x : smaller(x, max_value);
  const low = multiply(negative_slope, subtract(x, threshold));
  return where(threshold === 0 ? greater(x, 0) : greater(x, threshold), bounded, low);
}

function gelu(x, { approximate = false }) {
  if (!approximate) return multiply(multiply(0.5, x), add(1, erf(divide(x, Math.SQRT2))));
  const inner = multiply(Math.sqrt(2 / Math.PI), add(x, multiply(0.044715, multiply(x, square(x)))));
  return multiply(multiply(0.5, x), add(1, tanh(inner)));
}

const elu = (x, { alpha = 1 }) => where(greater(x, 0), x, multiply(alpha, expm1(smaller(x, 0))));
const relu6 = (x) => where(greater(x, 0), where(less(x, 6), x, 6), 0);
const hardSigmoid = (x) => divide(relu6(add(x, 3)), 6);
const SELU_ALPHA = 1.6732632423543772, SELU_SCALE = 1.0507009873554805;

export const ACTIVATIONS = {
  linear: (x) => x,
  relu: generalRelu,
  relu6,
  leaky_relu: (x, { negative_slope = 0.2 }) => where(greater(x, 0), x, multiply(negative_slope, x)),
  elu,
  selu: (x) => multiply(SELU_SCALE, elu(x, { alpha: SELU_ALPHA })),
  celu: (x, { alpha = 1 }) => add(larger(x, 0), multiply(alpha, expm1(divide(smaller(x, 0), alpha)))),
  gelu,
  silu: (x) => multiply(x, sigmoid(x)),
  mish: (x) => multiply(x, tanh(softplus(x))),
  sigmoid,
  hard_sigmoid: hardSigmoid,
  hard_silu: (x) => multiply(x, hardSigmoid(x)),
  log_sigmoid: (x) => negative(softplus(negative(x))),
  sparse_sigmoid: (x) => where(lessEqual(x, -1), 0, where(less(x, 1), multiply(0.5, add(x, 1)), 1)),
  softmax,
  log_softmax: logSoftmax,
  softplus,
  softsign: (x) => divide(x, add(1, absolute(x))),
  squareplus: (x, { b = 4 }) => divide(add(x, sqrt(add(square(x), b))), 2),
  sparse_plus: (x) => where(lessEqual(x, -1), 0, where(less(x, 1), multiply(0.25, square(add(x, 1))), x)),
  tanh,
  hard_tanh: (x) => clip(x, -1, 1),
  tanh_shrink: (x) => subtract(x, tanh(x)),
  soft_shrink: (x, { threshold = 0.5 }) =>
    where(greater(x, threshold), subtract(x, threshold), where(less(x, -threshold), add(x, threshold), 0)),
  hard_shrink: (x, { threshold = 0.5 }) => where(greater(absolute(x), threshold), x, 0),
  exponential: (x) => exp(x),
};

// The logits of each result of softmax and sigmoid. Crossentropies of these results compute with the logits.
export const logitsOf = new WeakMap();

export function activate(x, { kind, config = {} }) {
  const result = ACTIVATIONS[kind](x, config);
  if (kind === "softmax" || kind === "sigmoid") logitsOf.set(result, x);
  return result;
}

export { relu, sigmoid, softmax, softplus };
