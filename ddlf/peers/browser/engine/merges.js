// Rules that merge two sets of weights, as in ddlf/algorithms/set_merge.py. A set is {weights, trainings, accuracy}, with
// weights by name as Float32Arrays. A rule returns a new set, or `mine` itself if it changes nothing.

const { fround } = Math;

// Return weights moved towards others by a share of the difference, computed in float32.
export function towards(weights, others, share) {
  const part = fround(share);
  return Object.fromEntries(Object.entries(weights).map(([name, mine]) => {
    const theirs = others[name];
    return [name, mine.map((w, n) => w + fround(part * fround(theirs[n] - w)))];
  }));
}

const moved = (mine, theirs, share, more) => ({ ...mine, weights: towards(mine.weights, theirs.weights, share), ...more });
const longest = (mine, theirs) => ({ trainings: Math.max(mine.trainings, theirs.trainings) });

function mimic(mine, theirs) {
  const d = theirs.trainings - mine.trainings, share = (d > 0 ? 1 : -1) / ((Math.abs(d) || 1) + 1);
  return moved(mine, theirs, share, longest(mine, theirs));
}

function copy(mine, theirs) {
  const isUnknown = Number.isNaN(theirs.accuracy); // nobody has tested it, as a new mean of sets
  return isUnknown || theirs.accuracy <= mine.accuracy ? mine : { ...mine, weights: theirs.weights, accuracy: theirs.accuracy };
}

const RULES = {
  average: () => (mine, theirs) => moved(mine, theirs, 0.5),
  weighted: () => (mine, theirs) => {
    const both = theirs.trainings + mine.trainings;
    return moved(mine, theirs, both ? theirs.trainings / both : 0.5, longest(mine, theirs));
  },
  mimic: () => mimic,
  copy: () => copy,
  elastic: (alpha = "0.25") => (mine, theirs) => moved(mine, theirs, Number(alpha)),
};

// Return the rule of a text such as "elastic:0.25".
export function mergeOf(text) {
  const [name, ...rest] = text.split(":"), values = rest.flatMap((part) => part.split(",")).map((part) => part.split("=").at(-1));
  if (!Object.hasOwn(RULES, name)) throw new Error(`the page has no merge ${name}: reload the page`);
  return RULES[name](...values);
}
