// The connection of a peer to its server. It comes back by itself as the same peer, and sends a post again that has no
// answer yet. The browser itself answers the pings of the server.

import { decode, encode } from "./frames.js";
import { Refused } from "./refused.js";

const FIRST_WAIT_MS = 100, LONGEST_WAIT_MS = 5000, GIVE_UP_MS = 600000, WELCOME_MS = 600000; // a set may be large, and the line slow

export class Connection {
  #socket = null; #isClosed = false; #waitMs = FIRST_WAIT_MS;

  // `hello` makes the first message of each connection, `take` gets each message, and `tell` gets "lost" and "back".
  constructor({ url, hello, take, tell, fail }) {
    Object.assign(this, { url, hello, take, tell, fail, openPost: null, setBytes: 0, bytesUp: 0, bytesDown: 0 });
  }

  get waits() {
    return this.openPost !== null;
  }

  // Return the first welcome, or the end if the training is over.
  async start() {
    const welcome = await this.#connect();
    this.#resend(welcome);
    return welcome;
  }

  // Send a message. A post that is lost with its connection is sent again.
  send(message) {
    if (message.is === "post" || message.is === "masked") this.openPost = message;
    if (this.#socket?.readyState !== WebSocket.OPEN) return;
    const frame = encode(message);
    this.bytesUp += frame.byteLength;
    this.#socket.send(frame);
  }

  close() {
    this.#isClosed = true;
    this.#socket?.close();
  }

  // Connect again after some time, for another welcome.
  again(afterMs) {
    this.#waitMs = afterMs;
    this.#socket?.close();
  }

  // Wait until the server has closed the connection, which it does after a goodbye; or some seconds.
  ended(ms) {
    const socket = this.#socket;
    this.#isClosed = true;
    if (!socket || socket.readyState === WebSocket.CLOSED) return Promise.resolve();
    return new Promise((resolve) => {
      socket.addEventListener("close", resolve);
      setTimeout(resolve, ms);
    });
  }

  // A peer that gets a set begins again, and so has nothing to send.
  #resend({ set }) {
    if (set) [this.openPost, this.setBytes] = [null, set.byteLength];
    if (this.openPost) this.send(this.openPost);
  }

  async #connect() {
    const socket = new WebSocket(this.url);
    socket.binaryType = "arraybuffer";
    let isWelcome = false;
    return new Promise((resolve, reject) => {
      const late = setTimeout(() => socket.close(), WELCOME_MS);
      socket.onopen = () => {
        const frame = encode(this.hello());
        this.bytesUp += frame.byteLength;
        socket.send(frame);
      };
      socket.onmessage = ({ data }) => {
        try {
          const message = decode(data, undefined, this.setBytes);
          this.bytesDown += data.byteLength;
          if (!isWelcome) {
            clearTimeout(late);
            const isOver = message.is === "end" && message.over;
            if (message.is === "end" && !isOver) throw new Refused(message.why, message.hint);
            if (message.is !== "welcome" && !isOver) throw new Refused("the server did not begin with a welcome", "reload the page");
            isWelcome = true;
            this.#isClosed ||= isOver;
            this.#socket = socket;
            return resolve(message);
          }
          if (message.is === "answer" && message.number === this.openPost?.number) this.openPost = null;
          if (message.is === "end") this.#isClosed = true;
          this.take(message);
        } catch (error) {
          this.#isClosed = true;
          socket.close();
          if (isWelcome) this.fail(error);
          else reject(error);
        }
      };
      socket.onclose = () => {
        clearTimeout(late);
        if (!isWelcome) reject(new Error("the server cannot be reached"));
        else if (!this.#isClosed) this.#comeBack();
      };
    });
  }

  async #comeBack() {
    this.tell("lost");
    for (let wait = this.#waitMs, waited = 0; !this.#isClosed; wait = Math.min(2 * wait, LONGEST_WAIT_MS)) {
      await new Promise((resolve) => setTimeout(resolve, wait));
      waited += wait;
      if (this.#isClosed) return;
      try {
        const welcome = await this.#connect();
        this.#waitMs = FIRST_WAIT_MS;
        this.tell("back");
        this.take(welcome);
        this.#resend(welcome);
        return;
      } catch (error) {
        if (error instanceof Refused) return this.fail(error);
        if (await this.#isRefused()) return this.fail(new Refused("the server does not know this browser any more", "ask for a new link"));
        if (waited >= GIVE_UP_MS) return this.fail(new Refused("the server cannot be reached", "check that it runs, then reload the page"));
      }
    }
  }

  // A WebSocket does not say why it was refused, so ask with a plain request.
  async #isRefused() {
    try {
      return (await fetch("/graph", { cache: "no-store" })).status === 401;
    } catch {
      return false;
    }
  }
}
