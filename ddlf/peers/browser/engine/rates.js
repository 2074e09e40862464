// Learning rates by Keras's names: the rate of a step, which counts from 0.

const fraction = (step, count) => Math.min(step, count) / count;

function cosine(step, { initial_learning_rate: first, decay_steps: count, alpha, warmup_target: target, warmup_steps: warm }) {
  if (target !== null && step < warm) return first + (target - first) * (step / warm);
  const from = target ?? first, done = fraction(target === null ? step : step - warm, count);
  return from * ((1 - alpha) * 0.5 * (1 + Math.cos(Math.PI * done)) + alpha);
}

function polynomial(step, { initial_learning_rate: first, end_learning_rate: last, decay_steps: count, power, cycle }) {
  const whole = cycle ? count * Math.max(1, Math.ceil(step / count)) : count;
  return (first - last) * (1 - Math.min(step, whole) / whole) ** power + last;
}

const periods = (step, { decay_steps: count, staircase }) => (staircase ? Math.floor(step / count) : step / count);

export const RATES = {
  constant: (step, { value }) => value,
  ExponentialDecay: (step, config) => config.initial_learning_rate * config.decay_rate ** periods(step, config),
  InverseTimeDecay: (step, config) => config.initial_learning_rate / (1 + config.decay_rate * periods(step, config)),
  PiecewiseConstantDecay: (step, { boundaries, values }) => values[boundaries.filter((end) => step > end).length],
  PolynomialDecay: polynomial,
  CosineDecay: cosine,
};

export const rateAt = ({ kind, config }, step) => RATES[kind](step, config);
