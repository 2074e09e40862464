// Recurrent layers. A program has each of their steps, since jax-js has no loop.

import { activate } from "../activations.js";
import { add, concatenate, cut, matmul, multiply, reshape, subtract, zeros } from "../arrays.js";
import { project } from "./core.js";

const split = (x, count) => {
  const axis = x.shape.length - 1, size = x.shape[axis] / count;
  return [...Array(count).keys()].map((n) => cut(x, axis, n * size, (n + 1) * size));
};

// The weights of a layer that begin with a name, as if they were those of a layer.
function part(layer, name, config) {
  return { config, weight: (own) => layer.weight(`${name}/${own}`), has: (own) => layer.has(`${name}/${own}`) };
}

function simpleStep(layer, x, [h]) {
  const next = activate(add(x, matmul(h, layer.weight("recurrent_kernel"))), layer.config.activation);
  return [next];
}

function lstmStep(layer, x, [h, c]) {
  const { activation, recurrent_activation: gate } = layer.config;
  const [input, forget, candidate, output] = split(add(x, matmul(h, layer.weight("recurrent_kernel"))), 4);
  const carried = add(multiply(activate(forget, gate), c), multiply(activate(input, gate), activate(candidate, activation)));
  return [multiply(activate(output, gate), activate(carried, activation)), carried];
}

function gruStep(layer, x, [h]) {
  const { activation, recurrent_activation: gate, reset_after: after, units } = layer.config;
  const kernel = layer.weight("recurrent_kernel"), [xz, xr, xh] = split(x, 3);
  let inner = matmul(h, after ? kernel : cut(kernel, 1, 0, 2 * units));
  if (after && layer.has("bias")) inner = add(inner, cut(layer.weight("bias"), 0, 1, 2));
  const [hz, hr, rest] = split(inner, after ? 3 : 2);
  const z = activate(add(xz, hz), gate), r = activate(add(xr, hr), gate);
  const recurrent = after ? multiply(r, rest) : matmul(multiply(r, h), cut(kernel, 1, 2 * units, 3 * units));
  const candidate = activate(add(xh, recurrent), activation);
  return [add(multiply(z, h), multiply(subtract(1, z), candidate))];
}

function inputBias(layer) {
  const bias = layer.weight("bias");
  return layer.config.reset_after ? cut(bias, 0, 0, 1) : bias;
}

const unrolled = (step, count) => (layer, [x, ...initial]) => {
  const { units, return_sequences: all, return_state: states, go_backwards: backwards } = layer.config;
  const [batch, steps, size] = x.shape, width = layer.weight("kernel").shape[1];
  let inputs = project(x, layer.weight("kernel"));
  if (layer.has("bias")) inputs = add(inputs, inputBias(layer));
  let state = initial.length ? initial : Array.from({ length: count }, () => zeros([batch, units]));
  const outputs = [];
  for (let n = 0; n < steps; n++) {
    const at = backwards ? steps - 1 - n : n;
    state = step(layer, reshape(cut(inputs, 1, at, at + 1), [batch, width]), state);
    if (all) outputs.push(reshape(state[0], [batch, 1, units]));
  }
  const output = all ? concatenate(outputs, 1) : state[0];
  return states ? [output, ...state] : output;
};

const LAYERS = { SimpleRNN: unrolled(simpleStep, 1), LSTM: unrolled(lstmStep, 2), GRU: unrolled(gruStep, 1) };

function reversedInTime(x) {
  return concatenate([...Array(x.shape[1]).keys()].reverse().map((n) => cut(x, 1, n, n + 1)), 1);
}

function bidirectional(layer, [x]) {
  const { kind, forward, backward, merge_mode: mode } = layer.config;
  const one = LAYERS[kind](part(layer, "forward", forward), [x]);
  let other = LAYERS[kind](part(layer, "backward", backward), [x]);
  if (forward.return_sequences) other = reversedInTime(other);
  if (mode === null) return [one, other];
  const last = one.shape.length - 1;
  return { concat: () => concatenate([one, other], last), sum: () => add(one, other), mul: () => multiply(one, other), ave: () => multiply(0.5, add(one, other)) }[mode]();
}

export const RECURRENT = { ...LAYERS, Bidirectional: bidirectional };
