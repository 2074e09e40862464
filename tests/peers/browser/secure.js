// A member of secure sums in Node: node secure.js ENGINE < cases > results, one JSON document on each line. Bytes are
// hexadecimal. It keeps one peer from case to case.

import { createInterface } from "node:readline";

const engine = process.argv[2];
const sums = await import(`${engine}/secure_sum.js`);
const { SecurePeer } = await import(`${engine}/secure_peer.js`);
const { subtle } = globalThis.crypto, { bytesOf, hex } = sums;
const bytes = (numbers) => hex(new Uint8Array(numbers.buffer));
const weights = (record) => Object.fromEntries(Object.entries(record).map(([name, values]) => [name, new Float32Array(values)]));
const pkcs8 = (id, key) => bytesOf(`302e020100300506032b65${id}04220420${key}`);
let peer, lines = [];

const acts = {
  pair: async ({ key, theirs, context }) => {
    const mine = await subtle.importKey("pkcs8", pkcs8("6e", key), { name: "X25519" }, false, ["deriveBits"]);
    return hex(await sums.pairSecret(subtle, mine, bytesOf(theirs), context));
  },
  sign: async ({ key, text }) => {
    const mine = await subtle.importKey("pkcs8", pkcs8("70", key), { name: "Ed25519" }, false, ["sign"]);
    return hex(await new sums.Identity(subtle, mine, null).sign(text));
  },
  mask: async ({ secret, size, sign }) => {
    const total = new Uint32Array(size);
    await sums.addMask(subtle, total, bytesOf(secret), sign);
    return bytes(total);
  },
  code: ({ identities }) => sums.codeOf(subtle, identities.map(bytesOf)),
  numbers: ({ base, live, share, limit }) => bytes(sums.numbersOf(Object.keys(base), weights(base), weights(live), share, limit)),
  crypto: ({ scope }) => sums.webCrypto(scope),
  begin: ({ plan, run, number, samples, base, weights: given, text, set }) => {
    lines = [];
    peer = new SecurePeer({ plan, run, peer: number, samples, say: (line) => lines.push(line), text });
    peer.begin(base, weights(given), bytesOf(set));
  },
  received: ({ message }) => peer.received(message),
  masked: async ({ live, number, updates }) => {
    const { set, ...rest } = await peer.masked(Object.keys(live), weights(live), number, updates);
    return { ...rest, set: hex(new Uint8Array(set)) };
  },
  lines: () => lines,
};

for await (const line of createInterface({ input: process.stdin })) {
  const { do: what, ...given } = JSON.parse(line);
  try {
    console.log(JSON.stringify({ result: (await acts[what](given)) ?? null }));
  } catch (error) {
    console.log(JSON.stringify({ error: error.message, hint: error.hint ?? "" }));
  }
}
