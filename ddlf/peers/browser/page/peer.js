// The worker that trains and talks to the server, as an object: questions have answers, and other messages are events.

import { Refused } from "../engine/refused.js";

export class Peer {
  #worker; #waiting = new Map(); #count = 0;

  // `tell` gets each message of the worker that answers no question.
  constructor(tell) {
    this.#worker = new Worker("/engine/worker.js", { type: "module" });
    this.#worker.onmessage = ({ data }) => {
      if (data.told) return tell(data);
      const { resolve, reject } = this.#waiting.get(data.id) ?? {};
      this.#waiting.delete(data.id);
      return data.error ? reject?.(new Refused(data.error, data.hint ?? "")) : resolve?.(data);
    };
    this.#worker.onerror = (event) => {
      event.preventDefault();
      const why = `the trainer of this page cannot run: ${event.message || "its files cannot be loaded"}`;
      for (const { reject } of this.#waiting.values()) reject(new Refused(why, "Reload this page."));
      this.#waiting.clear();
      tell({ told: "failed", why, hint: "Reload this page." });
    };
  }

  ask(what, more = {}) {
    return new Promise((resolve, reject) => {
      this.#waiting.set(++this.#count, { resolve, reject });
      this.#worker.postMessage({ do: what, id: this.#count, ...more });
    });
  }

  end() {
    this.#worker.terminate();
  }
}
