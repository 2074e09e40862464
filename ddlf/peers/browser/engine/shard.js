// A shard: a part of the server's own data, which the server lends to this peer while it is connected.

import { asLabels, fitArrays, needsOf } from "./data/fit.js";
import { readNpz } from "./data/npz.js";

// Return the inputs and labels of the shard that this peer has. The server sends it in pieces.
export async function lent(shard, served) {
  const pieces = [];
  for (let got = 0, size = 1; got < size; got += pieces.at(-1).byteLength) {
    const [piece, range] = await pieceOf(shard, got);
    pieces.push(piece);
    size = Number(range.split("/")[1]);
  }
  const content = await new Blob(pieces).arrayBuffer();
  return fitArrays(await readNpz(content, "the server's shard"), needsOf(served), "the server's shard").data;
}

async function pieceOf(shard, begin) {
  let answer, piece;
  try {
    answer = await fetch(`/shard/${shard}`, { cache: "no-store", headers: { Range: `bytes=${begin}-` } });
    piece = await answer.arrayBuffer();
  } catch {
    throw new Error("the server gives no shard: it cannot be reached");
  }
  if (answer.status !== 206) throw new Error(`the server gives no shard: ${new TextDecoder().decode(piece).trim()}`);
  return [piece, answer.headers.get("Content-Range")];
}

// Return a batch of zeros, to measure the speed before there are data.
export function madeUp(graph, count) {
  const needs = needsOf({ graph }), size = needs.input.reduce((all, n) => all * n, 1), outer = needs.output.slice(0, -1);
  const labels = new Int32Array(outer.reduce((all, n) => all * n, count));
  return { inputs: [{ data: new Float32Array(count * size), shape: [count, ...needs.input] }], labels: [asLabels(labels, needs, [count, ...outer])] };
}
