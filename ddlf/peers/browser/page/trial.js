// Try the model: a drawing, a picture or a held-out sample, and the classes with their probabilities.

import { classOf } from "../engine/data/fit.js";
import { percent } from "./format.js";
import { paint } from "./pictures.js";

const byId = (id) => document.getElementById(id), MOST_GUESSES = 5;

// Return a probability for each class, whatever the output: probabilities, logits, or one unit for two classes.
export function probabilities(values, count) {
  const all = Array.from(values);
  if (all.length === 1 && count === 2) {
    const p = all[0] >= 0 && all[0] <= 1 ? all[0] : 1 / (1 + Math.exp(-all[0]));
    return [1 - p, p];
  }
  if (all.every((p) => p >= 0) && Math.abs(all.reduce((sum, p) => sum + p, 0) - 1) < 1e-3) return all;
  const top = Math.max(...all), raised = all.map((x) => Math.exp(x - top)), sum = raised.reduce((a, b) => a + b, 0);
  return raised.map((x) => x / sum);
}

export class Trial {
  #isDrawing = false; #last = null; #asked = 0; #row = 0;

  // `ask` returns the outputs for one sample. `pictures` is null if the model takes no pictures.
  constructor({ needs, pictures, count, nameOf, ask, held, fail }) {
    Object.assign(this, { needs, pictures, count, nameOf, ask, held, fail });
    byId("sample").onclick = () => this.sample();
    if (!pictures) return;
    this.pad = byId("pad");
    this.context = this.pad.getContext("2d", { willReadFrequently: true });
    this.clear();
    byId("clear").onclick = () => this.clear();
    byId("picture").onchange = ({ target }) => this.picture(target);
    this.pad.onpointerdown = (event) => {
      this.pad.setPointerCapture(event.pointerId);
      if (!this.#isBlank) this.clear();
      this.#isDrawing = true;
      this.#last = null;
      this.stroke(event);
    };
    this.pad.onpointermove = (event) => this.#isDrawing && this.stroke(event);
    this.pad.onpointerup = this.pad.onpointercancel = () => {
      if (this.#isDrawing) this.drawn();
      this.#isDrawing = false;
    };
  }

  #isBlank = true;

  clear() {
    Object.assign(this.pad, { width: 280, height: 280 });
    this.context.fillStyle = "#000";
    this.context.fillRect(0, 0, 280, 280);
    this.#isBlank = true;
    this.#asked += 1;
    byId("guesses").replaceChildren();
  }

  stroke({ clientX, clientY }) {
    const box = this.pad.getBoundingClientRect(), scale = 280 / box.width, point = [(clientX - box.left) * scale, (clientY - box.top) * scale];
    Object.assign(this.context, { lineWidth: 22, lineCap: "round", lineJoin: "round", strokeStyle: "#fff" });
    this.context.beginPath();
    this.context.moveTo(...(this.#last ?? point));
    this.context.lineTo(...point);
    this.context.stroke();
    this.#last = point;
  }

  // Place the drawing like the digits of MNIST: its longer side takes 20 of 28 parts, and it stands in the middle.
  async drawn() {
    const { data } = this.context.getImageData(0, 0, 280, 280);
    let [left, top, right, bottom] = [280, 280, -1, -1];
    for (let n = 0; n < 280 * 280; n++) {
      if (data[4 * n] < 40) continue;
      const [x, y] = [n % 280, Math.floor(n / 280)];
      [left, top, right, bottom] = [Math.min(left, x), Math.min(top, y), Math.max(right, x), Math.max(bottom, y)];
    }
    if (right < 0) return;
    const placed = Object.assign(document.createElement("canvas"), { width: 280, height: 280 }), context = placed.getContext("2d");
    const [wide, high] = [right - left + 1, bottom - top + 1], scale = 200 / Math.max(wide, high);
    context.fillRect(0, 0, 280, 280);
    context.drawImage(this.pad, left, top, wide, high, 140 - (wide * scale) / 2, 140 - (high * scale) / 2, wide * scale, high * scale);
    await this.guess(this.pictures.values(placed), (best) => `The model reads your drawing as ${best}.`);
    this.#isBlank = false;
  }

  async picture(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      const values = await this.pictures.decoded(file);
      this.show(values);
      await this.guess(values, (best) => `The model takes this picture for ${best}.`);
    } catch {
      this.fail(`The picture ${file.name} cannot be read.`, "Choose a PNG, JPEG, GIF or WebP file.");
    }
  }

  show(values) {
    this.#isBlank = false;
    paint(this.pad, values, this.pictures.shape, this.pictures.white);
  }

  async sample() {
    const { inputs: [{ data, shape }], labels: [labels] } = this.held, size = data.length / shape[0], row = (this.#row += 7) % shape[0];
    const values = data.slice(row * size, (row + 1) * size);
    if (this.pictures) this.show(values);
    const truth = this.count ? this.nameOf(classOf(labels, row, this.needs)) : Array.from(labels.data.subarray(row, row + 1), (x) => x.toPrecision(4)).join(", ");
    await this.guess(values, (best) => `The label of this sample is ${truth}. The model says ${best}.`);
  }

  async guess(values, sentence) {
    const mine = (this.#asked += 1);
    try {
      const { outputs } = await this.ask({ data: values, shape: [1, ...this.needs.input] });
      if (mine !== this.#asked) return;
      const output = Array.isArray(outputs) ? outputs[0] : outputs;
      if (!this.count) {
        byId("verdict").textContent = sentence(Array.from(output.data ?? output, (x) => x.toPrecision(4)).slice(0, 8).join(", "));
        return;
      }
      const parts = probabilities(output.data ?? output, this.count).map((part, number) => [part, this.nameOf(number)]).sort((a, b) => b[0] - a[0]);
      byId("verdict").textContent = sentence(`${parts[0][1]} (${percent(parts[0][0])})`);
      byId("guesses").replaceChildren(...parts.slice(0, MOST_GUESSES).map(([part, name]) => {
        const row = document.createElement("li"), bar = Object.assign(document.createElement("progress"), { max: 1, value: part });
        bar.setAttribute("aria-hidden", "true");
        row.append(Object.assign(document.createElement("span"), { textContent: name, title: name }), bar, Object.assign(document.createElement("span"), { textContent: percent(part) }));
        return row;
      }));
    } catch (error) {
      this.fail(error.message, error.hint);
    }
  }
}
