// Arrays, their operations and gradients. The only file that knows jax-js.
//
// jax-js frees arrays by hand: its operations take over their arguments. Here an operation borrows its arguments, and
// `owning` frees every array that was made inside a function, except the results.

import { blockUntilReady, defaultDevice, init, jit, lax, nn, numpy as np, random, tree, valueAndGrad } from "./vendor/jax.js";

const scopes = [];

function made(result) {
  scopes.at(-1)?.push(...tree.leaves(result));
  return result;
}

const isArray = (value) => typeof value?.dispose === "function";
const lent = (value) => (isArray(value) ? value.ref : value);
const borrowing = (operation) => (...values) => made(operation(...values.map(lent)));

// Return a function that takes over its arguments, and frees what `f` made except its results.
function owning(f) {
  return (...values) => {
    scopes.push(tree.leaves(values).filter(isArray));
    try {
      return tree.ref(f(...values));
    } finally {
      for (const array of scopes.pop()) array.dispose();
    }
  };
}

// -- programs ---------------------------------------------------------------------------------------------------------

// Start a device, "wasm" or "webgpu", and return its name. Arrays belong to it from then on.
export async function start(device = "wasm") {
  const found = await init(device);
  if (!found.includes(device)) throw new Error(`this browser has no ${device === "webgpu" ? "WebGPU" : "WebAssembly"}`);
  return defaultDevice(device);
}

// Return `f` as a compiled program, for trees of arrays. It takes over its arguments.
export const compiled = (f) => jit(owning(f));

// Return the value, the other results and the gradient of `f`, which returns [value, others], at a tree of arrays.
export function gradient(f, at) {
  const [[value, others], gradients] = valueAndGrad(owning(f), { hasAux: true })(tree.ref(at));
  made([value, others, gradients]);
  return [value, others, gradients];
}

export const fromData = (data, shape) => np.array(data.slice(), { shape });
export const scalar = (value) => np.array(new Float32Array([value]), { shape: [] });
export const constant = (data, shape) => made(fromData(data, shape)); // of a program that is being compiled
export const seedArray = (value) => np.array(new Uint32Array([value]), { shape: [] });
export const lend = (arrays) => tree.ref(arrays);
export const free = (arrays) => tree.dispose(arrays);
export const finish = (arrays) => blockUntilReady(arrays);
export const read = (array) => array.ref.data();

// -- operations -------------------------------------------------------------------------------------------------------

export const add = borrowing(np.add);
export const subtract = borrowing(np.subtract);
export const multiply = borrowing(np.multiply);
export const divide = borrowing(np.divide);
export const negative = borrowing(np.negative);
export const exp = borrowing(np.exp);
export const expm1 = borrowing(np.expm1);
export const log = borrowing(np.log);
export const log1p = borrowing(np.log1p);
export const sqrt = borrowing(np.sqrt);
export const power = borrowing(np.power);
export const tanh = borrowing(np.tanh);
export const erf = borrowing(lax.erf);
export const sign = borrowing(np.sign);
export const stopped = borrowing(lax.stopGradient);
export const greater = borrowing(np.greater);
export const greaterEqual = borrowing(np.greaterEqual);
export const less = borrowing(np.less);
export const lessEqual = borrowing(np.lessEqual);
export const equal = borrowing(np.equal);
export const where = borrowing(np.where);
export const square = (x) => multiply(x, x);

export const matmul = borrowing(np.matmul);
export const transpose = borrowing(np.transpose);
export const reshape = borrowing(np.reshape);
export const broadcastTo = borrowing(np.broadcastTo);
export const pad = borrowing(np.pad);
export const slice = borrowing((x, ...index) => x.slice(...index));
export const take = borrowing(np.take);
export const argmax = borrowing(np.argmax);
export const sort = borrowing(np.sort);
export const asFloat = borrowing((x) => x.astype("float32"));
export const asInteger = borrowing((x) => x.astype("int32"));

const keeping = (options) => ({ keepdims: options?.keep ?? false });
export const sum = (x, axis = null, options) => made(np.sum(x.ref, axis, keeping(options)));
export const mean = (x, axis = null, options) => made(np.mean(x.ref, axis, keeping(options)));
export const max = (x, axis = null, options) => made(np.max(x.ref, axis, keeping(options)));
export const concatenate = (xs, axis) => made(np.concatenate(xs.map(lent), axis));
export const zeros = (shape) => made(np.zeros(shape));
export const ones = (shape) => made(np.ones(shape));
export const full = (shape, value) => made(np.full(shape, value));
export const oneHot = (x, count) => made(nn.oneHot(x.ref, count));

// -- what follows from them -------------------------------------------------------------------------------------------

// The larger and the smaller of two. Where they are equal, the whole gradient goes to the first one.
export const larger = (x, y) => where(greaterEqual(x, y), x, y);
export const smaller = (x, y) => where(lessEqual(x, y), x, y);
export const absolute = (x) => multiply(x, stopped(sign(x)));
export const clip = (x, low, high) => smaller(larger(x, low), high);
export const shapeOf = (x) => x.shape;
export const axisOf = (axis, rank) => (axis < 0 ? axis + rank : axis);

// Return the part of `x` from `begin` to `end` along an axis.
export function cut(x, axis, begin, end) {
  const index = x.shape.map(() => []);
  index[axis] = [begin, end];
  return slice(x, ...index);
}

// Return every `step`-th entry of `x` along an axis, `count` of them, from `begin` on.
export function every(x, axis, begin, count, step) {
  if (step === 1) return cut(x, axis, begin, begin + count);
  const taken = cut(x, axis, begin, begin + (count - 1) * step + 1);
  const padded = pad(taken, taken.shape.map((_, n) => [0, n === axis ? step - 1 : 0]));
  const split = reshape(padded, [...x.shape.slice(0, axis), count, step, ...x.shape.slice(axis + 1)]);
  return reshape(cut(split, axis + 1, 0, 1), [...x.shape.slice(0, axis), count, ...x.shape.slice(axis + 1)]);
}

// Pad with a value other than 0: zeros outside of x's own places are replaced.
export function padWith(x, widths, value) {
  if (widths.every(([before, after]) => before + after === 0)) return x;
  const padded = pad(x, widths);
  return value === 0 ? padded : where(greater(pad(ones(x.shape), widths), 0), padded, value);
}

// -- random numbers ---------------------------------------------------------------------------------------------------

export const keyOf = (seed) => made(random.key(lent(seed)));
export const keyPart = (key, number) => made(random.split(key.ref, number + 1).slice(number));
export const uniform = (key, shape) => made(random.uniform(key.ref, shape));
