// Runs cases of the engine: what `cases.py` writes, in a page or in Node.

const decoded = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const numbers = (text) => new Float32Array(decoded(text).buffer);
export const opened = (arrays) => arrays.map(({ data, shape }) => ({ data: numbers(data), shape }));

export function encoded(array) {
  const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
  let text = "";
  for (let n = 0; n < bytes.length; n += 4096) text += String.fromCharCode(...bytes.subarray(n, n + 4096));
  return btoa(text);
}

const mapped = (record, f) => Object.fromEntries(Object.entries(record).map(([name, value]) => [name, f(value)]));

export const openedWeights = (weights) => mapped(weights, numbers);

export async function run({ Model, Means }, { graph, weights, batches }) {
  const model = new Model(graph, { seed: 1 });
  try {
    model.setWeights(openedWeights(weights));
    const [first] = batches, inputs = opened(first.inputs);
    const outputs = (await model.predict(inputs)).map(({ data, shape }) => ({ data: encoded(data), shape }));
    const finished = (means) => {
      const all = new Means(graph.losses.flatMap(({ metrics }) => metrics));
      all.add(means, inputs[0].shape[0]);
      return all.values;
    };
    const evaluated = finished(await model.evaluate(inputs, opened(first.labels)));
    const trained = [];
    for (const batch of batches) trained.push(finished(await model.train(opened(batch.inputs), opened(batch.labels))));
    return { outputs, evaluated, trained, weights: mapped(await model.weights(), encoded) };
  } catch (error) {
    return { error: `${error.stack}` };
  } finally {
    model.free();
  }
}
