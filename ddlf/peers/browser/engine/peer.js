// A peer in a browser: trains on its own data, posts its sets, and merges the answers into its live weights. The same peer
// in Python is ddlf/peers/peer.py. Everything happens between two batches, in the order in which it comes.

import { Connection } from "./connection.js";
import { OF_SUMS } from "./frames.js";
import { mergeOf } from "./merges.js";
import { hidden } from "./noise.js";
import { Refused } from "./refused.js";
import { Layout } from "./safetensors.js";
import { SecurePeer } from "./secure_peer.js";
import { webCrypto } from "./secure_sum.js";
import { Trainer, turn } from "./trainer.js";

const NO_DATA = { inputs: [{ data: new Float32Array(1), shape: [1] }], labels: [] }; // until the server has lent a shard
const MOST_TESTED = 64, TELL_MS = 250, LEAST_REST_MS = 10, MOST_REST_MS = 2000, GOODBYE_MS = 5000, SHARD_AGAIN_MS = 1000;
const decimals = (value) => (Number.isFinite(value) ? value.toFixed(4) : "unknown");
const toWire = (value) => (Number.isFinite(value) && value >= 0 ? value : -1);
const fromWire = (value) => (value >= 0 ? value : NaN);

// Return the accuracy among means; NaN without one.
export function accuracyOf(means) {
  const [found] = Object.entries(means).filter(([name]) => /acc(uracy)?$/.test(name));
  return found ? found[1] : NaN;
}

// Return why weights are of no use; an empty text if all of them are finite.
export function notFinite(weights) {
  const name = Object.keys(weights).find((each) => !weights[each].every(Number.isFinite));
  return name === undefined ? "" : `${name} is not finite`;
}

// Refuse shares of time that would never train.
export function checkedShare(share) {
  if (!(share > 0 && share <= 1)) throw new Error(`the share of time must be above 0 and at most 1, got ${share}: pause instead`);
  return share;
}

export class Peer {
  #inbox = []; #wake = () => {}; #isPaused = false; #isBroken = false; #isOver = false; #isLost = false; #isLeaving = false; #state = "";
  #posted = null; #since = 0; #postedAt = 0; #number = 0; #trainings = 0; #contains = 0; #base = 0; #accuracy = NaN; #rate = 0;
  #restMs = 0; #toldAt = 0; #recent = []; #given = null;

  // `run` and `plan` come from the server. `tell` gets what the page is told, and `kept` keeps a record for a reload.
  // It leaves after `mostUpdates` batches. Without `data`, it trains on a shard of the server's data: `lent` returns it.
  constructor({ url, run, plan, model, data, test, name, share, seed, mostUpdates = Infinity, tell, lent = null, record = null, kept = async () => {} }) {
    Object.assign(this, { run, plan, model, name, mostUpdates, tell, lent, kept, test: test ?? data, shard: 0 });
    if (!data !== plan.shards > 0) throw new Error(data ? "this server gives each peer a part of its data" : "a peer needs data");
    this.share = checkedShare(share);
    this.trainer = new Trainer(model, data ?? NO_DATA, { batchSize: plan.batch_size, seed });
    this.merge = plan.way === "swap" ? mergeOf(plan.merge) : null;
    Object.assign(this, { posts: 0, merges: 0, updates: 0, samples: 0, began: 0, earlier: 0, over: "", layout: null, epsilon: -1 });
    this.connection = new Connection({
      url,
      hello: () => this.#hello(),
      take: (message) => this.#arrived(message),
      tell: (what) => this.#connected(what),
      fail: (error) => this.#failed(error),
    });
    this.secure = null; // its part of secure sums
    if (plan.secure_aggregation) webCrypto();
    this.record = plan.secure_aggregation ? null : record; // the keys are in memory only, so a reload begins again
  }

  // Connect, and take the first set or the kept one.
  async start() {
    this.#tellState("connecting");
    if (this.record) this.#restore(this.record);
    const welcome = await this.connection.start();
    if (welcome.is === "end") {
      await this.#between(welcome);
      this.ended = Promise.resolve();
      return this.peer ?? 0;
    }
    try {
      await this.#begin(welcome);
    } catch (error) {
      this.connection.close();
      throw error;
    }
    const samples = this.trainer.samples.toLocaleString("en");
    const travels = this.secure ? "the server learns only sums of updates" : "sets of weights travel";
    this.#say(`joined    as peer ${welcome.peer}; ${this.lent ? `it trains ${samples} samples of the server, shard ${this.shard} of ${this.plan.shards}` : `${samples} samples stay here, ${travels}`}`);
    this.#postedAt = this.#toldAt = performance.now();
    this.began = this.#postedAt - 1000 * this.earlier; // as if it had begun now, with the time before a reload
    this.ended = this.#run().catch((error) => this.#failed(error));
    return welcome.peer;
  }

  async #begin(welcome) {
    this.peer = welcome.peer;
    if (welcome.run !== this.run) throw new Error("the server has begun another run: reload the page");
    const { plan, run, peer } = this, say = (line) => this.#say(line);
    if (plan.secure_aggregation) this.secure = new SecurePeer({ plan, run, peer, samples: this.trainer.samples, say, text: welcome.model });
    await this.#welcomed(welcome);
    if (this.lent) await this.#borrow(welcome.shard);
  }

  pause() {
    this.#isPaused = true;
    this.#wake();
  }

  resume() {
    this.#isPaused = false;
    this.#wake();
  }

  // Use this share of the time from now on: pauses between batches leave the rest to others.
  setShare(share) {
    this.share = checkedShare(share);
    this.#wake();
  }

  // Post what was trained, and say goodbye.
  stop() {
    if (this.#isOver) return this.ended;
    this.#isLeaving = true;
    this.#wake();
    return this.ended;
  }

  predict(inputs) {
    return this.trainer.between(() => this.model.predict(inputs));
  }

  // Return the live weights as a file, without the rounding of sets that travel.
  set() {
    return this.trainer.between(async () => this.layout.file(await this.model.weights()));
  }

  // -- the loop -------------------------------------------------------------------------------------------------------

  async #run() {
    while (!this.#isOver) {
      while (this.#inbox.length && !this.#isOver) await this.#between(this.#inbox.shift());
      if (this.#isOver) break;
      if (this.#isLeaving || this.updates >= this.mostUpdates) return this.#leave();
      const keys = this.#waitsForKeys, waits = keys || (this.plan.way === "rounds" && this.connection.waits);
      const mayNot = this.lent !== null && (this.#isLost || !this.shard); // the shard may be with another peer later
      if (this.#isPaused || this.#isBroken || waits || mayNot) {
        this.#tellState(this.#isPaused ? "paused" : mayNot ? "lost" : "waiting", !waits || mayNot ? "" : keys ? "for the keys of other peers" : this.#round());
        this.#progress(true);
        await this.#changed();
        continue;
      }
      this.#tellState(this.#isLost ? "lost" : "training");
      const began = performance.now(), { means, samples } = await this.trainer.batch();
      this.updates += 1;
      this.#since += 1;
      this.samples += samples;
      this.#recent.push({ at: performance.now(), means });
      while (this.#inbox.length && !this.#isOver) await this.#between(this.#inbox.shift()); // a post says what was merged
      if (this.#isDue && this.#mayPost && !this.#isBroken && !this.#isOver) await this.trainer.between(() => this.#post());
      this.#progress();
      await turn();
      await this.#rest(performance.now() - began);
    }
    this.#progress(true);
  }

  get #isDue() {
    const late = this.plan.seconds && performance.now() - this.#postedAt >= 1000 * this.plan.seconds;
    return this.#since > 0 && (this.#since >= this.plan.updates || late) && !this.connection.waits;
  }

  get #mayPost() {
    return !this.connection.waits && (this.secure === null || this.secure.isReady);
  }

  get #waitsForKeys() {
    return this.secure !== null && !this.secure.isReady && this.#isDue;
  }

  // Return what a round waits for.
  #round() {
    const { quorum } = this.plan;
    return quorum > 1 ? `the round is open: it needs posts of ${quorum} peers` : "the round is open";
  }

  // Leave the rest of the time to others. Short rests are taken together, since timers wait for milliseconds.
  async #rest(busyMs) {
    this.#restMs += busyMs * (1 / this.share - 1);
    if (this.#restMs < LEAST_REST_MS) return;
    const ms = Math.min(this.#restMs, MOST_REST_MS);
    this.#restMs = 0;
    await this.#changed(ms);
  }

  // Wait for a message of the server or of the page, or for some time.
  #changed(ms = null) {
    if (this.#inbox.length) return Promise.resolve();
    return new Promise((resolve) => {
      const timer = ms === null ? null : setTimeout(resolve, ms);
      this.#wake = () => { clearTimeout(timer); resolve(); };
    });
  }

  #arrived(message) {
    this.#inbox.push(message);
    this.#wake();
  }

  #between(message) {
    return this.trainer.between(async () => {
      if (message.is === "answer") await this.#answered(message);
      else if (message.is === "end") this.#ended(message);
      else if (OF_SUMS.includes(message.is)) await this.#passOn(message);
      else await this.#welcomedAgain(message);
    });
  }

  // -- acts between two batches -----------------------------------------------------------------------------------------

  #hello() {
    const keeps = this.layout !== null && !this.#isBroken;
    return { is: "hello", name: this.name, samples: this.lent ? 0 : this.trainer.samples, layout: this.digest ?? "", run: keeps ? this.run : "", keeps, updates: this.updates };
  }

  // A connection that is lost again before the shard has come has no shard, and the next welcome names one.
  async #welcomedAgain(welcome) {
    await this.#welcomed(welcome);
    if (!this.lent || welcome.shard === this.shard) return;
    try {
      await this.#borrow(welcome.shard);
    } catch (error) {
      if (error instanceof Refused) throw error;
      this.shard = 0;
      this.#say(`waits     ${error.message}; it is tried again`);
      if (!this.#isLost && !this.#inbox.length) this.connection.again(SHARD_AGAIN_MS);
    }
  }

  async #borrow(shard) {
    const data = await this.lent(shard);
    this.trainer.take(data);
    Object.assign(this, { test: data, shard });
  }

  async #welcomed(welcome) {
    this.digest = welcome.layout;
    this.#setRate(welcome.rate);
    if (!this.connection.waits) this.#number = welcome.number;
    if (!welcome.set) return;
    this.layout ??= new Layout(welcome.set);
    this.connection.setBytes = this.layout.bytes;
    const given = (this.#given = this.layout.decode(welcome.set));
    this.secure?.begin(welcome.set_number, given, welcome.set);
    this.#load(given);
    this.#trainings = welcome.trainings;
    this.#base = welcome.set_number;
    this.#contains = 0;
    this.#since = 0;
    this.#isBroken = false;
  }

  async #post() {
    const means = this.trainer.means(), weights = await this.model.weights(), why = notFinite(weights) || this.layout.beyond(weights);
    this.#accuracy = accuracyOf(means);
    if (why) return this.#break(`after training: ${why}`);
    let post;
    try {
      post = await this.#made(weights, means);
    } catch (error) {
      if (error instanceof Refused) throw error;
      return this.#break(`after training: ${error.message}`);
    }
    this.#number = post.number;
    this.#trainings += 1;
    this.posts += 1;
    const batches = this.#since;
    this.#since = 0;
    this.#postedAt = performance.now();
    if (!this.secure) await this.#keep(post);
    this.connection.send(post);
    this.#say(`posted    set ${this.posts} after ${batches} batches: loss ${decimals(means.loss)}, accuracy ${decimals(this.#accuracy)}`);
  }

  // Return the next post: with a set, or with a masked update.
  async #made(weights, means) {
    const number = this.#number + 1, updates = this.#since;
    if (this.secure) {
      this.#posted = null; // it waits for the base, and trains nothing meanwhile
      return this.secure.masked(this.layout.entries.map(({ name }) => name), weights, number, updates);
    }
    const sent = this.#hides ? hidden(this.#given, weights, this.model.trained, this.plan) : weights, set = this.layout.encode(sent);
    this.#posted = this.layout.rounds ? this.layout.decode(set) : sent; // as the server has them
    return {
      is: "post", number, contains: this.#contains, updates, base: this.plan.way === "rounds" ? this.#base : 0,
      accuracy: this.plan.noise ? -1 : toWire(this.#accuracy), loss: this.plan.noise ? -1 : toWire(means.loss), set, // metrics have no noise
    };
  }

  // Take a message about a secure sum, and answer it.
  async #passOn(message) {
    if (!this.secure) throw new Error("the server sent keys, and its plan has no secure aggregation");
    const answer = await this.secure.received(message);
    if (answer) this.connection.send(answer);
  }

  #break(why) {
    this.#say(`broken    ${why}; beginning again from the last validated set`);
    this.#since = 0;
    this.#isBroken = true;
    this.trainer.means();
    this.connection.send({ is: "broken", why: why.slice(0, 500) });
  }

  async #answered(answer) {
    this.epsilon = answer.epsilon;
    if (this.#isBroken) { // earlier answers belong to the broken weights
      if (answer.answer !== "replace" && answer.answer !== "rejected") return;
      this.#isBroken = false;
      answer.answer = "rejected";
    }
    this.#setRate(answer.rate);
    if (answer.answer === "continue") return;
    if (this.secure && ["merge", "validate"].includes(answer.answer)) throw new Error(`the server asks to ${answer.answer} a single set, and its plan has secure aggregation`);
    if (answer.answer === "validate") return this.#validate(answer);
    if (!answer.set) throw new Error(`the server sent ${answer.answer} without a set`);
    let given = this.layout.decode(answer.set);
    if (answer.answer === "merge") return this.#merge(answer, given);
    this.#given = given;
    this.secure?.begin(answer.set_number, given, answer.set);
    if (answer.answer === "replace" && this.#posted && !this.#hides) { // keep the training since the post, and what its rounding has lost
      const live = await this.model.weights(), posted = this.#posted;
      given = Object.fromEntries(Object.entries(given).map(([name, all]) => [name, all.map((g, n) => g + Math.fround(live[name][n] - posted[name][n]))]));
    }
    if (answer.answer === "rejected") {
      this.#say(`rejected  ${answer.why}; beginning again from set ${answer.set_number}`);
      this.#since = 0;
    }
    this.#load(given);
    this.#contains = this.#base = answer.set_number;
    this.#trainings = answer.trainings;
  }

  async #merge(answer, given) {
    const mine = { weights: await this.model.weights(), trainings: this.#trainings, accuracy: this.#accuracy };
    const merged = this.merge(mine, { weights: given, trainings: answer.trainings, accuracy: fromWire(answer.accuracy) });
    const why = notFinite(merged.weights);
    if (why) return this.#break(`merging set ${answer.set_number}: ${why}`);
    if (merged !== mine) this.#load(merged.weights);
    this.#trainings = merged.trainings;
    this.#contains = answer.set_number;
    this.merges += 1;
  }

  async #validate(answer) {
    if (this.plan.noise) return; // a metric would tell without noise
    const live = await this.model.weights();
    this.#load(this.#posted);
    const { means, samples } = await this.trainer.test(this.test, MOST_TESTED).finally(() => this.#load(live));
    if (!Number.isFinite(means.loss)) return;
    this.connection.send({ is: "score", set_number: answer.set_number, accuracy: toWire(accuracyOf(means)), loss: Math.max(means.loss, 0), samples });
  }

  #ended({ over, why, hint, set }) {
    this.#isOver = true;
    this.connection.close();
    if (!over) return this.#tellFailure(`the server has ended this peer's session: ${why}`, hint);
    if (set) this.#load((this.layout ??= new Layout(set)).decode(set));
    this.over = why;
    this.#say(`over      ${why}`);
    this.#tellState("over", why);
  }

  async #leave() {
    const until = performance.now() + GOODBYE_MS, mustWait = this.plan.way !== "rounds" || this.secure; // leaving makes a secure sum void
    if (mustWait) await this.#untilAnswered(until);
    if (!this.#isOver) {
      if (this.#since && this.#mayPost && !this.#isBroken) {
        await this.trainer.between(() => this.#post());
        if (this.secure) await this.#untilAnswered(until);
      }
      this.connection.send({ is: "bye" });
      await this.connection.ended(GOODBYE_MS);
      this.connection.close();
      this.#isOver = true;
      this.#tellState("ended", "you have stopped");
    }
    this.#progress(true);
  }

  async #untilAnswered(until) {
    while (this.connection.waits && !this.#isOver && performance.now() < until) {
      await this.#changed(until - performance.now());
      while (this.#inbox.length && !this.#isOver) await this.#between(this.#inbox.shift());
    }
  }

  // -- small things -----------------------------------------------------------------------------------------------------

  // Whether this peer itself clips its updates and adds noise, because it trusts nobody.
  get #hides() {
    return this.plan.trust === "nobody";
  }

  #load(weights) {
    this.model.setWeights(weights);
  }

  #setRate(rate) {
    if (!this.plan.decay || !rate || rate === this.#rate) return;
    this.#rate = rate;
    this.model.setRate(rate);
  }

  #connected(what) {
    this.#isLost = what === "lost";
    this.#say(this.#isLost ? `lost      the connection to the server; training ${this.lent ? "waits" : "continues"}, and it is tried again` : "back      connected again as the same peer");
    if (this.#isLost) this.#tellState("lost");
  }

  #failed(error) {
    this.#isOver = true;
    this.connection.close();
    this.#tellFailure(error.message, error.hint ?? "");
    this.#wake();
  }

  #tellFailure(why, hint) {
    this.tell({ told: "failed", why, hint });
  }

  #tellState(state, why = "") {
    const now = `${state} ${why}`;
    if (now === this.#state) return;
    this.#state = now;
    this.tell({ told: "state", state, why });
  }

  #say(text) {
    this.tell({ told: "line", text });
  }

  #progress(now = false) {
    const at = performance.now(), seconds = (at - this.#toldAt) / 1000;
    if (!now && at - this.#toldAt < TELL_MS) return;
    const recent = this.#recent, mean = (of) => (recent.length ? recent.reduce((sum, { means }) => sum + of(means), 0) / recent.length : NaN);
    this.tell({
      told: "progress", batches: this.updates, batchesPerSecond: seconds > 0 ? recent.length / seconds : 0, loss: mean(({ loss }) => loss),
      accuracy: mean(accuracyOf), bytesUp: this.connection.bytesUp, bytesDown: this.connection.bytesDown, posts: this.posts, merges: this.merges,
      samples: this.samples, seconds: (at - this.began) / 1000, code: this.secure?.code ?? "", epsilon: this.epsilon,
    });
    this.#recent = [];
    this.#toldAt = at;
  }

  // -- a reload ---------------------------------------------------------------------------------------------------------

  // Keep a post before it is sent. After a reload it is sent again, and the server answers it again.
  async #keep(post) {
    await this.kept({
      peer: this.peer, digest: this.digest, post, trainings: this.#trainings, contains: this.#contains, accuracy: this.#accuracy, base: this.#base,
      updates: this.updates, posts: this.posts, merges: this.merges, samples: this.samples,
      seconds: (performance.now() - this.began) / 1000, bytesUp: this.connection.bytesUp, bytesDown: this.connection.bytesDown,
    });
  }

  #restore({ peer, digest, post, trainings, contains, accuracy, base, updates, posts, merges, samples, seconds, bytesUp, bytesDown }) {
    this.layout = new Layout(post.set);
    this.#posted = this.layout.decode(post.set);
    this.#load(this.#posted);
    this.#number = post.number;
    this.#trainings = trainings;
    this.#contains = contains;
    this.#accuracy = accuracy;
    this.#base = base;
    this.connection.openPost = post;
    this.connection.setBytes = this.layout.bytes;
    Object.assign(this, { peer, digest, updates, posts, merges, samples, earlier: seconds });
    Object.assign(this.connection, { bytesUp, bytesDown });
    this.#say("back      with the weights that this browser has kept");
  }
}
