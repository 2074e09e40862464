// A curve that grows while the model trains, as SVG. A screen reader hears its last value.

const NAMESPACE = "http://www.w3.org/2000/svg", MOST = 400, HEIGHT = 170, LEFT = 54, BOTTOM = 22, TOP = 8, RIGHT = 22, HALF_LETTER = 4.5;

function element(kind, attributes, text = "") {
  const made = document.createElementNS(NAMESPACE, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

function steps(low, high, most) {
  const rough = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough), result = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) result.push(at);
  return result;
}

const short = (value) => Number(value.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 4, notation: Math.abs(value) >= 1e4 ? "compact" : "standard" });

// Each two neighbours become their mean, so that one batch of chance does not stay a peak.
const halved = (points) => points.flatMap(([x, y], n) => (n % 2 ? [[x, (points[n - 1][1] + y) / 2]] : []));

export class Chart {
  #points = [];

  // `figure` has an svg and a caption with an output. `top` is the largest value, if there is one.
  constructor(figure, { name, show, tick = short, top = null }) {
    Object.assign(this, { svg: figure.querySelector("svg"), value: figure.querySelector("output"), name, show, tick, top });
    new ResizeObserver(() => this.draw()).observe(figure);
  }

  add(x, y) {
    if (!Number.isFinite(y) || x <= (this.#points.at(-1)?.[0] ?? -1)) return;
    this.#points.push([x, y]);
    if (this.#points.length === 2 * MOST) this.#points = halved(this.#points);
    this.draw();
  }

  draw() {
    const points = this.#points, last = points.at(-1), width = Math.max(this.svg.clientWidth, 120);
    const highest = this.top ?? Math.max(...points.map(([, y]) => y), 1e-6) * 1.05, [from, to] = [points[0]?.[0] ?? 0, last?.[0] ?? 1];
    const left = (x) => LEFT + ((x - from) / (to - from || 1)) * (width - LEFT - RIGHT);
    const down = (y) => TOP + (1 - Math.min(y / highest, 1)) * (HEIGHT - TOP - BOTTOM);
    const parts = steps(0, highest, 4).flatMap((y) => [
      element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: down(y), y2: down(y) }),
      element("text", { class: "tick", x: LEFT - 6, y: down(y) + 4, "text-anchor": "end" }, this.tick(y)),
    ]);
    if (points.length > 1) {
      for (const x of steps(from, to, width / 110)) {
        const text = short(x), most = width - HALF_LETTER * text.length; // the last number is inside of the picture, too
        parts.push(element("text", { class: "tick", x: Math.min(left(x), most), y: HEIGHT - 5, "text-anchor": "middle" }, text));
      }
      const line = points.map(([x, y]) => `${left(x).toFixed(1)},${down(y).toFixed(1)}`);
      parts.push(element("polygon", { class: "area", points: [`${left(from)},${down(0)}`, ...line, `${left(to)},${down(0)}`].join(" ") }));
      parts.push(element("polyline", { class: "curve", points: line.join(" ") }));
    }
    if (last) parts.push(element("circle", { class: "newest", cx: left(last[0]), cy: down(last[1]), r: 4 }));
    this.svg.replaceChildren(...parts);
    this.value.textContent = last ? this.show(last[1]) : "";
    this.svg.setAttribute("aria-label", last ? `${this.name}: ${this.show(last[1])} after ${last[0].toLocaleString("en")} batches` : `${this.name}: no value yet`);
  }
}
