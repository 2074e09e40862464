// Secure aggregation, a member's side: ddlf/privacy/secure_sum.py describes the protocol, and makes the same bytes.

import { Refused } from "./refused.js";

const LEAST = 3, MOST = 50, LEVELS = 2 ** 25, SECRET = 32, SIGNATURE = 64, BLOCK = 2 ** 20;
const text = new TextEncoder();
const wrong = (why) => new Refused(why, "leave, and tell the owner of the server");
export const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

export function bytesOf(digits) {
  if (typeof digits !== "string" || !/^([0-9a-f]{2})*$/.test(digits)) throw wrong(`${String(digits).slice(0, 20)} is not hexadecimal`);
  return Uint8Array.from(digits.match(/../g) ?? [], (pair) => parseInt(pair, 16));
}

// Return WebCrypto. Browsers have it on https and on localhost only.
export function webCrypto(scope = globalThis) {
  const subtle = scope.crypto?.subtle;
  if (!subtle) throw new Refused("this training has secure aggregation, which needs WebCrypto, and browsers have it on https and localhost only", "ask for a link that begins with https");
  return subtle;
}

const same = (one, other) => one.length === other.length && one.every((value, n) => value === other[n]);
const raw = async (subtle, key) => new Uint8Array(await subtle.exportKey("raw", key));
const digest = async (subtle, content) => new Uint8Array(await subtle.digest("SHA-256", text.encode(content)));

// -- fixed point ---------------------------------------------------------------------------------------------------------

function toEven(value) {
  const down = Math.floor(value), rest = value - down;
  return rest < 0.5 || (rest === 0.5 && down % 2 === 0) ? down : down + 1;
}

// Return the weighted update base - live as whole numbers mod 2^32. `names` has the weights in the order of the model.
export function numbersOf(names, base, live, share, limit) {
  const scale = (share * LEVELS) / limit, numbers = new Uint32Array(names.reduce((size, name) => size + base[name].length, 0));
  let at = 0, beyond = 0;
  for (const name of names) {
    const before = base[name], after = live[name];
    for (let n = 0; n < before.length; n++) {
      const scaled = (before[n] - after[n]) * scale;
      if (!(Math.abs(scaled) <= LEVELS)) beyond += 1;
      numbers[at++] = toEven(scaled);
    }
  }
  if (beyond) throw new Error(`${beyond} of ${numbers.length} values of the update are beyond the limit of ${limit}, or not finite`);
  return numbers;
}

// Return what the numbers of a sum mean: each member signs it. `base` is the set that the training begins with.
export async function termsOf(subtle, { update_limit: limit, updates, batch_size: batch }, samples, model, base) {
  const bits = new DataView(new ArrayBuffer(8));
  bits.setFloat64(0, limit);
  const set = hex(new Uint8Array(await subtle.digest("SHA-256", base)));
  return `${samples} ${hex(new Uint8Array(bits.buffer))} ${updates} ${batch} ${hex(await digest(subtle, model))} ${set}`;
}

// -- keys and masks ------------------------------------------------------------------------------------------------------

export async function pairSecret(subtle, mine, theirs, context) {
  let shared;
  try {
    const key = await subtle.importKey("raw", theirs, { name: "X25519" }, false, []);
    shared = await subtle.deriveBits({ name: "X25519", public: key }, mine, 8 * SECRET);
    if (new Uint8Array(shared).every((byte) => byte === 0)) throw new Error("known");
  } catch {
    throw wrong("the key of a member is on no curve, or has a known secret");
  }
  const key = await subtle.importKey("raw", shared, "HKDF", false, ["deriveBits"]);
  const how = { name: "HKDF", hash: "SHA-256", salt: new Uint8Array(32), info: text.encode(context) };
  return new Uint8Array(await subtle.deriveBits(how, key, 8 * SECRET));
}

// Add the stream of a secret to numbers, or subtract it, in place.
export async function addMask(subtle, total, secret, sign) {
  const key = await subtle.importKey("raw", secret, "AES-CTR", false, ["encrypt"]);
  for (let begin = 0; begin < total.length; begin += BLOCK) {
    const part = total.subarray(begin, begin + BLOCK), counter = new Uint8Array(16);
    new DataView(counter.buffer).setBigUint64(8, BigInt(begin / 4)); // blocks of four numbers
    const stream = new Uint32Array(await subtle.encrypt({ name: "AES-CTR", counter, length: 64 }, key, new ArrayBuffer(4 * part.length)));
    if (sign > 0) for (let n = 0; n < part.length; n++) part[n] += stream[n];
    else for (let n = 0; n < part.length; n++) part[n] -= stream[n];
  }
}

export const keyText = (run, attempt, member, key) => `ddlf secure sum key\n${run}\n${attempt}\n${member}\n${hex(key)}\n`;
const pairText = (attempt, one, other) => `ddlf secure sum pair\n${attempt}\n${Math.min(one, other)}\n${Math.max(one, other)}\n`;

export async function listText(subtle, attempt, offers, terms, survivors) {
  const keys = offers.map(({ member, identity, key }) => `${member} ${hex(identity)} ${hex(key)}\n`).join("");
  return `ddlf secure sum survivors\n${attempt}\n${hex(await digest(subtle, keys))}\n${terms}\n${survivors.join(",")}\n`;
}

// Return the code of all identities that people compare.
export async function codeOf(subtle, identities) {
  const found = await digest(subtle, `ddlf secure sum code\n${identities.map(hex).sort().map((one) => `${one}\n`).join("")}`), view = new DataView(found.buffer);
  return Array.from({ length: 8 }, (_, n) => String(view.getUint32(4 * n) % 100000).padStart(5, "0")).join(" ");
}

async function isSigned(subtle, identity, signature, content) {
  try {
    const key = await subtle.importKey("raw", identity, { name: "Ed25519" }, false, ["verify"]);
    return await subtle.verify({ name: "Ed25519" }, key, signature, text.encode(content));
  } catch {
    return false;
  }
}

// The signing key of a member. Each page that joins makes one, and keeps it in its memory.
export class Identity {
  static async make(subtle) {
    const { privateKey, publicKey } = await subtle.generateKey({ name: "Ed25519" }, false, ["sign", "verify"]);
    return new Identity(subtle, privateKey, await raw(subtle, publicKey));
  }

  constructor(subtle, key, publicBytes) {
    Object.assign(this, { subtle, key, public: publicBytes });
  }

  async sign(content) {
    return new Uint8Array(await this.subtle.sign({ name: "Ed25519" }, this.key, text.encode(content)));
  }
}

// -- a member ------------------------------------------------------------------------------------------------------------

export class Share {
  #key; #seed; #secrets = new Map(); #survivors = null; #terms = "";

  static async make(subtle, { run, attempt, member, identity, least }) {
    const { privateKey, publicKey } = await subtle.generateKey({ name: "X25519" }, false, ["deriveBits"]), key = await raw(subtle, publicKey);
    const offer = { member, identity: identity.public, key, signature: await identity.sign(keyText(run, attempt, member, key)) };
    return new Share(subtle, { run, attempt, member, identity, least: Math.max(least, LEAST), offer }, privateKey);
  }

  constructor(subtle, facts, key) {
    Object.assign(this, { subtle, offers: [], isUsed: false, ...facts });
    this.#key = key;
    this.#seed = globalThis.crypto.getRandomValues(new Uint8Array(SECRET));
  }

  // Take the offers of all members, and return the code that people compare.
  // All survivors must have the same terms: what the numbers mean.
  async meet(offers, terms) {
    const { subtle, member, run, attempt, offer } = this, secrets = new Map();
    if (this.offers.length) throw wrong("the server names the members of a sum twice");
    if (offers.length < this.least || offers.length > MOST) throw wrong(`a sum has ${this.least} to ${MOST} members, and the server names ${offers.length}`);
    if (offers.some((one, n) => n && one.member <= offers[n - 1].member)) throw wrong("the server names a member of a sum twice");
    const own = offers.find((one) => one.member === member);
    if (!own || !["identity", "key", "signature"].every((part) => same(own[part], offer[part]))) throw wrong("the server names another key than this peer's own");
    for (const what of ["key", "identity"]) {
      if (new Set(offers.map((one) => hex(one[what]))).size < offers.length) throw wrong(`two members of a sum have the same ${what}`);
    }
    for (const one of offers) {
      if (one.member === member) continue;
      if (!(await isSigned(subtle, one.identity, one.signature, keyText(run, attempt, one.member, one.key)))) throw wrong(`the key of peer ${one.member} is not signed by its identity`);
      secrets.set(one.member, await pairSecret(subtle, this.#key, one.key, pairText(attempt, member, one.member)));
    }
    this.#secrets = secrets;
    this.#terms = terms;
    this.offers = offers;
    return codeOf(subtle, offers.map(({ identity }) => identity));
  }

  // Mask numbers in place, and return them. Only once.
  async masked(numbers) {
    if (this.isUsed || !this.offers.length) throw wrong("the masks of a sum are used once, and after the keys of all members have come");
    this.isUsed = true;
    await addMask(this.subtle, numbers, this.#seed, 1);
    for (const [other, secret] of this.#secrets) await addMask(this.subtle, numbers, secret, other > this.member ? 1 : -1);
    return numbers;
  }

  // Return the signature under a list of survivors.
  async sign(survivors) {
    const members = new Set(this.offers.map(({ member }) => member)), stranger = survivors.find((one) => !members.has(one));
    if (!this.isUsed) throw wrong("the server names survivors, and this peer has added nothing to the sum");
    if (this.#survivors && !same(this.#survivors, survivors)) throw wrong("the server names two lists of survivors of one sum, which could unmask a peer");
    if (survivors.some((one, n) => n && one <= survivors[n - 1])) throw wrong("the server names a survivor of a sum twice");
    if (stranger !== undefined) throw wrong(`the server names peer ${stranger} as a survivor, and the sum has no such member`);
    if (!survivors.includes(this.member)) throw wrong("the server asks a peer that it counts as lost");
    if (survivors.length < this.least) throw wrong(`a sum needs ${this.least} survivors, and the server names ${survivors.length}`);
    this.#survivors = survivors;
    return this.identity.sign(await listText(this.subtle, this.attempt, this.offers, this.#terms, survivors));
  }

  // Return what the server needs to unmask the sum, if all survivors have signed the same list.
  async answer(signatures) {
    const survivors = this.#survivors;
    if (!survivors) throw wrong("the server has named no survivors");
    const list = await listText(this.subtle, this.attempt, this.offers, this.#terms, survivors);
    for (const { member, identity } of this.offers) {
      if (!survivors.includes(member)) continue;
      const signature = signatures.get(member) ?? new Uint8Array(0);
      if (!(await isSigned(this.subtle, identity, signature, list))) throw wrong(`peer ${member} has not signed the list of survivors that this peer has signed`);
    }
    const lost = [...this.#secrets].filter(([member]) => !survivors.includes(member)).sort(([one], [other]) => one - other);
    return { seed: this.#seed, secrets: lost };
  }
}

// Return the offer in a row of the server's list.
export function offerOf(name, row) {
  const data = bytesOf(row);
  if (data.length !== 2 * SECRET + SIGNATURE || !/^[0-9]{1,9}$/.test(name)) throw wrong(`the offer of peer ${name.slice(0, 10)} has ${data.length} bytes`);
  return { member: Number(name), identity: data.slice(0, SECRET), key: data.slice(SECRET, 2 * SECRET), signature: data.slice(2 * SECRET) };
}
