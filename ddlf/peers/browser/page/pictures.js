// Pictures and their labels: the name of its folder is the class of a picture. Pictures are read in this browser only.

import { asLabels, classCount, heldOut } from "../engine/data/fit.js";
import { Refused } from "../engine/refused.js";

export const MOST_PIXELS = 64e6, MOST_FILE_BYTES = 64 * 2 ** 20, MOST_VALUES = 2 ** 27;
const ENDINGS = /\.(png|jpe?g|gif|webp|bmp|avif)$/i;

// Return height, width and channels of the pictures that a model takes; null if its input is something else.
export function pictureShape({ input }) {
  const sizes = input.filter((n, axis) => !(n === 1 && axis === input.length - 1 && input.length === 3)); // a last axis of 1 is grey
  if (sizes.length === 3) return [1, 3].includes(sizes[2]) ? { height: sizes[0], width: sizes[1], channels: sizes[2] } : null;
  if (sizes.length === 2) return Math.min(...sizes) >= 4 ? { height: sizes[0], width: sizes[1], channels: 1 } : null;
  if (sizes.length !== 1) return null;
  for (const channels of [1, 3]) {
    const side = Math.sqrt(sizes[0] / channels);
    if (Number.isInteger(side) && side >= 8) return { height: side, width: side, channels };
  }
  return null;
}

// Return the value of white: 1, or 255 if the model scales bytes itself.
export function whiteOf(graph) {
  const first = graph.calls.find(({ inputs }) => inputs.includes(0)), layer = graph.layers.find(({ name }) => name === first?.layer);
  return layer?.kind === "Rescaling" && Math.abs(layer.config.scale) < 1 / 16 ? 255 : 1;
}

// Return {file, label} of each picture among files, and the other files. The label is the name of the innermost folder.
export function gathered(files) {
  const found = [], others = [];
  for (const [file, path] of files) {
    const parts = path.split("/"), name = parts.at(-1);
    if (name.startsWith(".") || name === "Thumbs.db") continue;
    (ENDINGS.test(name) ? found : others).push({ file, path, label: parts.length > 1 ? parts.at(-2) : null });
  }
  return { found, others };
}

// Return [file, path] of everything that was dropped, folders included.
export async function dropped(items) {
  const entries = [...items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean), files = [];
  const walk = async (entry) => {
    if (entry.isFile) files.push([await new Promise((resolve, reject) => entry.file(resolve, reject)), entry.fullPath.slice(1)]);
    else {
      const reader = entry.createReader();
      for (;;) { // it gives a hundred at a time
        const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
        if (!some.length) break;
        for (const one of some) await walk(one);
      }
    }
  };
  for (const entry of entries) await walk(entry);
  return files;
}

// Return the number of a class: by the agreed names, else the label is a number itself.
export function numberOf(label, needs) {
  if (label === null) return null;
  if (needs.classes.length) return needs.classes.includes(label) ? needs.classes.indexOf(label) : null;
  const number = /^\d{1,4}$/.test(label) ? Number(label) : -1;
  return number >= 0 && number < classCount(needs) ? number : null;
}

// Width and height that a file claims, before it is decoded; null if its kind is another one.
export function claimedSize(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  if (bytes.length > 24 && view.getUint32(0) === 0x89504e47) return [view.getUint32(16), view.getUint32(20)];
  if (bytes.length > 10 && view.getUint32(0) === 0x47494638) return [view.getUint16(6, true), view.getUint16(8, true)];
  if (bytes.length > 26 && view.getUint16(0) === 0x424d) return [view.getInt32(18, true), Math.abs(view.getInt32(22, true))];
  if (bytes.length > 4 && view.getUint16(0) === 0xffd8) {
    for (let at = 2; at + 9 < bytes.length && bytes[at] === 0xff; at += 2 + view.getUint16(at + 2)) {
      const mark = bytes[at + 1];
      if (mark >= 0xc0 && mark <= 0xcf && ![0xc4, 0xc8, 0xcc].includes(mark)) return [view.getUint16(at + 7), view.getUint16(at + 5)];
    }
  }
  return null;
}

class TooLarge extends Error {}

export class Pictures {
  // `needs` are those of the model, `white` is the value of white.
  constructor(needs, white) {
    Object.assign(this, { needs, white, shape: pictureShape(needs), pixels: [], numbers: [] });
    this.canvas = Object.assign(document.createElement("canvas"), { width: this.shape.width, height: this.shape.height });
    this.context = this.canvas.getContext("2d", { willReadFrequently: true });
  }

  // Return the model's values of anything that a canvas can draw: grey by the weights of ITU-R 601, and scaled.
  values(source) {
    const { width, height, channels } = this.shape, { context } = this;
    context.imageSmoothingQuality = "high";
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, height);
    context.drawImage(source, 0, 0, width, height);
    const bytes = context.getImageData(0, 0, width, height).data, result = new Float32Array(width * height * channels);
    for (let n = 0; n < width * height; n++) {
      const [red, green, blue] = [bytes[4 * n], bytes[4 * n + 1], bytes[4 * n + 2]], scale = this.white / 255;
      if (channels === 1) result[n] = (0.299 * red + 0.587 * green + 0.114 * blue) * scale;
      else result.set([red * scale, green * scale, blue * scale], 3 * n);
    }
    return result;
  }

  async decoded(file) {
    if (!file.size) throw new Error("empty");
    if (file.size > MOST_FILE_BYTES) throw new TooLarge();
    const size = claimedSize(new Uint8Array(await file.slice(0, 2 ** 18).arrayBuffer()));
    if (size && size[0] * size[1] > MOST_PIXELS) throw new TooLarge();
    if (size && !(size[0] * size[1] > 0)) throw new Error("empty");
    const { width, height } = this.shape;
    const bitmap = await createImageBitmap(file, { resizeWidth: width, resizeHeight: height, resizeQuality: "high" });
    try {
      return this.values(bitmap);
    } finally {
      bitmap.close();
    }
  }

  add(values, number) {
    if ((this.pixels.length + 1) * values.length > MOST_VALUES) throw new Refused("there are more pictures than this page can hold", "choose fewer pictures");
    this.pixels.push(values);
    this.numbers.push(number);
  }

  // Read pictures, and return what could not be used: unreadable ones, too large ones, and those whose label is not known.
  async read(found, tell = () => {}) {
    const unreadable = [], large = [], unknown = [];
    for (const [place, { file, path, label }] of found.entries()) {
      const number = numberOf(label, this.needs);
      if (number === null) unknown.push({ path, label });
      else {
        let values = null;
        try {
          values = await this.decoded(file);
        } catch (error) {
          (error instanceof TooLarge ? large : unreadable).push(path);
        }
        if (values) this.add(values, number);
      }
      if (place % 20 === 0) tell(place, found.length);
    }
    return { unreadable, large, unknown };
  }

  // Return the pictures for training and those that are held out: every fifth of each class, so that each class is tested.
  fitted() {
    const count = this.numbers.length, order = this.numbers.map((_, n) => n).sort((a, b) => this.numbers[a] - this.numbers[b] || a - b);
    if (count < 2) throw new Refused(count ? "there is one picture" : "there are no pictures", "training needs more: choose pictures of at least two classes");
    const size = this.pixels[0].length, data = new Float32Array(count * size);
    order.forEach((place, n) => data.set(this.pixels[place], n * size));
    const labels = asLabels(order.map((place) => this.numbers[place]), this.needs, [count, ...this.needs.output.slice(0, -1)]);
    const [train, test] = heldOut({ inputs: [{ data, shape: [count, ...this.needs.input] }], labels: [labels] });
    return { data: train, test, notes: [] };
  }
}

// Draw one sample of a model that takes pictures.
export function paint(canvas, values, { height, width, channels }, white = 1) {
  Object.assign(canvas, { width, height });
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  let [low, high] = [0, white];
  for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
  for (let n = 0; n < width * height; n++) {
    for (let channel = 0; channel < 3; channel++) {
      image.data[4 * n + channel] = (255 * (values[n * channels + (channels === 3 ? channel : 0)] - low)) / (high - low);
    }
    image.data[4 * n + 3] = 255;
  }
  context.putImageData(image, 0, 0);
}
