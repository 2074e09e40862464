// Runs cases of frames and merges in Node: node wire.js ENGINE < cases > results, one JSON document on each line.

import { createInterface } from "node:readline";

const engine = process.argv[2];
const { decode, encode } = await import(`${engine}/frames.js`);
const { mergeOf } = await import(`${engine}/merges.js`);
const { Layout } = await import(`${engine}/safetensors.js`);
const bytes = (text) => { const all = Buffer.from(text, "base64"); return all.buffer.slice(all.byteOffset, all.byteOffset + all.length); };
const base64 = (buffer) => Buffer.from(buffer).toString("base64");
const mapped = (record, f) => Object.fromEntries(Object.entries(record).map(([name, value]) => [name, f(value)]));
const opened = ({ weights, trainings, accuracy }) => ({ weights: { w: new Float32Array(weights) }, trainings, accuracy: accuracy ?? NaN });

const acts = {
  encode: ({ message }) => base64(encode({ ...message, set: message.set ? bytes(message.set) : null })),
  decode: ({ frame, of, setBytes }) => {
    const message = decode(bytes(frame), of, setBytes);
    return { ...message, set: message.set && base64(message.set) };
  },
  set: ({ like, weights }) => {
    const layout = new Layout(bytes(like)), given = mapped(weights, (text) => new Float32Array(bytes(text))), set = layout.encode(given);
    return { set: base64(set), decoded: mapped(layout.decode(set), ({ buffer }) => base64(buffer)), file: base64(layout.file(given)), beyond: layout.beyond(given) };
  },
  merge: ({ rule, mine, theirs }) => {
    const merged = mergeOf(rule)(opened(mine), opened(theirs));
    return { ...merged, weights: [...merged.weights.w] };
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { do: what, ...given } = JSON.parse(line);
  try {
    console.log(JSON.stringify({ result: acts[what](given) }));
  } catch (error) {
    console.log(JSON.stringify({ error: error.message }));
  }
}
