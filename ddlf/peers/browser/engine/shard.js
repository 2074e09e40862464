// A shard: a part of the server's own data, which the server lends to this peer while it is connected.

import { asLabels, fitArrays, needsOf } from "../page/fit.js";
import { readNpz } from "../page/npz.js";

// Return the inputs and labels of the shard that this peer has.
export async function lent(served) {
  const answer = await fetch("/shard", { cache: "no-store" });
  if (!answer.ok) throw new Error(`the server gives no shard: ${(await answer.text()).trim()}`);
  return fitArrays(await readNpz(await answer.arrayBuffer(), "the server's shard"), needsOf(served), "the server's shard").data;
}

// Return a batch of zeros, to measure the speed before there are data.
export function madeUp(graph, count) {
  const needs = needsOf({ graph }), size = needs.input.reduce((all, n) => all * n, 1), outer = needs.output.slice(0, -1);
  const labels = new Int32Array(outer.reduce((all, n) => all * n, count));
  return { inputs: [{ data: new Float32Array(count * size), shape: [count, ...needs.input] }], labels: [asLabels(labels, needs, [count, ...outer])] };
}
