// A peer with a leased shard in Node, whose server loses it: node borrowed.js ENGINE. Prints what it has told and trained.

const engine = process.argv[2];
const { decode, encode } = await import(`${engine}/frames.js`);
const { Peer } = await import(`${engine}/peer.js`);
const { Refused } = await import(`${engine}/refused.js`);

const text = new TextEncoder().encode('{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  ');
const set = new ArrayBuffer(8 + text.length + 8);
new DataView(set).setBigUint64(0, BigInt(text.length), true);
new Uint8Array(set).set(text, 8);

// What the server does with each connection: the shard that it lends, and what becomes of the question for it.
const steps = [
  { shard: 1, lends: true },
  { shard: 2, lends: false, ends: true },
  { shard: 2, lends: false, ends: false },
  { shard: 2, lends: true },
  { shard: 3, lends: null },
];
let socket = null, step = null;
const told = [], trained = [];

globalThis.WebSocket = class {
  static OPEN = 1;
  static CLOSED = 3;
  readyState = 0;
  constructor() {
    socket = this;
    setTimeout(() => { this.readyState = 1; this.onopen(); });
  }
  send(frame) {
    const message = decode(frame, ["hello", "post", "score", "broken", "bye"]);
    if (message.is !== "hello") return;
    step = steps.shift();
    const facts = { run: "r", peer: 1, plan: {}, model: "", layout: "", number: 0, set_number: message.keeps ? 0 : 1, trainings: 0, rate: 0, shard: step.shard };
    setTimeout(() => this.onmessage({ data: encode({ is: "welcome", ...facts, set: message.keeps ? null : set }) }));
  }
  close() {
    if (this.readyState === 3) return;
    this.readyState = 3;
    setTimeout(() => this.onclose());
  }
};

const model = {
  graph: { losses: [] },
  weights: async () => ({ w: new Float32Array(2) }),
  setWeights() {},
  async train([{ data }]) {
    trained.push(data[0]);
    if (trained.filter((shard) => shard === data[0]).length === 3) socket.close(); // the server is lost
    return { loss: 1 };
  },
};

// The data of a shard are its number.
async function lent(shard) {
  if (step.lends === null) throw new Refused("the shard cannot be read", "tell its owner");
  if (step.ends) socket.close();
  if (!step.lends) throw new TypeError("Failed to fetch");
  return { inputs: [{ data: new Float32Array(4).fill(shard), shape: [4, 1] }], labels: [{ data: new Int32Array(4), shape: [4] }] };
}

const plan = { way: "swap", merge: "average", batch_size: 4, updates: 1000, seconds: 0, shards: 3 };
const failed = new Promise((resolve) => {
  const tell = (one) => { told.push(one); if (one.told === "failed") resolve(); };
  new Peer({ url: "ws://there", run: "r", plan, model, data: null, test: null, name: "", share: 1, seed: 0, tell, lent }).start();
});
await failed;
console.log(JSON.stringify({ trained, told: told.filter((one) => one.told !== "progress") }));
process.exit(0);
