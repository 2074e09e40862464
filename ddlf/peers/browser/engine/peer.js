// A peer in a browser: trains on its own data, posts its sets, and merges the answers into its live weights. The same peer
// in Python is ddlf/peers/peer.py. Everything happens between two batches, in the order in which it comes.

import { Connection } from "./connection.js";
import { mergeOf } from "./merges.js";
import { Layout } from "./safetensors.js";
import { Trainer, turn } from "./trainer.js";

const NO_DATA = { inputs: [{ data: new Float32Array(1), shape: [1] }], labels: [] }; // until the server has lent a shard
const MOST_TESTED = 64, TELL_MS = 250, LEAST_REST_MS = 10, MOST_REST_MS = 2000, GOODBYE_MS = 5000;
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
  #restMs = 0; #toldAt = 0; #recent = [];

  // `run` and `plan` come from the server. `tell` gets what the page is told, and `kept` keeps a record for a reload.
  // It leaves after `mostUpdates` batches. Without `data`, it trains on a shard of the server's data: `lent` returns it.
  constructor({ url, run, plan, model, data, test, name, share, seed, mostUpdates = Infinity, tell, lent = null, record = null, kept = async () => {} }) {
    Object.assign(this, { run, plan, model, name, mostUpdates, tell, lent, kept, test: test ?? data, shard: 0 });
    if (!data !== plan.shards > 0) throw new Error(data ? "this server gives each peer a part of its data" : "a peer needs data");
    this.share = checkedShare(share);
    this.trainer = new Trainer(model, data ?? NO_DATA, { batchSize: plan.batch_size, seed });
    this.merge = plan.way === "swap" ? mergeOf(plan.merge) : null;
    Object.assign(this, { posts: 0, merges: 0, updates: 0, samples: 0, began: 0, over: "", layout: null });
    this.connection = new Connection({
      url,
      hello: () => this.#hello(),
      take: (message) => this.#arrived(message),
      tell: (what) => this.#connected(what),
      fail: (error) => this.#failed(error),
    });
    this.record = record;
  }

  // Connect, and take the first set or the kept one.
  async start() {
    this.#tellState("connecting");
    if (this.record) this.#restore(this.record);
    const welcome = await this.connection.start();
    this.peer = welcome.peer;
    if (welcome.run !== this.run) throw new Error("the server has begun another run: reload the page");
    await this.#welcomed(welcome);
    const samples = this.trainer.samples.toLocaleString("en");
    this.#say(`joined    as peer ${welcome.peer}; ${this.lent ? `it trains ${samples} samples of the server, shard ${this.shard} of ${this.plan.shards}` : `${samples} samples stay here, sets of weights travel`}`);
    this.began = this.#postedAt = this.#toldAt = performance.now();
    this.ended = this.#run().catch((error) => this.#failed(error));
    return welcome.peer;
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

  // Return the live weights as a set.
  set() {
    return this.trainer.between(async () => this.layout.encode(await this.model.weights()));
  }

  // -- the loop -------------------------------------------------------------------------------------------------------

  async #run() {
    while (!this.#isOver) {
      while (this.#inbox.length && !this.#isOver) await this.#between(this.#inbox.shift());
      if (this.#isOver) break;
      if (this.#isLeaving || this.updates >= this.mostUpdates) return this.#leave();
      const waits = this.plan.way === "rounds" && this.connection.waits;
      const mayNot = this.lent !== null && this.#isLost; // the shard may be with another peer later
      if (this.#isPaused || this.#isBroken || waits || mayNot) {
        this.#tellState(this.#isPaused ? "paused" : mayNot ? "lost" : "waiting", waits && !mayNot ? "the round is open" : "");
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
      const late = this.plan.seconds && performance.now() - this.#postedAt >= 1000 * this.plan.seconds;
      if ((this.#since >= this.plan.updates || late) && !this.connection.waits) await this.trainer.between(() => this.#post());
      this.#progress();
      await turn();
      await this.#rest(performance.now() - began);
    }
    this.#progress(true);
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
      else await this.#welcomed(message);
    });
  }

  // -- acts between two batches -----------------------------------------------------------------------------------------

  #hello() {
    const keeps = this.layout !== null && !this.#isBroken;
    return { is: "hello", name: this.name, samples: this.lent ? 0 : this.trainer.samples, layout: this.digest ?? "", run: keeps ? this.run : "", keeps, updates: this.updates };
  }

  async #welcomed(welcome) {
    if (this.lent && welcome.shard !== this.shard) {
      const data = await this.lent();
      this.trainer.take(data);
      Object.assign(this, { test: data, shard: welcome.shard });
    }
    this.digest = welcome.layout;
    this.#setRate(welcome.rate);
    if (!this.connection.waits) this.#number = welcome.number;
    if (!welcome.set) return;
    this.layout ??= new Layout(welcome.set);
    this.connection.setBytes = this.layout.bytes;
    this.#load(this.layout.decode(welcome.set));
    this.#trainings = welcome.trainings;
    this.#base = welcome.set_number;
    this.#contains = 0;
    this.#since = 0;
    this.#isBroken = false;
  }

  async #post() {
    const means = this.trainer.means(), weights = await this.model.weights(), why = notFinite(weights);
    this.#accuracy = accuracyOf(means);
    if (why) return this.#break(`after training: ${why}`);
    this.#posted = weights;
    this.#number += 1;
    this.#trainings += 1;
    this.posts += 1;
    const post = {
      is: "post", number: this.#number, contains: this.#contains, updates: this.#since, base: this.plan.way === "rounds" ? this.#base : 0,
      accuracy: toWire(this.#accuracy), loss: toWire(means.loss), set: this.layout.encode(weights),
    };
    const batches = this.#since;
    this.#since = 0;
    this.#postedAt = performance.now();
    await this.#keep(post);
    this.connection.send(post);
    this.#say(`posted    set ${this.posts} after ${batches} batches: loss ${decimals(means.loss)}, accuracy ${decimals(this.#accuracy)}`);
  }

  #break(why) {
    this.#say(`broken    ${why}; beginning again from the last validated set`);
    this.#since = 0;
    this.#isBroken = true;
    this.trainer.means();
    this.connection.send({ is: "broken", why: why.slice(0, 500) });
  }

  async #answered(answer) {
    if (this.#isBroken) { // earlier answers belong to the broken weights
      if (answer.answer !== "replace" && answer.answer !== "rejected") return;
      this.#isBroken = false;
      answer.answer = "rejected";
    }
    this.#setRate(answer.rate);
    if (answer.answer === "continue") return;
    if (answer.answer === "validate") return this.#validate(answer);
    if (!answer.set) throw new Error(`the server sent ${answer.answer} without a set`);
    let given = this.layout.decode(answer.set);
    if (answer.answer === "merge") return this.#merge(answer, given);
    if (answer.answer === "replace" && this.#posted) { // keep the training since the post
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
    if (set) this.#load(this.layout.decode(set));
    this.over = why;
    this.#say(`over      ${why}`);
    this.#tellState("over", why);
  }

  async #leave() {
    const until = performance.now() + GOODBYE_MS, rounds = this.plan.way === "rounds";
    while (this.connection.waits && !rounds && !this.#isOver && performance.now() < until) {
      await this.#changed(until - performance.now());
      while (this.#inbox.length && !this.#isOver) await this.#between(this.#inbox.shift());
    }
    if (!this.#isOver) {
      if (this.#since && !this.connection.waits && !this.#isBroken) await this.trainer.between(() => this.#post());
      this.connection.send({ is: "bye" });
      await this.connection.ended(GOODBYE_MS);
      this.connection.close();
      this.#isOver = true;
      this.#tellState("ended", "you have stopped");
    }
    this.#progress(true);
  }

  // -- small things -----------------------------------------------------------------------------------------------------

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
      samples: this.samples, seconds: (at - this.began) / 1000,
    });
    this.#recent = [];
    this.#toldAt = at;
  }

  // -- a reload ---------------------------------------------------------------------------------------------------------

  // Keep a post before it is sent. After a reload it is sent again, and the server answers it again.
  async #keep(post) {
    await this.kept({
      peer: this.peer, digest: this.digest, post, trainings: this.#trainings, contains: this.#contains, accuracy: this.#accuracy, base: this.#base,
      updates: this.updates, posts: this.posts, merges: this.merges,
    });
  }

  #restore({ peer, digest, post, trainings, contains, accuracy, base, updates, posts, merges }) {
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
    Object.assign(this, { peer, digest, updates, posts, merges });
    this.#say("back      with the weights that this browser has kept");
  }
}
