// Sets of weights as bytes, in the layout of safetensors: the length of the header as u64, the header as JSON, filled with
// spaces so that the data begins at a multiple of 8, and the data: float32, little-endian.

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
    this.entries = Object.entries(entries).map(([name, { dtype, data_offsets: [from, to] }]) => {
      if (dtype !== "F32") throw new Error(`the weight ${name} has the type ${dtype} instead of F32`);
      return { name, from: this.header.length + from, count: (to - from) / 4 };
    });
    this.bytes = Math.max(this.header.length, ...this.entries.map(({ from, count }) => from + 4 * count));
  }

  // Return copies of the weights in a set, by name.
  decode(set) {
    const header = headerOf(set);
    const same = header.length === this.header.length && header.every((byte, n) => byte === this.header[n]);
    if (!same) throw new Error("the set is one of another model");
    if (set.byteLength !== this.bytes) throw new Error(`the set has ${set.byteLength} bytes instead of ${this.bytes}`);
    return Object.fromEntries(this.entries.map(({ name, from, count }) => [name, new Float32Array(set, from, count).slice()]));
  }

  // Return weights by name as the bytes of a set.
  encode(weights) {
    const set = new ArrayBuffer(this.bytes);
    new Uint8Array(set).set(this.header);
    for (const { name, from, count } of this.entries) new Float32Array(set, from, count).set(weights[name]);
    return set;
  }
}
