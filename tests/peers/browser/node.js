// Runs cases in Node: node node.js ENGINE < cases > results, one JSON document on each line.

import { createInterface } from "node:readline";

globalThis.navigator ??= { userAgent: "Node" }; // Node 20 has none, and jax-js reads it
const engine = process.argv[2];
const { start } = await import(`${engine}/arrays.js`);
const { Model } = await import(`${engine}/model.js`);
const { Means } = await import(`${engine}/metrics.js`);
const { run } = await import("./cases.js");
await start("wasm");
for await (const line of createInterface({ input: process.stdin })) console.log(JSON.stringify(await run({ Model, Means }, JSON.parse(line))));
