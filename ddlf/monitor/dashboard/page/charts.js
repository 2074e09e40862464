// Curves over the rounds: one chart for each metric, with its training, validation and test values; then speed and times.

import { bytes, metric, rate, seconds, secondsTick, tick, whole } from "./format.js";

const COLORS = { train: "--blue", val: "--green", test: "--orange", compute: "--blue", transfer: "--orange", merge: "--purple", wait: "--quiet" };
const KINDS = ["train", "val", "test"];
const MOST_CHARTS = 8;
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
  const one = inRounds ? "round" : "update";
  charts.push({ title: "Samples in a second", show: rate, zero: true, fill: true, lines: [{ column: "#rate", label: "all workers", color: "--green" }] });
  charts.push({
    title: `Seconds in each ${one}`, show: seconds, tick: secondsTick, zero: true,
    lines: ["compute", "transfer", "merge", "wait"].map((part) => ({ column: `#${part}_s`, label: part, color: COLORS[part] })),
  });
  charts.push({
    title: `Bytes in each ${one}`, show: bytes, tick: bytes, zero: true,
    lines: [["sent", "--blue"], ["received", "--orange"]].map(([part, color]) => ({ column: `#${part}`, label: part, color })),
  });
  if (columns["#error"]) charts.push({ title: "Error of the codec", show: metric, zero: true, lines: [{ column: "#error", label: "relative", color: "--red" }] });
  if (columns["#batches"]) charts.push({ title: "Batches of all peers", show: whole, zero: true, lines: [{ column: "#batches", label: "trained so far", color: "--purple" }] });
  if (columns["#staleness"]) charts.push({ title: "Staleness", show: tick, zero: true, lines: [{ column: "#staleness", label: "merges in between", color: "--pink" }] });
  return charts.map((chart) => ({ ...chart, one }));
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
    this.boxes = what.lines.map(() => Object.assign(document.createElement("input"), { type: "checkbox", checked: true, title: "show or hide" }));
    this.keys = what.lines.map((line, n) => {
      const key = document.createElement("label");
      key.className = "key";
      key.style.setProperty("--of", `var(${line.color})`);
      key.append(this.boxes[n], `${line.label} `, document.createElement("b"));
      this.boxes[n].onchange = () => this.chart.setSeries(n + 1, { show: this.boxes[n].checked });
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
      padding: [8, 10, 0, 0],
      cursor: { sync: { key: "rounds" }, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: false, range: (_, low, high) => [low, high > low ? high : low + 1] },
                y: { range: (_, low, high) => span(low, high, what.zero) } },
      axes: [{ ...axis, size: 22, space: 60, incrs: WHOLE_STEPS, values: (_, ticks) => ticks.map((t) => (Number.isInteger(t) ? whole(t) : "")) },
             { ...axis, size: 54, space: 34, values: (_, ticks) => ticks.map(what.tick ?? tick) }],
      series: [{}, ...what.lines.map((line, n) => {
        const color = token(line.color);
        return { show: this.boxes[n].checked, label: line.label, stroke: color, width: 2, spanGaps: true, points: { show: (u) => u.data[0].length < 30, size: 5, fill: color },
                 fill: what.fill ? `${color}22` : undefined };
      })],
      hooks: { setCursor: [(u) => this.tell(u.cursor.idx)], drawAxes: [(u) => this.mark(u)] },
    }, this.data ?? [[], ...what.lines.map(() => [])], this.plot);
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
    this.data = [series.x, ...this.what.lines.map((line) => series.columns[line.column] ?? series.x.map(() => null))];
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

  // The values at the cursor, else the newest.
  tell(index) {
    const x = this.data?.[0][index ?? -1];
    this.at.textContent = x === undefined ? "" : `${this.what.one} ${whole(x)}`;
    this.data?.slice(1).forEach((values, number) => {
      let at = index ?? values.length - 1;
      while (index === null || index === undefined ? at > 0 && values[at] === null : false) at -= 1;
      const value = values[at];
      const broken = (index ?? null) === null && this.newest[this.what.lines[number].column] === null;
      this.keys[number].textContent = broken ? "NaN" : value === null || value === undefined ? "" : this.what.show(value);
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
    this.names = "";
    new ResizeObserver(() => this.charts.forEach((chart) => chart.resize())).observe(home);
  }

  show(series, inRounds, newest, marks = []) {
    const names = `${inRounds} ${Object.keys(series.columns).sort().join(" ")}`;
    if (names !== this.names) {
      this.names = names;
      this.charts.forEach((chart) => chart.remove());
      this.charts = plan(series.columns, inRounds).map((what) => new Chart(this.home, what, marks));
    }
    this.charts.forEach((chart) => chart.show(series, newest));
  }

  // Up to which round each chart shows something.
  reach() {
    return this.charts.map((chart) => chart.chart.scales.x.max);
  }

  recolor() {
    this.charts.forEach((chart) => chart.build());
  }
}
