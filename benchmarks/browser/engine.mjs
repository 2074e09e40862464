// Prints the processor time of a batch in the engine: node engine.mjs ENGINE < task

import { readFileSync } from "node:fs";

globalThis.navigator ??= { userAgent: "Node" }; // Node 20 has none
const engine = process.argv[2], task = JSON.parse(readFileSync(0, "utf-8"));
const { start } = await import(`${engine}/arrays.js`);
const { Model } = await import(`${engine}/model.js`);
await start("wasm");

const opened = ({ data, shape }) => ({ data: Float32Array.from(data), shape });
const inputs = [opened(task.inputs)], labels = [opened(task.labels)], model = new Model(task.graph);
model.setWeights(Object.fromEntries(Object.entries(task.weights).map(([name, data]) => [name, Float32Array.from(data)])));
const spent = () => { const { user, system } = process.cpuUsage(); return (user + system) / 1000; };
for (let n = 0; n < 5; n++) await model.train(inputs, labels);
const began = spent();
for (let n = 0; n < task.batches; n++) await model.train(inputs, labels);
console.log((spent() - began) / task.batches);
