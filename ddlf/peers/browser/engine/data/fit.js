// Fits arrays of a file to a model, as Python peers do (ddlf/extras/text/training/data.py): shapes, labels, held-out samples.

import { named, Refused } from "../refused.js";

export const TEST_EVERY = 5; // every fifth sample is for the test, beginning with the first
const product = (shape) => shape.reduce((all, n) => all * n, 1);
const listed = (shape) => `[${shape.join(", ")}]`;
const equal = (a, b) => a.length === b.length && a.every((n, axis) => n === b[axis]);

// What a model takes and gives, from its layer graph.
export function needsOf({ graph, classes }) {
  if (graph.inputs.length !== 1 || graph.losses.length !== 1) {
    throw new Refused(`this model has ${graph.inputs.length} inputs and ${graph.losses.length} outputs, and this page trains models with one of each`,
      "take part with Python: ddlf peers join LINK --data mine.npz");
  }
  const output = graph.output_shapes[0], last = output.at(-1) ?? 1;
  return { input: graph.inputs[0].shape, output, loss: graph.losses[0].kind, units: last, classes: classes ?? [] };
}

// Return the number of classes that a label can mean; 0 if labels are no classes.
export const classCount = ({ units, loss, classes }) => (units > 1 ? units : loss === "binary_crossentropy" || classes.length === 2 ? 2 : 0);

// Whether arrays of two shapes have the same values in another form: axes of size 1, or all in one.
function isSame(shape, wanted) {
  const big = (sizes) => sizes.filter((n) => n !== 1);
  return equal(big(shape), big(wanted)) || (product(shape) === product(wanted) && (shape.length === 1 || wanted.length === 1));
}

// Return {data, test, notes}: inputs and labels for training, held-out ones, and a sentence for each conversion.
export function fitArrays(arrays, needs, source) {
  const notes = [], given = { ...arrays };
  if (given.data && !given.x && !given.x_train) splitTable(given, needs, source, notes);
  const whole = given.x !== undefined, part = whole ? "" : "_train";
  if (whole && given.x_train) throw new Refused(`${source} has x and x_train, which is twice the training data`, "leave out one of them");
  if (!given[`x${part}`]) {
    throw new Refused(`${source} has no x or x_train; it has ${named(Object.keys(arrays), 12)}`, "save x and y, or x_train, y_train, x_test and y_test");
  }
  let data = pair(given, part, needs, source), test = given.x_test ? pair(given, "_test", needs, source) : null;
  if (whole && test === null) {
    [data, test] = heldOut(data);
    notes.push("every fifth sample is for the test");
    if (!data.inputs[0].shape[0]) throw new Refused(`${source} has one sample`, "training needs more");
  }
  const known = new Set(["x", "y", "x_train", "y_train", "x_test", "y_test", "data", "target"]);
  const unused = Object.keys(arrays).filter((name) => !known.has(name));
  if (unused.length) notes.push(`nothing reads ${named(unused)} of ${source}`);
  return { data, test, notes };
}

function splitTable(given, needs, source, notes) {
  const table = given.data;
  if (given.target) {
    [given.x, given.y] = [table, given.target];
    return;
  }
  const features = product(needs.input), outputs = product(needs.output), columns = table.shape[1], labels = columns - features;
  if (table.shape.length !== 2 || (labels !== 1 && labels !== outputs)) {
    throw new Refused(`${source} has a table data of the shape ${listed(table.shape)}, and the model wants ${features} columns as inputs and the last 1 or ${outputs} as labels`,
      "save inputs and labels apart, as x and y");
  }
  const rows = table.shape[0], cut = (from, count) => {
    const data = new table.data.constructor(rows * count);
    for (let row = 0; row < rows; row++) data.set(table.data.subarray(row * columns + from, row * columns + from + count), row * count);
    return { ...table, data, shape: [rows, count] };
  };
  [given.x, given.y] = [cut(0, features), cut(features, labels)];
  notes.push(labels === 1 ? "the last column of data is the labels" : "the last columns of data are the labels");
}

function pair(arrays, part, needs, source) {
  const [x, y] = [arrays[`x${part}`], arrays[`y${part}`]];
  if (!y) throw new Refused(`${source} has no y${part}`, `save the labels of x${part} as y${part}`);
  for (const [name, array] of [["x", x], ["y", y]]) {
    if (!array.shape.length) throw new Refused(`${source} has ${name}${part} as a single number`, "give each sample one row");
    if (!array.shape[0]) throw new Refused(`${source} has no samples in ${name}${part}`, "choose a file with samples");
  }
  if (x.shape[0] !== y.shape[0]) {
    throw new Refused(`${source} has ${x.shape[0].toLocaleString("en")} samples in x${part} and ${y.shape[0].toLocaleString("en")} in y${part}`, "give each sample one row in both");
  }
  return { inputs: [fitInput(x, needs, `x${part}`, source)], labels: [fitLabels(y, needs, `y${part}`, source)] };
}

function fitInput(x, { input }, name, source) {
  if (Array.isArray(x.data)) throw new Refused(`${source} has texts in ${name}, and the model wants numbers`, "turn them into numbers before they are saved");
  const shape = x.shape.slice(1);
  if (!isSame(shape, input)) {
    const sorted = (sizes) => [...sizes].sort((a, b) => a - b);
    const isMoved = equal(sorted(shape), sorted(input));
    throw new Refused(`${source} has ${name} with samples of the shape ${listed(shape)}, and the model wants ${listed(input)}`,
      isMoved ? "axes are in another order: numpy.moveaxis(x, 1, -1) puts channels last" : "save samples of the model's shape");
  }
  const data = Float32Array.from(x.data);
  if (!data.every(Number.isFinite)) throw new Refused(`${source} has values in ${name} that are not finite`, "replace NaN and infinite values");
  return { data, shape: [x.shape[0], ...input] };
}

// Return numbers of classes for texts, by the agreed names.
export function classNumbers(texts, classes, source) {
  if (!classes.length) {
    throw new Refused(`${source} has texts as labels, and the server has agreed on no names of classes`,
      "ask its owner to add --classes cat,dog to ddlf peers serve, or use numbers");
  }
  const unknown = [...new Set(texts)].filter((text) => !classes.includes(text));
  if (unknown.length) {
    const count = texts.filter((text) => unknown.includes(text)).length;
    throw new Refused(`${count.toLocaleString("en")} of ${texts.length.toLocaleString("en")} samples of ${source} have a label that this model does not know: ${named(unknown)}`,
      `the classes are ${named(classes, 10)}`);
  }
  return Int32Array.from(texts, (text) => classes.indexOf(text));
}

function fitLabels(y, needs, name, source) {
  const { output, units, loss } = needs, values = Array.isArray(y.data) ? classNumbers(y.data, needs.classes, source) : y.data;
  const rows = y.shape[0], shape = y.shape.slice(1), outer = output.slice(0, -1);
  if (units > 1 && (equal(shape, outer) || equal(shape, [...outer, 1]))) {
    checkClasses(values, units, name, source);
    return asLabels(values, needs, [rows, ...outer]);
  }
  if (equal(shape, output) && units > 1 && loss === "sparse_categorical_crossentropy") {
    const numbers = new Int32Array(values.length / units);
    for (let n = 0; n < numbers.length; n++) {
      const row = Array.from(values.subarray(n * units, (n + 1) * units), Number);
      if (!row.every((value) => value === 0 || value === 1) || row.reduce((sum, value) => sum + value, 0) !== 1) {
        throw new Refused(`${source} has rows in ${name} that are not classes, and the model's loss wants classes`, "save class numbers");
      }
      numbers[n] = row.indexOf(1);
    }
    return { data: numbers, shape: [rows, ...outer] };
  }
  if (!isSame(shape, output)) {
    const wanted = units > 1 ? `${listed(output)}, or class numbers of the shape ${listed(outer)}` : listed(output);
    throw new Refused(`${source} has ${name} with labels of the shape ${listed(shape)}, and the model wants ${wanted}`, "save labels of the model's shape");
  }
  return { data: Float32Array.from(values), shape: [rows, ...output] };
}

function checkClasses(values, count, name, source) {
  let [low, high, whole] = [Infinity, -Infinity, true];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
    whole &&= Number.isInteger(value);
  }
  if (whole && low >= 0 && high < count) return;
  throw new Refused(`${source} has labels from ${low} to ${high} in ${name}, and the model has ${count} classes: whole numbers from 0 to ${count - 1}`,
    low === 1 && high === count ? "labels that begin with 1 lack a '- 1'" : "number the classes from 0");
}

// Return class numbers as the loss wants them: numbers, or rows with a single 1.
export function asLabels(numbers, { units, loss, output }, shape) {
  if (units === 1) return { data: Float32Array.from(numbers), shape: [shape[0], ...output] };
  if (loss === "sparse_categorical_crossentropy") return { data: Int32Array.from(numbers), shape };
  const data = new Float32Array(numbers.length * units);
  numbers.forEach((number, n) => { data[n * units + Number(number)] = 1; });
  return { data, shape: [...shape, units] };
}

// Return the training part and the held-out part of inputs and labels.
export function heldOut({ inputs, labels }, every = TEST_EVERY) {
  const part = (arrays, takes) => arrays.map(({ data, shape }) => {
    const size = product(shape.slice(1)), places = [...Array(shape[0]).keys()].filter((n) => takes(n % every === 0));
    const taken = new data.constructor(places.length * size);
    places.forEach((place, n) => taken.set(data.subarray(place * size, (place + 1) * size), n * size));
    return { data: taken, shape: [places.length, ...shape.slice(1)] };
  });
  const both = (takes) => ({ inputs: part(inputs, takes), labels: part(labels, takes) });
  return [both((isTest) => !isTest), both((isTest) => isTest)];
}

// Return how many samples there are of each class, from labels as the model gets them.
export function counted({ data, shape }, needs) {
  const count = classCount(needs), result = new Array(count).fill(0);
  if (!count) return result;
  const isRows = needs.units > 1 && shape.at(-1) === needs.units && data instanceof Float32Array;
  if (isRows) for (let n = 0; n < data.length; n++) result[n % needs.units] += data[n];
  else for (const number of data) result[Math.round(number)] += 1;
  return result;
}

// Return the class of one sample.
export function classOf({ data, shape }, row, needs) {
  if (needs.units > 1 && data instanceof Float32Array && shape.at(-1) === needs.units) {
    const values = data.subarray(row * needs.units, (row + 1) * needs.units);
    return values.indexOf(Math.max(...values));
  }
  return Math.round(data[row]);
}
