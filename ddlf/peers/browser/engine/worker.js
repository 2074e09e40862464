// The worker behind a page: training and the connection to the server, so that they go on while the page is busy. Messages
// to it have a `do` and an `id`; answers repeat the id, or are {id, error}. Arrays are {data, shape}.
//
// do              with                                                    answer
// join            data {inputs, labels}, test {inputs, labels} or null,   peer, device, parameters, speeds {wasm, webgpu},
//                 name, device "auto" "wasm" "webgpu", share 0..1, seed,  data, shard if the server lends a shard: then give no data
//                 mostUpdates: leave after this number of batches
// pause, resume
// share           share
// predict         inputs                                                  outputs
// get                                                                     set: the live weights as safetensors
// stop
//
// Without being asked it tells
// {told: "state", state: "connecting" "measuring" "training" "waiting" "paused" "lost" "over" "ended", why}
// {told: "progress", batches, batchesPerSecond, loss, accuracy, bytesUp, bytesDown, posts, merges, samples, seconds,
//  code: what people compare in a training with secure aggregation, epsilon: of the releases so far, -1 before the first answer}
// {told: "line", text} and {told: "failed", why, hint}

import { choose } from "./device.js";
import { Model } from "./model.js";
import { checkedShare, Peer } from "./peer.js";
import { lent, madeUp } from "./shard.js";
import { keep, load } from "./store.js";

let peer = null, isJoining = false;

const joined = () => {
  if (peer === null) throw new Error("this page has not joined yet");
  return peer;
};

const tell = (message) => postMessage(message);

async function served() {
  const answer = await fetch("/graph", { cache: "no-store" });
  if (!answer.ok) throw new Error((await answer.text()).trim());
  return answer.json();
}

const acts = {
  async join({ data = null, test = null, name = "", device = "auto", share = 1, seed = 0, mostUpdates = Infinity }) {
    if (peer !== null || isJoining) throw new Error("this page has joined already: reload it to join again");
    isJoining = true;
    try {
      checkedShare(share);
      const { graph, plan, run, peer: number, classes } = await served(), isLent = plan.shards > 0;
      tell({ told: "state", state: "measuring", why: "" });
      const chosen = await choose(device, graph, data ?? madeUp(graph, plan.batch_size), plan.batch_size);
      const found = await load(run), record = found?.peer === number ? found : null;
      const model = new Model(graph, { seed }), url = `${location.origin.replace("http", "ws")}/live`;
      const lends = isLent ? (shard) => lent(shard, { graph, classes }) : null;
      const made = new Peer({ url, run, plan, model, data, test, name, share, seed, mostUpdates, tell, lent: lends, record, kept: (what) => keep(run, what) });
      await made.start();
      peer = made;
      const parameters = Object.values(model.shapes).reduce((all, shape) => all + shape.reduce((size, n) => size * n, 1), 0);
      return { peer: number, parameters, ...chosen, ...(isLent ? { data: made.test, shard: made.shard } : {}) };
    } finally {
      isJoining = false;
    }
  },
  pause: () => joined().pause(),
  resume: () => joined().resume(),
  share: ({ share }) => joined().setShare(share),
  predict: async ({ inputs }) => ({ outputs: await joined().predict(inputs) }),
  get: async () => ({ set: await joined().set() }),
  stop: async () => { await joined().stop(); },
};

onmessage = async ({ data: { do: what, id, ...given } }) => {
  try {
    if (!Object.hasOwn(acts, what)) throw new Error(`the worker cannot do ${what}`);
    postMessage({ id, ...(await acts[what](given)) });
  } catch (error) {
    postMessage({ id, error: [error.message, error.hint].filter(Boolean).join(": ") });
  }
};
