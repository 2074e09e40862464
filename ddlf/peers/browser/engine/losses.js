// Losses by Keras's names: one value for each sample and position, from labels and predictions.
//
// Labels have the rank of the predictions, except those of sparse losses. Like Keras with TensorFlow, a crossentropy
// of the softmax or sigmoid of logits computes with the logits.

import { logSoftmax, softplus } from "./activations.js";
import {
  absolute, add, asFloat, asInteger, clip, divide, equal, larger, lessEqual, log, max, mean, multiply, negative, oneHot, reshape, sqrt,
  square, subtract, sum, where,
} from "./arrays.js";

const EPSILON = 1e-7;
const overLast = (values) => mean(values, -1);

function smoothed(labels, { label_smoothing: part = 0 }, share) {
  return part ? add(multiply(labels, 1 - part), part * share) : labels;
}

function logProbabilities({ logits, output }, { from_logits }) {
  if (logits !== null) return logSoftmax(logits);
  if (from_logits) return logSoftmax(output);
  return log(clip(divide(output, sum(output, -1, { keep: true })), EPSILON, 1 - EPSILON));
}

function categoricalCrossentropy(labels, prediction, config) {
  const classes = prediction.output.shape.at(-1);
  return negative(sum(multiply(smoothed(labels, config, 1 / classes), logProbabilities(prediction, config)), -1));
}

export function classesOf(labels, output) {
  return asInteger(labels.shape.length === output.shape.length ? reshape(labels, output.shape.slice(0, -1)) : labels);
}

function sparseCrossentropy(labels, prediction, config) {
  const { output, logits } = prediction, hot = oneHot(classesOf(labels, output), output.shape.at(-1));
  if (logits !== null || config.from_logits) return negative(sum(multiply(hot, logSoftmax(logits ?? output)), -1));
  return negative(sum(multiply(hot, logSoftmax(log(clip(output, EPSILON, 1 - EPSILON)))), -1));
}

function binaryCrossentropy(labels, { output, logits }, config) {
  const wanted = smoothed(labels, config, 0.5);
  if (logits !== null || config.from_logits) {
    const x = logits ?? output;
    return overLast(subtract(softplus(x), multiply(wanted, x)));
  }
  const p = clip(output, EPSILON, 1 - EPSILON);
  return overLast(negative(add(multiply(wanted, log(p)), multiply(subtract(1, wanted), log(subtract(1, p))))));
}

function huber(labels, { output }, { delta = 1 }) {
  const error = absolute(subtract(output, labels));
  return overLast(where(lessEqual(error, delta), multiply(0.5, square(error)), subtract(multiply(delta, error), 0.5 * delta * delta)));
}

function logCosh(labels, { output }) {
  const error = subtract(output, labels);
  return overLast(subtract(add(error, softplus(multiply(error, -2))), Math.LN2));
}

function divergence(labels, { output }) {
  const [wanted, p] = [clip(labels, EPSILON, 1), clip(output, EPSILON, 1)];
  return sum(multiply(wanted, log(divide(wanted, p))), -1);
}

const normalized = (x) => divide(x, larger(sqrt(sum(square(x), -1, { keep: true })), 1e-12));

// Labels of 0 and 1 become -1 and 1, if there are no others.
function signs(labels) {
  const binary = asFloat(equal(multiply(labels, subtract(labels, 1)), 0)), all = equal(sum(subtract(1, binary)), 0);
  return where(all, subtract(multiply(2, labels), 1), labels);
}

function categoricalHinge(labels, { output }) {
  const right = sum(multiply(labels, output), -1), wrong = max(multiply(subtract(1, labels), output), -1);
  return larger(add(subtract(wrong, right), 1), 0);
}

const margin = (labels, output) => larger(subtract(1, multiply(signs(labels), output)), 0);
const logOf = (x) => log(add(larger(x, EPSILON), 1));

export const LOSSES = {
  mean_squared_error: (labels, { output }) => overLast(square(subtract(labels, output))),
  mean_absolute_error: (labels, { output }) => overLast(absolute(subtract(labels, output))),
  mean_absolute_percentage_error: (labels, { output }) =>
    multiply(100, overLast(absolute(divide(subtract(labels, output), larger(absolute(labels), EPSILON))))),
  mean_squared_logarithmic_error: (labels, { output }) => overLast(square(subtract(logOf(output), logOf(labels)))),
  huber,
  log_cosh: logCosh,
  cosine_similarity: (labels, { output }) => negative(sum(multiply(normalized(labels), normalized(output)), -1)),
  kl_divergence: divergence,
  poisson: (labels, { output }) => overLast(subtract(output, multiply(labels, log(add(output, EPSILON))))),
  hinge: (labels, { output }) => overLast(margin(labels, output)),
  squared_hinge: (labels, { output }) => overLast(square(margin(labels, output))),
  categorical_hinge: categoricalHinge,
  categorical_crossentropy: categoricalCrossentropy,
  sparse_categorical_crossentropy: sparseCrossentropy,
  binary_crossentropy: binaryCrossentropy,
};

// Return the mean over all samples and positions, as the reduction "sum_over_batch_size" does, or the sum.
export function lossOf({ kind, config, reduction }, labels, prediction) {
  const values = LOSSES[kind](labels, prediction, config);
  return reduction === "sum" ? sum(values) : mean(values);
}
