// Reads files that numpy.savez and numpy.savez_compressed write: a zip of arrays. Executes nothing of a file.

import { Refused } from "../refused.js";

export const MOST_BYTES = 2 ** 30; // of all arrays together
const AGAIN = "write it again with numpy.savez";
const END = 0x06054b50, ENTRY = 0x02014b50, LOCAL = 0x04034b50, END_64 = 0x06064b50, LOCATOR_64 = 0x07064b50, EMPTY = 0xffffffff;

const TABLE = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? (n >>> 1) ^ 0xedb88320 : n >>> 1;
  return n;
});

function crc32(bytes) {
  let crc = EMPTY;
  for (const byte of bytes) crc = TABLE[(crc ^ byte) & 255] ^ (crc >>> 8);
  return (crc ^ EMPTY) >>> 0;
}

// Return the arrays of a file by name: {data, shape}, where data is a typed array, or a list of texts.
export async function readNpz(buffer, source) {
  const broken = (why) => new Refused(`${source} cannot be read: ${why}`, AGAIN);
  const arrays = {};
  let total = 0;
  try {
    for (const entry of entriesOf(buffer)) {
      total += entry.size;
      if (total > MOST_BYTES) throw new Refused(`${source} has more than ${MOST_BYTES / 2 ** 20} MiB of arrays`, "save a part of the samples");
      if (!entry.name.endsWith(".npy")) continue;
      const bytes = await contentOf(buffer, entry), name = entry.name.slice(0, -4);
      if (crc32(bytes) !== entry.crc) throw broken(`the array ${name} is damaged`);
      arrays[name] = readNpy(bytes, `${source}: ${name}`);
    }
  } catch (error) {
    if (error instanceof Refused) throw error;
    throw broken("it is no .npz file, or it is cut off");
  }
  if (!Object.keys(arrays).length) throw broken("it has no arrays");
  return arrays;
}

function entriesOf(buffer) {
  const view = new DataView(buffer), bytes = new Uint8Array(buffer);
  let at = buffer.byteLength - 22;
  while (at >= 0 && view.getUint32(at, true) !== END) at -= 1;
  if (at < 0) throw new Error("no end");
  let count = view.getUint16(at + 10, true), place = view.getUint32(at + 16, true);
  if (at >= 20 && view.getUint32(at - 20, true) === LOCATOR_64) {
    const end = Number(view.getBigUint64(at - 12, true));
    if (view.getUint32(end, true) !== END_64) throw new Error("no end of zip64");
    count = Number(view.getBigUint64(end + 32, true));
    place = Number(view.getBigUint64(end + 48, true));
  }
  return Array.from({ length: count }, () => {
    if (view.getUint32(place, true) !== ENTRY) throw new Error("no entry");
    const [nameLength, extraLength, commentLength] = [28, 30, 32].map((n) => view.getUint16(place + n, true));
    const name = new TextDecoder().decode(bytes.subarray(place + 46, place + 46 + nameLength));
    const [packed, size, start] = wide(view, place, place + 46 + nameLength, extraLength);
    const entry = { name, method: view.getUint16(place + 10, true), crc: view.getUint32(place + 16, true), packed, size, start };
    place += 46 + nameLength + extraLength + commentLength;
    return entry;
  });
}

// Sizes and place of an entry. Those of 4 GiB and more are in an extra field.
function wide(view, place, extra, length) {
  let [packed, size, start] = [20, 24, 42].map((n) => view.getUint32(place + n, true));
  for (let at = extra; at + 4 <= extra + length; at += 4 + view.getUint16(at + 2, true)) {
    if (view.getUint16(at, true) !== 1) continue;
    let next = at + 4;
    const take = (value) => {
      if (value !== EMPTY) return value;
      next += 8;
      return Number(view.getBigUint64(next - 8, true));
    };
    size = take(size);
    packed = take(packed);
    start = take(start);
  }
  return [packed, size, start];
}

async function contentOf(buffer, { method, packed, size, start }) {
  const view = new DataView(buffer);
  if (view.getUint32(start, true) !== LOCAL) throw new Error("no local header");
  const begin = start + 30 + view.getUint16(start + 26, true) + view.getUint16(start + 28, true);
  const content = new Uint8Array(buffer, begin, packed);
  if (method === 0) return content;
  if (method !== 8) throw new Error("another compression");
  const result = new Uint8Array(size), reader = new Blob([content]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  let at = 0;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    result.set(part.value, at); // throws if the file has more bytes than it says
    at += part.value.length;
  }
  if (at !== size) throw new Error("too short");
  return result;
}

const READERS = {
  b1: [1, "getUint8", Uint8Array], i1: [1, "getInt8", Int8Array], u1: [1, "getUint8", Uint8Array],
  i2: [2, "getInt16", Int16Array], u2: [2, "getUint16", Uint16Array], i4: [4, "getInt32", Int32Array], u4: [4, "getUint32", Uint32Array],
  i8: [8, "getBigInt64", Float64Array], u8: [8, "getBigUint64", Float64Array], f4: [4, "getFloat32", Float32Array], f8: [8, "getFloat64", Float64Array],
  f2: [2, "getUint16", Float32Array],
};

function half(bits) {
  const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

// Return the array of one .npy file. Rows of the result follow each other, whatever the order in the file.
export function readNpy(bytes, source) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength), major = view.getUint8(6);
  if (view.getUint32(0) !== 0x934e554d || ![1, 2, 3].includes(major)) throw new Refused(`${source} is no array of NumPy`, AGAIN);
  const begin = major === 1 ? 10 : 12, length = major === 1 ? view.getUint16(8, true) : view.getUint32(8, true);
  const header = new TextDecoder().decode(bytes.subarray(begin, begin + length));
  const kind = /'descr':\s*'([<>|=]?)([a-zA-Z])(\d+)'/.exec(header), sizes = /'shape':\s*\(([^)]*)\)/.exec(header);
  const isObjects = /'descr':\s*'\|?O'/.test(header);
  if (isObjects || !kind || !sizes) throw new Refused(`${source} has Python objects, not numbers`, "turn them into numbers or texts before they are saved");
  const [, order, letter, width] = kind, shape = sizes[1].split(",").filter((part) => part.trim()).map(Number);
  const count = shape.reduce((all, n) => all * n, 1), little = order !== ">";
  const [values, each] = valuesOf(view, begin + length, letter, Number(width), count, little, source);
  return { data: /'fortran_order':\s*True/.test(header) && shape.length > 1 ? turned(values, shape) : values, shape, kind: letter, width: each };
}

function valuesOf(view, at, letter, width, count, little, source) {
  if (letter === "U" || letter === "S") {
    const size = letter === "U" ? 4 * width : width;
    if (at + count * size > view.byteLength) throw new Error("cut off");
    return [Array.from({ length: count }, (_, n) => textAt(view, at + n * size, letter, width, little)), size];
  }
  const reader = READERS[`${letter}${width}`];
  if (!reader) throw new Refused(`${source} has values of the type ${letter}${width}`, "save numbers: numpy.float32 or numpy.uint8");
  const [size, method, Typed] = reader;
  if (at + count * size > view.byteLength) throw new Error("cut off");
  const values = new Typed(count);
  for (let n = 0; n < count; n++) values[n] = Number(view[method](at + n * size, little));
  return [letter === "f" && size === 2 ? values.map(half) : values, size];
}

function textAt(view, at, letter, width, little) {
  if (letter === "S") return new TextDecoder().decode(new Uint8Array(view.buffer, view.byteOffset + at, width)).replace(/\0+$/, "");
  let text = "";
  for (let n = 0; n < width; n++) text += String.fromCodePoint(view.getUint32(at + 4 * n, little));
  return text.replace(/\0+$/, "");
}

// From the first axis fastest to the last axis fastest.
function turned(values, shape) {
  const result = Array.isArray(values) ? new Array(values.length) : new values.constructor(values.length);
  const steps = shape.map((_, axis) => shape.slice(0, axis).reduce((all, n) => all * n, 1)), index = shape.map(() => 0);
  for (let n = 0; n < values.length; n++) {
    result[n] = values[index.reduce((place, i, axis) => place + i * steps[axis], 0)];
    for (let axis = shape.length - 1; axis >= 0 && ++index[axis] === shape[axis]; axis--) index[axis] = 0;
  }
  return result;
}
