// Who computed, moved weights or waited when: a row for each worker, the newest on the right.

import { seconds } from "./format.js";

const ROW = 22, GAP = 6, AXIS = 22;
const ROUNDS = 8; // about as many are shown
const SHORTEST_S = 4;

export class Timeline {
  constructor(canvas, tell) {
    this.canvas = canvas;
    this.tell = tell;
    this.spans = [];
    this.lanes = [];
    this.mouse = null;
    canvas.addEventListener("pointermove", (event) => { this.mouse = [event.offsetX, event.offsetY]; this.draw(); });
    canvas.addEventListener("pointerleave", () => { this.mouse = null; this.draw(); });
  }

  // spans: [worker, slot, round, began, compute_s, transfer_s], in the order of their ends
  show(spans, lanes, now, training) {
    this.spans = spans;
    this.lanes = lanes;
    this.training = training;
    this.now = training || !spans.length ? now : Math.max(...spans.slice(-lanes.length - 1).map((s) => s[3] + s[4] + s[5]));
    this.draw();
  }

  window() {
    const lasting = this.spans.slice(-4 * Math.max(this.lanes.length, 1)).map((s) => s[4] + s[5]).sort((a, b) => a - b);
    const typical = lasting.length ? lasting[Math.floor(lasting.length / 2)] : 1;
    const wanted = Math.max(SHORTEST_S, typical * ROUNDS);
    const first = this.spans.length ? Math.min(...this.spans.slice(0, this.lanes.length + 1).map((s) => s[3])) : this.now - wanted;
    return Math.max(Math.min(wanted, (this.now - first) * 1.02), 1);
  }

  draw() {
    const { canvas, lanes } = this;
    const width = canvas.clientWidth, height = lanes.length * (ROW + GAP) + AXIS, ratio = devicePixelRatio || 1;
    if (!width || !lanes.length) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.height = `${height}px`;
    }
    const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
    const [blue, orange, hatch, quiet, track, red] = ["--blue", "--orange", "--hatch", "--quiet", "--track", "--red"].map(color);
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const named = Math.min(width < 500 ? 76 : 120, Math.max(...lanes.map((lane) => pen.measureText(lane.name).width)) + 14);
    const shown = this.window(), from = this.now - shown;
    const x = (at) => named + ((at - from) / shown) * (width - named);
    const rows = new Map(lanes.map((lane, index) => [lane.worker, index * (ROW + GAP)]));
    for (const lane of lanes) {
      const y = rows.get(lane.worker);
      pen.fillStyle = quiet;
      pen.fillText(fitted(pen, lane.name, named - 10), 0, y + ROW / 2);
      pen.fillStyle = track;
      pen.fillRect(named, y, width - named, ROW);
    }
    pen.save();
    pen.beginPath();
    pen.rect(named, 0, width - named, height);
    pen.clip();
    // Waiting: between the first and the last update of each worker, where nothing else is drawn.
    const first = new Map(), last = new Map();
    for (const [worker, , , began, compute, transfer] of this.spans) {
      if (!first.has(worker)) first.set(worker, began);
      last.set(worker, began + compute + transfer);
    }
    pen.fillStyle = hatch;
    for (const lane of lanes) {
      if (!first.has(lane.worker)) continue;
      const until = this.training && lane.state !== "lost" && lane.state !== "gone" ? this.now : last.get(lane.worker);
      pen.fillRect(x(first.get(lane.worker)), rows.get(lane.worker) + ROW / 2 - 1.5, x(until) - x(first.get(lane.worker)), 3);
    }
    let under = null;
    const box = (worker, begins, ends, fill) => {
      pen.fillStyle = fill;
      pen.fillRect(x(begins), rows.get(worker), Math.max(x(ends) - x(begins), 0.6), ROW);
    };
    for (const span of this.spans) {
      const [worker, , , began, compute, transfer] = span, ends = began + compute + transfer;
      if (ends < from || !rows.has(worker)) continue;
      box(worker, began, began + transfer / 2, orange);
      box(worker, began + transfer / 2, ends - transfer / 2, blue);
      box(worker, ends - transfer / 2, ends, orange);
      if (this.mouse) {
        const [mx, my] = this.mouse, y = rows.get(worker);
        if (mx >= x(began) && mx <= x(ends) && my >= y && my <= y + ROW) under = span;
      }
    }
    for (const lane of lanes) {
      if (lane.state === "lost" || lane.state === "gone") box(lane.worker, Math.max(lane.since, from), this.now, `${red}55`);
      else if (lane.slot && this.training) box(lane.worker, Math.max(lane.since, last.get(lane.worker) ?? from), this.now, `${blue}66`);
    }
    pen.restore();
    this.ticks(pen, shown, x, height, width, quiet);
    this.say(under);
  }

  ticks(pen, shown, x, height, width, quiet) {
    const steps = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200];
    const step = steps.find((s) => shown / s <= Math.max(2, width / 110)) ?? 86400;
    pen.fillStyle = quiet;
    for (let back = 0; back <= shown; back += step) {
      const text = back === 0 ? "now" : `\u2212${step < 1 ? back.toFixed(1) : back} s`;
      pen.textAlign = back === 0 ? "right" : "center";
      const at = x(this.now - back);
      if (at - pen.measureText(text).width / 2 > x(this.now - shown)) pen.fillText(text, at, height - AXIS / 2 + 3);
    }
    pen.textAlign = "left";
  }

  say(span) {
    if (!span) return this.tell("");
    const [worker, slot, round, , compute, transfer] = span;
    return this.tell(`worker ${worker}, slot ${slot}, round ${round}: ${seconds(compute)} compute, ${seconds(transfer)} transfer`);
  }
}

function fitted(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let cut = text;
  while (cut.length > 1 && pen.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}
