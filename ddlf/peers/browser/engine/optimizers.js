// Optimizers with the formulas of Keras 3. Numbers that depend on the step alone are computed outside of the program.

import { absolute, add, clip, divide, full, larger, multiply, negative, sign, smaller, sqrt, square, subtract, sum } from "./arrays.js";

const { fround } = Math;
const powers = (base, step) => fround(fround(base) ** step); // Keras computes them in float32

// Move an average towards a value: old + (value - old) * (1 - beta).
const towards = (old, value, beta) => add(old, multiply(subtract(value, old), 1 - beta));
const mixed = (old, value, rho) => add(multiply(old, rho), multiply(value, 1 - rho));

const sgd = {
  slots: ({ momentum }) => (momentum ? ["momentum"] : []),
  step({ momentum, nesterov }, w, g, slots, { rate }) {
    const change = multiply(g, rate);
    if (!momentum) return [subtract(w, change), {}];
    const m = subtract(multiply(slots.momentum, momentum), change);
    return [add(w, nesterov ? subtract(multiply(m, momentum), change) : m), { momentum: m }];
  },
};

const rmsprop = {
  slots: ({ momentum, centered }) => ["velocity", ...(momentum > 0 ? ["momentum"] : []), ...(centered ? ["average"] : [])],
  step({ rho, momentum, epsilon, centered }, w, g, slots, { rate }) {
    const velocity = mixed(slots.velocity, square(g), rho), next = { velocity };
    let under = velocity;
    if (centered) {
      next.average = mixed(slots.average, g, rho);
      under = subtract(velocity, square(next.average));
    }
    const change = divide(multiply(g, rate), sqrt(add(under, epsilon)));
    if (!(momentum > 0)) return [subtract(w, change), next];
    next.momentum = add(multiply(slots.momentum, momentum), change);
    return [subtract(w, next.momentum), next];
  },
};

const adam = {
  slots: ({ amsgrad }) => ["momentum", "velocity", ...(amsgrad ? ["largest"] : [])],
  numbers: ({ beta_1, beta_2 }, rate, step) => ({ alpha: (rate * Math.sqrt(fround(1 - powers(beta_2, step)))) / fround(1 - powers(beta_1, step)) }),
  step({ beta_1, beta_2, epsilon, amsgrad }, w, g, slots, { alpha }) {
    const momentum = towards(slots.momentum, g, beta_1), velocity = towards(slots.velocity, square(g), beta_2);
    const next = { momentum, velocity };
    if (amsgrad) next.largest = larger(slots.largest, velocity);
    return [subtract(w, divide(multiply(momentum, alpha), add(sqrt(next.largest ?? velocity), epsilon))), next];
  },
};

const adagrad = {
  slots: () => ["accumulator"],
  first: ({ initial_accumulator_value: value }) => value,
  step({ epsilon }, w, g, slots, { rate }) {
    const accumulator = add(slots.accumulator, square(g));
    return [subtract(w, divide(multiply(g, rate), sqrt(add(accumulator, epsilon)))), { accumulator }];
  },
};

const adadelta = {
  slots: () => ["gradient", "change"],
  step({ rho, epsilon }, w, g, slots, { rate }) {
    const size = (x) => sqrt(add(x, epsilon));
    const gradient = mixed(slots.gradient, square(g), rho);
    const delta = negative(divide(multiply(size(slots.change), g), size(gradient)));
    return [add(w, multiply(delta, rate)), { gradient, change: mixed(slots.change, square(delta), rho) }];
  },
};

const adamax = {
  slots: () => ["momentum", "norm"],
  numbers: ({ beta_1 }, rate, step) => ({ rate, left: fround(1 - powers(beta_1, step)) }),
  step({ beta_1, beta_2, epsilon }, w, g, slots, { rate, left }) {
    const momentum = towards(slots.momentum, g, beta_1), norm = larger(multiply(slots.norm, beta_2), absolute(g));
    return [subtract(w, divide(multiply(momentum, rate), multiply(left, add(norm, epsilon)))), { momentum, norm }];
  },
};

// The momentum of each step, and the product of all up to one step. It is 0 in float32 after some thousand steps.
const momentumAt = (beta, step) => beta * (1 - 0.5 * 0.96 ** step);

function productUpTo(beta, step) {
  let product = 1;
  for (let n = 1; n <= step && product > 0; n++) product = fround(product * momentumAt(beta, n));
  return product;
}

const nadam = {
  slots: () => ["momentum", "velocity"],
  numbers({ beta_1, beta_2 }, rate, step) {
    const [now, next] = [momentumAt(beta_1, step), momentumAt(beta_1, step + 1)], product = productUpTo(beta_1, step);
    return { rate, ofMomentum: next / (1 - product * next), ofGradient: (1 - now) / (1 - product), left: fround(1 - powers(beta_2, step)) };
  },
  step({ beta_1, beta_2, epsilon }, w, g, slots, { rate, ofMomentum, ofGradient, left }) {
    const momentum = towards(slots.momentum, g, beta_1), velocity = towards(slots.velocity, square(g), beta_2);
    const m = add(multiply(momentum, ofMomentum), multiply(g, ofGradient));
    return [subtract(w, divide(multiply(m, rate), add(sqrt(divide(velocity, left)), epsilon))), { momentum, velocity }];
  },
};

const lion = {
  slots: () => ["momentum"],
  step({ beta_1, beta_2 }, w, g, slots, { rate }) {
    const { momentum: m } = slots;
    return [subtract(w, multiply(rate, sign(mixed(m, g, beta_1)))), { momentum: mixed(m, g, beta_2) }];
  },
};

export const OPTIMIZERS = { SGD: sgd, RMSprop: rmsprop, Adam: adam, AdamW: adam, Adagrad: adagrad, Adadelta: adadelta, Adamax: adamax, Nadam: nadam, Lion: lion };



function clipped(gradients, { clipnorm, global_clipnorm: globally, clipvalue }) {
  const all = Object.entries(gradients), each = (f) => Object.fromEntries(all.map(([name, g]) => [name, f(g)]));
  if (clipnorm) return each((g) => divide(multiply(g, clipnorm), larger(sqrt(sum(square(g))), clipnorm)));
  if (globally) {
    const length = sqrt(all.map(([, g]) => sum(square(g))).reduce(add));
    return each((g) => multiply(g, multiply(globally, smaller(divide(1, length), 1 / globally))));
  }
  return clipvalue ? each((g) => clip(g, -clipvalue, clipvalue)) : gradients;
}

// Return the numbers of a step, which counts from 0, that a program takes as arrays without axes.
export function numbersOf({ kind, config }, rate, step) {
  return { rate, ...OPTIMIZERS[kind].numbers?.(config, rate, step + 1) };
}

// Return the slots of each weight before the first step.
export function firstSlots({ kind, config }, shapes) {
  const { slots, first } = OPTIMIZERS[kind], value = first?.(config) ?? 0;
  const own = (shape) => Object.fromEntries(slots(config).map((slot) => [slot, full(shape, value)]));
  return Object.fromEntries(Object.entries(shapes).map(([name, shape]) => [name, own(shape)]));
}

// Return the weights and slots after a step.
export function stepped({ kind, config, decayed }, weights, gradients, slots, numbers) {
  const next = { weights: {}, slots: {} }, used = clipped(gradients, config);
  for (const [name, w] of Object.entries(weights)) {
    const decay = config.weight_decay !== null && decayed.includes(name);
    const start = decay ? subtract(w, multiply(multiply(w, config.weight_decay), numbers.rate)) : w;
    [next.weights[name], next.slots[name]] = OPTIMIZERS[kind].step(config, start, used[name], slots[name], numbers);
  }
  return next;
}
