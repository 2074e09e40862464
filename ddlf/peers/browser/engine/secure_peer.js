// A peer's part of secure sums, as ddlf/peers/secure_peer.py: its keys, its masks, and its answers to the server.

import { Refused } from "./refused.js";
import { bytesOf, hex, Identity, numbersOf, offerOf, Share, termsOf, webCrypto } from "./secure_sum.js";

export class SecurePeer {
  #identity = null; #share = null; #most = 0; #base = 0; #weights = null; #set = null; #updates = 0;

  // `say` prints a line, and `text` is the model's text.
  constructor({ plan, run, peer, samples, say, text }) {
    Object.assign(this, { plan, run, peer, samples, say, text, code: "", subtle: webCrypto() });
  }

  // Whether the keys of all members of a sum are here, to mask an update.
  get isReady() {
    return this.#share !== null && this.#share.offers.length > 0 && !this.#share.isUsed;
  }

  // Begin to train from a base: its number, its weights by name, and its bytes.
  begin(base, weights, set) {
    [this.#base, this.#weights, this.#set, this.#updates] = [base, weights, set, 0];
  }

  // Take a message of the server, and return the answer; null if there is none.
  async received(message) {
    if (message.is === "attempt") return this.#offered(message);
    const share = this.#share, { attempt } = message;
    if (share === null || attempt !== share.attempt) return null; // the attempt is void
    if (message.is === "members" && !share.offers.length) await this.#meet(share, message);
    if (message.is === "survivors") return { is: "signed", attempt, signature: hex(await share.sign(message.members.split(",").map(Number))) };
    if (message.is === "signatures") {
      const given = Object.entries(message.signatures).map(([name, one]) => [Number(name), bytesOf(one)]);
      const { seed, secrets } = await share.answer(new Map(given));
      return { is: "unmask", attempt, seed: hex(seed), secrets: secrets.map(([, secret]) => hex(secret)).join("") };
    }
    return null;
  }

  // Return a post with the masked update. `names` has the weights in the order of the model.
  async masked(names, live, number, updates) {
    const numbers = numbersOf(names, this.#weights, live, Math.min(this.samples / this.#most, 1), this.plan.update_limit);
    await this.#share.masked(numbers);
    this.#updates += updates; // with the batches of void attempts
    return { is: "masked", number, attempt: this.#share.attempt, base: this.#base, updates: this.#updates, set: numbers.buffer };
  }

  async #offered({ attempt }) {
    const { run, peer: member, plan: { quorum: least } } = this;
    this.#identity ??= await Identity.make(this.subtle);
    if (this.#share?.attempt !== attempt) this.#share = await Share.make(this.subtle, { run, attempt, member, identity: this.#identity, least });
    const { identity, key, signature } = this.#share.offer;
    return { is: "offered", attempt, base: this.#base, identity: hex(identity), key: hex(key), signature: hex(signature) };
  }

  async #meet(share, { samples, offers }) {
    if (!(samples >= 1)) throw new Refused(`the server says that a whole share has ${samples} samples`, "leave, and tell the owner of the server");
    this.#most = samples;
    const terms = await termsOf(this.subtle, this.plan, samples, this.text, this.#set);
    const code = await share.meet(Object.entries(offers).map(([name, row]) => offerOf(name, row)), terms);
    if (code === this.code) return;
    this.code = code;
    this.say(`code      ${code}; the other ${share.offers.length - 1} peers see the same one, unless the server stands between`);
  }
}
