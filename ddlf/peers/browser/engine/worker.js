// The worker behind a page: it trains, so that the page never waits. Messages to it have a `do` and, if they want an
// answer, an `id`; answers repeat the id. Sets of weights travel as bytes of safetensors.
//
// do          with                                                     answer
// open        graph, set, data {inputs, labels}, batchSize, seed, device   device, parameters
// start, pause                                                         batches
// get                                                                  set, batches
// put         set                                                      batches
// evaluate    data {inputs, labels}                                    means
// predict     inputs                                                   outputs
// close
//
// Without being asked it tells {told: "trained", batches, samples, seconds, means} and {told: "failed", why}.

import { start } from "./arrays.js";
import { Model } from "./model.js";
import { Layout } from "./safetensors.js";
import { Trainer } from "./trainer.js";

let trainer = null, layout = null;

const opened = () => {
  if (trainer === null) throw new Error("no model is open");
  return trainer;
};

const acts = {
  async open({ graph, set, data, batchSize, seed = 0, device = "wasm" }) {
    await acts.close();
    const name = await start(device), model = new Model(graph, { seed });
    layout = new Layout(set);
    model.setWeights(layout.decode(set));
    const tell = (report) => postMessage({ told: "trained", ...report });
    const fail = (error) => postMessage({ told: "failed", why: error.message });
    trainer = new Trainer(model, data, { batchSize, seed, tell, fail });
    return { device: name, parameters: Object.values(model.shapes).reduce((all, shape) => all + shape.reduce((size, n) => size * n, 1), 0) };
  },
  async start() {
    opened().start();
    return { batches: trainer.batches };
  },
  async pause() {
    await opened().pause();
    return { batches: trainer.batches };
  },
  get: () => opened().between(async () => ({ set: layout.encode(await trainer.model.weights()), batches: trainer.batches })),
  put: ({ set }) => opened().between(() => {
    trainer.model.setWeights(layout.decode(set));
    return { batches: trainer.batches };
  }),
  evaluate: async ({ data }) => ({ means: await opened().evaluate(data) }),
  predict: ({ inputs }) => opened().between(async () => ({ outputs: await trainer.model.predict(inputs) })),
  async close() {
    await trainer?.pause();
    trainer?.model.free();
    trainer = null;
    return {};
  },
};

onmessage = async ({ data: message }) => {
  try {
    if (!Object.hasOwn(acts, message.do)) throw new Error(`the worker cannot do ${message.do}`);
    const answer = await acts[message.do](message), moved = answer.set ? [answer.set] : [];
    postMessage({ id: message.id, ...answer }, moved);
  } catch (error) {
    postMessage({ id: message.id, error: error.message });
  }
};
