// Reads files and fits them to models in Node: node data.js BROWSER < cases > results, one JSON document on each line.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const [shard, fit, npz, pictures, trial] = await Promise.all(["engine/shard", "engine/data/fit", "engine/data/npz", "page/pictures", "page/trial"].map((name) => import(`${process.argv[2]}/${name}.js`)));
const plain = (array) => (array && { shape: array.shape, data: Array.from(array.data, Number), type: array.data.constructor.name });
const both = (part) => part && { x: plain(part.inputs[0]), y: plain(part.labels[0]) };

const acts = {
  async fitted({ path, needs, source }) {
    const { buffer, byteOffset, byteLength } = readFileSync(path), arrays = await npz.readNpz(buffer.slice(byteOffset, byteOffset + byteLength), source);
    const { data, test, notes } = fit.fitArrays(arrays, needs, source);
    return { train: both(data), test: both(test), notes };
  },
  arrays: async ({ path }) => {
    const { buffer, byteOffset, byteLength } = readFileSync(path), found = await npz.readNpz(buffer.slice(byteOffset, byteOffset + byteLength), "a.npz");
    return Object.fromEntries(Object.entries(found).map(([name, { data, shape }]) => [name, { shape, data: Array.from(data, (value) => (typeof value === "string" || Number.isFinite(value) ? value : `${value}`)) }]));
  },
  // A server that sends a file in pieces of some bytes.
  async lent({ path, bytes, served }) {
    const content = readFileSync(path), asked = [];
    globalThis.fetch = async (url, { headers: { Range: range } }) => {
      asked.push([url, range]);
      const begin = Number(/^bytes=(\d+)-$/.exec(range)[1]), piece = content.subarray(begin, begin + bytes);
      return new Response(piece, { status: 206, headers: { "Content-Range": `bytes ${begin}-${begin + piece.length - 1}/${content.length}` } });
    };
    return { ...both(await shard.lent(3, served)), asked };
  },
  needs: ({ graph }) => fit.needsOf(graph),
  picture: ({ needs }) => pictures.pictureShape(needs),
  size: ({ bytes }) => pictures.claimedSize(Uint8Array.from(bytes)),
  probabilities: ({ values, count }) => trial.probabilities(values, count),
  numbers: ({ labels, needs }) => labels.map((label) => pictures.numberOf(label, needs)),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { act, ...given } = JSON.parse(line);
  let result;
  try {
    result = { result: await acts[act](given) };
  } catch (error) {
    result = { refused: error.message, hint: error.hint ?? null };
  }
  console.log(JSON.stringify(result));
}
