// Noise and a hidden update of the engine, in Node: node noise.js ENGINE < case. Prints one JSON document.

import { readFileSync } from "node:fs";

const { gaussian, hidden } = await import(`${process.argv[2]}/noise.js`);
const { bytes, count, std, given, weights, trained, plan, many } = JSON.parse(readFileSync(0, "utf8"));
const arrays = (record) => Object.fromEntries(Object.entries(record).map(([name, values]) => [name, new Float32Array(values)]));
const plain = (record) => Object.fromEntries(Object.entries(record).map(([name, values]) => [name, [...values]]));
const fixed = (size) => Uint8Array.from({ length: size }, (_, n) => bytes[n % bytes.length]);
console.log(JSON.stringify({
  fixed: [...gaussian(count, std, fixed)],
  hidden: plain(hidden(arrays(given), arrays(weights), trained, plan, fixed)),
  many: [[...gaussian(many, std)], [...gaussian(many, std)]],
}));
