// A peer in Node that trusts nobody, with a scripted server: node hidden.js ENGINE. Prints its posts, its weights and its messages.

const engine = process.argv[2];
const { decode, encode } = await import(`${engine}/frames.js`);
const { Peer } = await import(`${engine}/peer.js`);
const { Layout } = await import(`${engine}/safetensors.js`);

const SIZE = 20000, table = { w: { dtype: "F32", shape: [SIZE], data_offsets: [0, 4 * SIZE] }, kept: { dtype: "F32", shape: [2], data_offsets: [4 * SIZE, 4 * SIZE + 8] } };
const json = JSON.stringify(table), text = new TextEncoder().encode(json.padEnd(Math.ceil(json.length / 8) * 8));
const first = new ArrayBuffer(8 + text.length + 4 * SIZE + 8);
new DataView(first).setBigUint64(0, BigInt(text.length), true);
new Uint8Array(first).set(text, 8);
const layout = new Layout(first), base = layout.encode({ w: new Float32Array(SIZE).fill(0.5), kept: new Float32Array(2).fill(7) });

const posts = [], loaded = [], sent = [], epsilons = [];
let live = null;

globalThis.WebSocket = class {
  static OPEN = 1;
  static CLOSED = 3;
  readyState = 0;
  constructor() {
    setTimeout(() => { this.readyState = 1; this.onopen(); });
  }
  send(frame) {
    const message = decode(frame, ["hello", "post", "score", "broken", "bye"]), reply = (one) => setTimeout(() => this.onmessage({ data: encode(one) }));
    sent.push(message.is);
    if (message.is === "hello") reply({ is: "welcome", run: "r", peer: 1, plan: {}, model: "", layout: "", number: 0, set_number: 1, trainings: 0, rate: 0, shard: 0, set: first });
    if (message.is !== "post") return;
    const { w, kept } = layout.decode(message.set), mean = w.reduce((sum, one) => sum + one, 0) / SIZE;
    posts.push({ mean, std: Math.sqrt(w.reduce((sum, one) => sum + (one - mean) ** 2, 0) / SIZE), kept: [...kept], accuracy: message.accuracy, loss: message.loss });
    const facts = { is: "answer", number: message.number, set_number: 1 + posts.length, trainings: 1, accuracy: -1, rate: 0, why: "", epsilon: posts.length };
    reply({ ...facts, number: 0, answer: "validate", set: null });
    reply({ ...facts, answer: "replace", set: base });
  }
  close() {
    if (this.readyState === 3) return;
    this.readyState = 3;
    setTimeout(() => this.onclose());
  }
};

const model = {
  graph: { losses: [] }, trained: ["w"],
  weights: async () => Object.fromEntries(Object.entries(live).map(([name, all]) => [name, all.slice()])),
  setWeights(weights) {
    live = weights;
    loaded.push([weights.w[0], weights.w[SIZE - 1], weights.kept[0]]);
  },
  async train() {
    live = Object.fromEntries(Object.entries(live).map(([name, all]) => [name, all.map((one) => one - 1)]));
    return { loss: 1, accuracy: 0.5 };
  },
  async evaluate() {
    return { loss: 1, accuracy: 0.5 };
  },
};
const plan = { way: "rounds", merge: "mean", batch_size: 4, updates: 1, seconds: 0, shards: 0, clip: 2, noise: 3, trust: "nobody", quorum: 4 };
const data = { inputs: [{ data: new Float32Array(4), shape: [4, 1] }], labels: [{ data: new Int32Array(4), shape: [4] }] };
const peer = new Peer({ url: "ws://there", run: "r", plan, model, data, test: null, name: "", share: 1, seed: 0, mostUpdates: 2, tell: ({ told, epsilon }) => told === "progress" && epsilons.push(epsilon) });
await peer.start();
await peer.ended;
console.log(JSON.stringify({ epsilons, posts, loaded, sent }));
process.exit(0);
