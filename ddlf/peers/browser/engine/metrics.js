// Metrics by Keras's names.

import { argmax, asFloat, asInteger, equal, greater, mean, negative, square, subtract } from "./arrays.js";
import { classesOf, LOSSES } from "./losses.js";

const best = (x) => argmax(x, -1);
const hits = (a, b) => asFloat(equal(a, b));

function binaryAccuracy(labels, { output }, { threshold = 0.5 }) {
  return hits(asFloat(greater(output, threshold)), labels);
}

const ACCURACIES = {
  accuracy: (labels, { output }) => hits(labels, output),
  binary_accuracy: binaryAccuracy,
  categorical_accuracy: (labels, { output }) => hits(best(labels), best(output)),
  sparse_categorical_accuracy: (labels, { output }) => hits(classesOf(labels, output), asInteger(best(output))),
};

// Keras chooses one of three by the shapes of labels and predictions, if a metric is called "accuracy".
function byShape(labels, output) {
  if (output.shape.at(-1) === 1) return "binary_accuracy";
  const sparse = labels.shape.length < output.shape.length || labels.shape.at(-1) === 1;
  return sparse ? "sparse_categorical_accuracy" : "categorical_accuracy";
}

function valuesOf({ kind, config }, labels, prediction) {
  if (kind === "accuracy_by_shape") return ACCURACIES[byShape(labels, prediction.output)](labels, prediction, {});
  if (kind === "root_mean_squared_error") return square(subtract(prediction.output, labels));
  if (kind === "cosine_similarity") return negative(LOSSES.cosine_similarity(labels, prediction, config));
  return (ACCURACIES[kind] ?? LOSSES[kind])(labels, prediction, config);
}

// Return the mean of a batch.
export const measured = (metric, labels, prediction) => mean(valuesOf(metric, labels, prediction));
export const METRICS = [...Object.keys(ACCURACIES), "accuracy_by_shape", "root_mean_squared_error", ...Object.keys(LOSSES)];

// The means of losses and metrics over several batches.
export class Means {
  #sums = {}; #samples = 0;

  // `metrics` are those of the graph's losses.
  constructor(metrics) {
    this.roots = new Set(metrics.filter(({ kind }) => kind === "root_mean_squared_error").map(({ name }) => name));
  }

  add(means, samples) {
    for (const [name, mean] of Object.entries(means)) this.#sums[name] = (this.#sums[name] ?? 0) + mean * samples;
    this.#samples += samples;
  }

  get values() {
    const final = (name, mean) => (this.roots.has(name) ? Math.sqrt(mean) : mean);
    return Object.fromEntries(Object.entries(this.#sums).map(([name, sum]) => [name, final(name, sum / this.#samples)]));
  }
}
