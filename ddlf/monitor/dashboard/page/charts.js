// Curves over the rounds: one chart for each metric, with its training, validation and test values; then speed and times.

import { bytes, duration, metric, rate, seconds, secondsTick, tick, whole } from "./format.js";

const COLORS = { train: "--blue", val: "--green", test: "--orange", compute: "--blue", transfer: "--orange", merge: "--purple", wait: "--quiet" };
const KINDS = ["train", "val", "test"];
const MOST_CHARTS = 8;
const PEER_COLORS = ["--blue", "--orange", "--green", "--purple", "--red", "--pink", "--teal", "--olive"];
const MOST_LETTERS = 20, MS_FOR_EACH_PEER = 25; // two hundred curves are drawn each five seconds
const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, ...[1, 2, 4, 6, 12, 24, 48, 96, 240, 480].map((hours) => 3600 * hours)];
const WHOLE_STEPS = [1, 2, 5].flatMap((n) => [...Array(8).keys()].map((power) => n * 10 ** power)).sort((a, b) => a - b);

const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// What charts there are for the columns that a run has.
function plan(columns, inRounds) {
  const groups = new Map();
  for (const name of Object.keys(columns).sort()) {
    if (name.startsWith("#")) continue;
    const [, kind = "train", base] = name.match(/^(?:(val|test)_)?(.*)$/);
    if (!groups.has(base)) groups.set(base, []);
    groups.get(base).push({ column: name, label: kind, color: COLORS[kind] });
  }
  const order = (base) => (base === "loss" ? 0 : base.includes("acc") ? 1 : 2);
  const charts = [...groups].sort((a, b) => order(a[0]) - order(b[0]) || (a[0] < b[0] ? -1 : 1)).slice(0, MOST_CHARTS).map(([base, lines]) => ({
    title: base[0].toUpperCase() + base.slice(1).replaceAll("_", " "), show: metric,
    lines: lines.sort((a, b) => KINDS.indexOf(a.label) - KINDS.indexOf(b.label)),
  }));
  const one = inRounds ? "round" : "update", hasPeers = "#batches" in columns; // peers send no times
  charts.push({ title: "Samples in a second", show: rate, zero: true, fill: true, lines: [{ column: "#rate", label: hasPeers ? "all peers" : "all workers", color: "--green" }] });
  if (!hasPeers) charts.push({
    title: `Seconds in each ${one}`, show: seconds, tick: secondsTick, zero: true,
    lines: ["compute", "transfer", "merge", "wait"].map((part) => ({ column: `#${part}_s`, label: part, color: COLORS[part] })),
  });
  charts.push({
    title: `Bytes in each ${one}`, show: bytes, tick: bytes, zero: true,
    lines: [["sent", "--blue"], ["received", "--orange"]].map(([part, color]) => ({ column: `#${part}`, label: part, color })),
  });
  if (columns["#error"]) charts.push({ title: "Error of the codec", show: metric, zero: true, lines: [{ column: "#error", label: "relative", color: "--red" }] });
  if (hasPeers) charts.push({ title: "Batches of all peers", show: whole, zero: true, lines: [{ column: "#batches", label: "trained so far", color: "--purple" }] });
  if (columns["#staleness"]) charts.push({ title: "Staleness", show: tick, zero: true, lines: [{ column: "#staleness", label: "merges in between", color: "--pink" }] });
  return charts.map((chart) => ({ ...chart, at: (x) => `${one} ${whole(x)}` }));
}

// The charts of each peer with private data, over the time of the run. Few peers have a colour each; of many, each is a
// thin line, and their median a thick one.
function planOfPeers({ columns, names, count }) {
  const numbers = Object.keys(names).map(Number).sort((a, b) => a - b), isFew = numbers.length <= PEER_COLORS.length;
  const given = Object.values(names), isTwice = (name) => given.indexOf(name) !== given.lastIndexOf(name);
  const labels = numbers.map((peer) => `${brief(names[peer])}${isTwice(names[peer]) ? `, peer ${peer}` : ""}`);
  const known = numbers.length < count ? `${whole(numbers.length)} of ${whole(count)} peers` : `${whole(count)} peers`;
  const chart = (kind, title, show, more) => ({
    title, show, ...more, isTime: true, hasGaps: true, at: (x) => `after ${duration(x)}`,
    lines: isFew ? numbers.map((peer, n) => ({ column: `${kind} ${peer}`, label: labels[n], color: PEER_COLORS[n] })) : [
      { columns: numbers.map((peer) => `${kind} ${peer}`), label: `each of ${known}`, color: "--blue", width: 1, alpha: "4d" },
      { column: `${kind} median`, label: "median", color: "--orange" },
    ],
  });
  const charts = [chart("batches", "Batches of each peer", whole, { zero: true })];
  if (Object.keys(columns).some((name) => name.startsWith("accuracy"))) charts.push(chart("accuracy", "Accuracy of each peer", metric, {}));
  return charts;
}

const brief = (name) => (name.length > MOST_LETTERS ? `${name.slice(0, MOST_LETTERS - 1)}…` : name);

function median(values) {
  const known = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b), middle = known.length >> 1;
  return known.length ? (known.length % 2 ? known[middle] : (known[middle - 1] + known[middle]) / 2) : null;
}

function withMedians({ x, columns }, charts) {
  const medians = {};
  for (const { lines: [{ columns: of }, line] } of charts.filter(({ lines }) => lines[0]?.columns)) {
    const known = of.map((name) => columns[name]).filter(Boolean);
    medians[line.column] = x.map((_, n) => median(known.map((column) => column[n])));
  }
  return { x, columns: { ...columns, ...medians } };
}

class Chart {
  constructor(home, what, marks) {
    this.what = what;
    this.marks = marks;
    this.card = document.createElement("figure");
    this.card.className = "card chart";
    this.card.innerHTML = "<figcaption><h2></h2></figcaption><div class='plot'></div>";
    this.card.querySelector("h2").textContent = what.title;
    const caption = this.card.querySelector("figcaption");
    this.drawn = what.lines.flatMap((line, key) => (line.columns ?? [line.column]).map((column) => ({ ...line, column, key })));
    this.boxes = what.lines.map(() => Object.assign(document.createElement("input"), { type: "checkbox", checked: true, title: "show or hide" }));
    this.keys = what.lines.map((line, n) => {
      const key = document.createElement("label");
      key.className = "key";
      key.style.setProperty("--of", `var(${line.color})`);
      key.append(this.boxes[n], `${line.label} `, document.createElement("b"));
      this.boxes[n].onchange = () => this.chart.batch(() => this.drawn.forEach(({ key: of }, at) => of === n && this.chart.setSeries(at + 1, { show: this.boxes[n].checked })));
      caption.append(key);
      return key.lastChild;
    });
    this.at = document.createElement("span");
    this.at.className = "quiet at";
    caption.append(this.at);
    this.plot = this.card.querySelector(".plot");
    this.plot.title = "drag to look closer, double-click to see all";
    home.append(this.card);
    this.data = null;
  }

  // Colours are read once: anew for another theme.
  build() {
    this.chart?.destroy();
    const quiet = token("--quiet"), grid = { stroke: token("--line"), width: 1 };
    const font = "12px system-ui, sans-serif";
    const axis = { stroke: quiet, grid, ticks: { show: false }, font };
    const { what } = this;
    this.chart = new uPlot({
      width: Math.max(this.plot.clientWidth, 100), height: this.height(),
      legend: { show: false },
      padding: [8, 20, 0, 0],
      cursor: { sync: { key: what.isTime ? "times" : "rounds" }, drag: { x: true, y: false }, points: { size: 7, show: this.drawn.length === what.lines.length } },
      scales: { x: { time: false, range: (_, low, high) => [low, high > low ? high : low + 1] },
                y: { range: (_, low, high) => span(low, high, what.zero) } },
      axes: [{ ...axis, size: 22, space: 60, incrs: what.isTime ? TIME_STEPS : WHOLE_STEPS, values: (_, ticks) => ticks.map((t) => (Number.isInteger(t) ? (what.isTime ? duration : whole)(t) : "")) },
             { ...axis, size: 54, space: 34, values: (_, ticks) => ticks.map(what.tick ?? tick) }],
      series: [{}, ...this.drawn.map((line) => {
        const color = `${token(line.color)}${line.alpha ?? ""}`;
        return { show: this.boxes[line.key].checked, label: line.label, stroke: color, width: line.width ?? 2, spanGaps: !what.hasGaps, fill: what.fill ? `${color}22` : undefined,
                 points: { show: (u) => u.data[0].length < 30 && !line.alpha, size: 5, fill: color } };
      })],
      hooks: { setCursor: [(u) => this.tell(u.cursor.idx)], drawAxes: [(u) => this.mark(u)] },
    }, this.data ?? [[], ...this.drawn.map(() => [])], this.plot);
  }

  // Dashed lines where workers were lost (red) or came (green).
  mark({ ctx, bbox, valToPos }) {
    ctx.save();
    ctx.setLineDash([3, 4]);
    ctx.lineWidth = devicePixelRatio;
    for (const [x, kind] of this.marks) {
      const left = Math.round(valToPos(x, "x", true)) + 0.5;
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.strokeStyle = token(kind === "back" || kind === "joined" ? "--green" : "--red");
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  height() {
    return innerWidth < 560 ? 180 : innerWidth > 1500 ? 250 : 220;
  }

  show(series, newest) {
    this.newest = newest;
    this.data = [series.x, ...this.drawn.map(({ column }) => series.columns[column] ?? series.x.map(() => null))];
    const zoomed = this.chart && this.zoomed();
    if (!zoomed) this.range = [series.x[0], series.x[series.x.length - 1]];
    if (!this.chart) this.build();
    else if (!zoomed) this.chart.setData(this.data);
    else {
      this.chart.setData(this.data, false);
      this.chart.redraw();
    }
    this.tell(this.chart.cursor.idx);
  }

  // Whether somebody looks at a part: against what was shown last, since columns grow in place.
  zoomed() {
    const { min, max } = this.chart.scales.x, [first, last] = this.range;
    return min > first || max < last;
  }

  // The values at the cursor, else the newest. A line that stands for several curves shows their least and their most.
  tell(index) {
    const x = this.data?.[0][index ?? -1], isNewest = (index ?? null) === null;
    this.at.textContent = x === undefined ? "" : this.what.at(x);
    const found = this.keys.map(() => []);
    this.data?.slice(1).forEach((values, number) => {
      let at = index ?? values.length - 1;
      while (isNewest && at > 0 && values[at] === null) at -= 1;
      const value = values[at], { column, key } = this.drawn[number];
      if (isNewest && this.newest[column] === null) found[key].push(NaN);
      else if (value !== null && value !== undefined) found[key].push(value);
    });
    found.forEach((values, key) => {
      const [low, high] = [Math.min(...values), Math.max(...values)].map((value) => (Number.isNaN(value) ? "NaN" : this.what.show(value)));
      this.keys[key].textContent = !values.length ? "" : low === high ? low : `${low} to ${high}`;
    });
  }

  resize() {
    this.chart?.setSize({ width: Math.max(this.plot.clientWidth, 100), height: this.height() });
  }

  remove() {
    this.chart?.destroy();
    this.card.remove();
  }
}

function span(low, high, zero) {
  if (low === null || high === null) return [0, 1];
  if (zero) return [0, high > 0 ? high * 1.08 : 1];
  const margin = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - margin, high + margin];
}

export class Charts {
  constructor(home) {
    this.home = home;
    this.charts = [];
    this.ofPeers = [];
    this.names = this.peers = "";
    this.peersAt = 0;
    new ResizeObserver(() => this.all().forEach((chart) => chart.resize())).observe(home);
  }

  all() {
    return [...this.charts, ...this.ofPeers];
  }

  show(series, inRounds, newest, marks = [], peers = null) {
    const names = `${inRounds} ${Object.keys(series.columns).sort().join(" ")}`;
    if (names !== this.names) {
      this.names = names;
      this.peers = "";
      this.all().forEach((chart) => chart.remove());
      this.charts = plan(series.columns, inRounds).map((what) => new Chart(this.home, what, marks));
      this.ofPeers = [];
    }
    this.charts.forEach((chart) => chart.show(series, newest));
    if (peers?.x.length) this.showPeers(peers);
  }

  showPeers(peers) {
    const known = JSON.stringify([peers.names, Object.keys(peers.columns).length]);
    if (known !== this.peers) {
      this.peers = known;
      this.ofPeers.forEach((chart) => chart.remove());
      this.ofPeers = planOfPeers(peers).map((what) => new Chart(this.home, what, []));
    } else if (performance.now() < this.peersAt) return;
    this.peersAt = performance.now() + MS_FOR_EACH_PEER * Object.keys(peers.names).length;
    const series = withMedians(peers, this.ofPeers.map(({ what }) => what));
    this.ofPeers.forEach((chart) => chart.show(series, {}));
  }

  // Up to which round each chart shows something.
  reach() {
    return this.charts.map((chart) => chart.chart.scales.x.max);
  }

  recolor() {
    this.all().forEach((chart) => chart.build());
  }
}
