// Sets of weights as bytes, in the layout of safetensors: the length of the header as u64, the header as JSON, filled with
// spaces so that the data begins at a multiple of 8, and the data, little-endian. Weights are float32 here; with a codec,
// the trained ones of a set are rounded to 2 bytes.

import { HALVES, isBeyond } from "./halves.js";

const LENGTH = 8;

function headerOf(set) {
  const length = set.byteLength >= LENGTH ? Number(new DataView(set).getBigUint64(0, true)) : Infinity;
  if (LENGTH + length > set.byteLength) throw new Error("the set is cut off");
  return new Uint8Array(set, 0, LENGTH + length);
}

// The layout of the sets of one model: all of them begin with the same bytes and have the same length.
export class Layout {
  constructor(set) {
    this.header = headerOf(set).slice();
    const { __metadata__: facts, ...entries } = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(this.header.subarray(LENGTH)));
    this.entries = Object.entries(entries).map(([name, { dtype, shape, data_offsets: [from, to] }]) => {
      const half = HALVES[dtype] ?? null;
      if (!half && dtype !== "F32") throw new Error(`the weight ${name} has the type ${dtype} instead of ${["F32", ...Object.keys(HALVES)].join(", ")}`);
      return { name, shape, half, from: this.header.length + from, count: (to - from) / (half ? 2 : 4) };
    });
    this.bytes = Math.max(this.header.length, ...this.entries.map(({ from, count, half }) => from + count * (half ? 2 : 4)));
    this.rounds = this.entries.some(({ half }) => half);
  }

  // Return copies of the weights in a set, by name.
  decode(set) {
    const header = headerOf(set);
    const same = header.length === this.header.length && header.every((byte, n) => byte === this.header[n]);
    if (!same) throw new Error("the set is one of another model");
    if (set.byteLength !== this.bytes) throw new Error(`the set has ${set.byteLength} bytes instead of ${this.bytes}`);
    const read = ({ half, from, count }) => (half ? half.read(new Uint16Array(set, from, count)) : new Float32Array(set, from, count).slice());
    return Object.fromEntries(this.entries.map((entry) => [entry.name, read(entry)]));
  }

  // Return weights by name as the bytes of a set.
  encode(weights) {
    const set = new ArrayBuffer(this.bytes);
    new Uint8Array(set).set(this.header);
    for (const { name, half, from, count } of this.entries) {
      if (half) half.round(weights[name], new Uint16Array(set, from, count));
      else new Float32Array(set, from, count).set(weights[name]);
    }
    return set;
  }

  // Return why weights cannot travel: an empty text if a set holds all of their finite values.
  beyond(weights) {
    for (const { name, half } of this.entries) {
      if (half && isBeyond(half, weights[name])) return `${name} has values of ${half.limit} or more, which ${half.name} makes infinite`;
    }
    return "";
  }

  // Return weights by name as a safetensors file, without rounding.
  file(weights) {
    let at = 0;
    const table = Object.fromEntries(this.entries.map(({ name, shape, count }) => [name, { dtype: "F32", shape, data_offsets: [at, (at += 4 * count)] }]));
    const text = new TextEncoder().encode(JSON.stringify(table)), length = Math.ceil(text.length / 8) * 8, begin = LENGTH + length;
    const file = new ArrayBuffer(begin + at);
    new DataView(file).setBigUint64(0, BigInt(length), true);
    new Uint8Array(file, LENGTH, length).fill(0x20).set(text);
    for (const { name } of this.entries) new Float32Array(file, begin + table[name].data_offsets[0], weights[name].length).set(weights[name]);
    return file;
  }
}
