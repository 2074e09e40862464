// The messages between a peer and the server, as bytes: docs/reference/peers_protocol.md describes them.

const MAGIC = 0x44444c50, VERSION = 1, PREFIX = 16;
const whole = { fits: Number.isSafeInteger, least: 0 }, number = { fits: Number.isFinite }, text = { type: "string" }, yes = { type: "boolean" };
const table = { fits: (value) => typeof value === "object" && value !== null && !Array.isArray(value) };

// By kind: name, fields, defaults of fields that may be absent, and whether a set follows (null: maybe).
export const KINDS = {
  1: { name: "hello", fields: { name: text, samples: whole, layout: text, run: text, keeps: yes, updates: whole }, usual: { layout: "", run: "", keeps: false, updates: 0 }, hasSet: false },
  2: { name: "welcome", fields: { run: text, peer: whole, plan: table, model: text, layout: text, number: whole, set_number: whole, trainings: whole, rate: number, shard: whole }, usual: { shard: 0 }, hasSet: null },
  3: { name: "post", fields: { number: whole, contains: whole, updates: whole, base: whole, accuracy: number, loss: number }, usual: { base: 0, accuracy: -1, loss: -1 }, hasSet: true },
  4: {
    name: "answer", fields: { number: whole, answer: text, set_number: whole, trainings: whole, accuracy: number, rate: number, why: text, epsilon: number },
    usual: { set_number: 0, trainings: 0, accuracy: -1, rate: 0, why: "", epsilon: -1 }, hasSet: null,
  },
  5: { name: "score", fields: { set_number: whole, accuracy: number, loss: number, samples: whole }, usual: {}, hasSet: false },
  6: { name: "broken", fields: { why: text }, usual: {}, hasSet: false },
  7: { name: "bye", fields: {}, usual: {}, hasSet: false },
  8: { name: "end", fields: { why: text, hint: text, over: yes, set_number: whole }, usual: { hint: "", over: true, set_number: 0 }, hasSet: null },
  16: { name: "attempt", fields: { attempt: text, base: whole }, usual: {}, hasSet: false },
  17: { name: "offered", fields: { attempt: text, base: whole, identity: text, key: text, signature: text }, usual: {}, hasSet: false },
  18: { name: "members", fields: { attempt: text, samples: whole, offers: table }, usual: {}, hasSet: false },
  19: { name: "masked", fields: { number: whole, attempt: text, base: whole, updates: whole }, usual: {}, hasSet: true },
  20: { name: "survivors", fields: { attempt: text, members: text }, usual: {}, hasSet: false },
  21: { name: "signed", fields: { attempt: text, signature: text }, usual: {}, hasSet: false },
  22: { name: "signatures", fields: { attempt: text, signatures: table }, usual: {}, hasSet: false },
  23: { name: "unmask", fields: { attempt: text, seed: text, secrets: text }, usual: {}, hasSet: false },
};
const NUMBERS = Object.fromEntries(Object.entries(KINDS).map(([kind, { name }]) => [name, Number(kind)]));
export const OF_SUMS = ["attempt", "members", "survivors", "signatures"]; // of the server, about secure sums
export const FROM_SERVER = ["welcome", "answer", "end", ...OF_SUMS];

// Return a message {is, ..., set} as an ArrayBuffer.
export function encode({ is, set = null, ...given }) {
  const { fields, usual } = KINDS[NUMBERS[is]], values = { ...usual, ...given };
  const text = JSON.stringify(values, Object.keys(fields)); // only these fields, in this order
  const content = new TextEncoder().encode(text), length = Math.ceil(content.length / 8) * 8;
  const frame = new Uint8Array(PREFIX + length + (set?.byteLength ?? 0)).fill(0x20, PREFIX, PREFIX + length), view = new DataView(frame.buffer);
  view.setUint32(0, MAGIC);
  view.setUint8(4, VERSION);
  view.setUint8(5, NUMBERS[is]);
  view.setUint32(8, length, true);
  frame.set(content, PREFIX);
  if (set) frame.set(new Uint8Array(set), PREFIX + length);
  return frame.buffer;
}

// Return the message in a frame. `of` names the messages that the other side may send, `setBytes` is the length of a set,
// or 0 if it is unknown.
export function decode(frame, of = FROM_SERVER, setBytes = 0) {
  if (!(frame instanceof ArrayBuffer) || frame.byteLength < PREFIX) throw new Error(`a frame has at least ${PREFIX} bytes`);
  const view = new DataView(frame), version = view.getUint8(4), length = view.getUint32(8, true);
  if (view.getUint32(0) !== MAGIC) throw new Error("a frame begins with DDLP");
  if (version !== VERSION) throw new Error(`the server speaks version ${version} of the peers' protocol, and this page version ${VERSION}: reload the page`);
  const kind = KINDS[view.getUint8(5)];
  if (!kind || !of.includes(kind.name) || view.getUint16(6) || view.getUint32(12)) throw new Error(`a frame of kind ${view.getUint8(5)} is not expected here`);
  if (length % 8 || PREFIX + length > frame.byteLength) throw new Error(`the text of a frame has ${length} bytes, which is cut off or unaligned`);
  const set = frame.byteLength > PREFIX + length ? frame.slice(PREFIX + length) : null;
  if (kind.hasSet !== null && kind.hasSet !== (set !== null)) throw new Error(`${kind.name} ${kind.hasSet ? "needs a" : "has no"} set`);
  if (set && setBytes && set.byteLength !== setBytes) throw new Error(`a set of this model has ${setBytes} bytes, got ${set.byteLength}`);
  let content;
  try {
    content = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(frame, PREFIX, length)));
  } catch {
    throw new Error("the text of a frame is not JSON");
  }
  return { is: kind.name, ...checked(kind, content), set };
}

function checked({ name: of, fields, usual }, content) {
  if (!table.fits(content)) throw new Error(`the text of ${of} is not a table`);
  const unknown = Object.keys(content).find((name) => !Object.hasOwn(fields, name));
  if (unknown !== undefined) throw new Error(`${of} has no ${unknown.slice(0, 40)}`);
  const values = { ...usual, ...content };
  for (const [name, { type, fits, least = -Infinity }] of Object.entries(fields)) {
    if (!Object.hasOwn(values, name)) throw new Error(`${of} is incomplete`);
    const value = values[name];
    if (type ? typeof value !== type : !fits(value) || value < least) throw new Error(`${name} of ${of} is ${String(value).slice(0, 40)}`);
  }
  return values;
}
