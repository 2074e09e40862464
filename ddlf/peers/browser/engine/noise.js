// Clips the update of a peer that trusts nobody, and adds its share of the noise, before a set leaves this browser. The same
// formulas in Python, value by value, are in ddlf/privacy/release.py.

const PAIRS = 65536, MOST_BYTES = 65536;

// Return random bytes of the browser, which gives 64 KiB at once.
function randomBytes(count) {
  const bytes = new Uint8Array(count);
  for (let begin = 0; begin < count; begin += MOST_BYTES) crypto.getRandomValues(bytes.subarray(begin, begin + MOST_BYTES));
  return bytes;
}

// Return normal values N(0, std^2). `random` returns a number of random bytes.
export function gaussian(count, std, random = randomBytes) {
  const values = new Float64Array(count);
  for (let begin = 0; begin < count; begin += 2 * PAIRS) {
    const size = Math.min(2 * PAIRS, count - begin), pairs = Math.ceil(size / 2);
    const bytes = random(16 * pairs), view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const bits = (n) => view.getUint32(8 * n + 4, true) * 2 ** 21 + (view.getUint32(8 * n, true) >>> 11); // the upper 53 of 64
    for (let n = 0; n < pairs; n++) {
      const radius = std * Math.sqrt(-2 * Math.log((bits(n) + 1) * 2 ** -53)), angle = 2 * Math.PI * 2 ** -53 * bits(pairs + n);
      values[begin + n] = radius * Math.cos(angle);
      if (pairs + n < size) values[begin + pairs + n] = radius * Math.sin(angle);
    }
  }
  return values;
}

// Return weights by name as they may leave: the set that the training began with, less the clipped and noised update. Weights
// that are not trained stay as they were given. The plan has `clip`, `noise` and `quorum`, the fewest posts of a round.
export function hidden(given, weights, trained, { clip, noise, quorum }, random = randomBytes) {
  const updates = Object.fromEntries(trained.map((name) => [name, given[name].map((before, n) => before - weights[name][n])]));
  let squares = 0;
  for (const update of Object.values(updates)) for (let n = 0; n < update.length; n++) squares += update[n] * update[n];
  const factor = squares ? Math.min(1, clip / Math.sqrt(squares)) : 1, std = (noise * clip) / Math.sqrt(quorum), hiding = { ...given };
  for (const [name, update] of Object.entries(updates)) {
    const share = gaussian(update.length, std, random);
    hiding[name] = given[name].map((before, n) => before - Math.fround(update[n] * factor + share[n]));
  }
  return hiding;
}
