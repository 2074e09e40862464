// Windows of one to three dimensions, as convolutions and pools see them. The last axis has the channels.

import { every, padWith } from "../arrays.js";

// Return how a dimension is covered: number of windows, and what is added before and after it.
function coverage(size, window, stride, dilation, padding) {
  const reach = (window - 1) * dilation + 1;
  if (padding === "same") {
    const count = Math.ceil(size / stride), needed = Math.max((count - 1) * stride + reach - size, 0);
    return { count, before: Math.floor(needed / 2), after: needed - Math.floor(needed / 2) };
  }
  const before = padding === "causal" ? reach - 1 : 0;
  return { count: Math.floor((size + before - reach) / stride) + 1, before, after: 0 };
}

export function coverages(shape, { size, strides, dilation = size.map(() => 1), padding }) {
  return size.map((window, n) => coverage(shape[n + 1], window, strides[n], dilation[n], padding));
}

// Pad x as windows need it, with `fill` outside.
function bordered(x, window, fill) {
  return padWith(x, [[0, 0], ...coverages(x.shape, window).map(({ before, after }) => [before, after]), [0, 0]], fill);
}

// Reduce windows to one entry each, along one axis after another. `reduce` gets one array for each offset in a window
// along an axis, the first offset first. The last axis comes first, so that equal entries keep the order of rows.
export function alongAxes(x, window, fill, reduce) {
  const { size, strides, dilation = size.map(() => 1) } = window, covered = coverages(x.shape, window);
  return size.reduceRight((all, count, n) => {
    const parts = Array.from({ length: count }, (_, offset) => every(all, n + 1, offset * dilation[n], covered[n].count, strides[n]));
    return parts.length === 1 ? parts[0] : reduce(parts);
  }, bordered(x, window, fill));
}

// Return all offsets in a window, in rows: [0, 0], [0, 1], [1, 0] ..
export function offsets(size) {
  return size.reduce((all, count) => all.flatMap((head) => [...Array(count).keys()].map((n) => [...head, n])), [[]]);
}

// Return one array for each offset in the window. It has the entry at this offset of all windows.
export function entries(x, window) {
  const { size, strides, dilation = size.map(() => 1) } = window, covered = coverages(x.shape, window), whole = bordered(x, window, 0);
  const at = (offset) => offset.reduce((part, n, axis) => every(part, axis + 1, n * dilation[axis], covered[axis].count, strides[axis]), whole);
  return offsets(size).map(at);
}
