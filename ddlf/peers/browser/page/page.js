// The page of a peer: join, choose data, look at them, train, and try the model. The training itself runs in a worker.

import { Camera } from "./camera.js";
import { Chart } from "./chart.js";
import { classCount, classOf, counted, fitArrays, needsOf } from "../engine/data/fit.js";
import { bytes, decimal, percent, plural, rate, time, whole } from "./format.js";
import { readNpz } from "../engine/data/npz.js";
import { Peer } from "./peer.js";
import { dropped, gathered, MOST_FILE_BYTES, MOST_PIXELS, paint, Pictures, pictureShape, whiteOf } from "./pictures.js";
import { named, Refused } from "../engine/refused.js";
import { join, readGraph, takeCode } from "./session.js";
import { forget, keep, kept, mark, marked } from "./store.js";
import { Trial } from "./trial.js";

const byId = (id) => document.getElementById(id), MOST_SHOWN = 24, MOST_LINES = 500;
const ENDED = ["over", "ended", "failed"];
const DOING = {
  connecting: "Connecting to the server.", measuring: "Measuring whether processor or graphics card is faster.", training: "Training on your data.",
  waiting: "Waiting for the others of this round.", paused: "Paused. Nothing is computed and nothing is sent.",
  lost: "The server does not answer. This page tries again by itself.",
  over: "The training is over. This model has the work of all.", ended: "This browser has left the training.", failed: "The training has stopped here.",
};

let model = null, needs = null, white = 1, pictures = null, chosen = null, peer = null, state = "connecting", charts = null;

// -- words on the page ------------------------------------------------------------------------------------------------

// Begin with a capital, except a file's name, and end with a full stop.
function sentence(text) {
  const begun = /^[a-z]+[\s,]/.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
  return !begun || /[.!?]$/.test(begun) ? begun : `${begun}.`;
}

function fail(why, hint = "") {
  byId("problem").hidden = false;
  byId("why").textContent = sentence(why);
  byId("hint").textContent = sentence(hint);
  byId("problem").scrollIntoView({ block: "nearest" });
}

const cleared = () => { byId("problem").hidden = true; };
const failed = (error) => fail(error.message, error.hint ?? "");

// Run an act of the person, and say what went wrong.
const safely = (act) => async (...given) => {
  cleared();
  try {
    return await act(...given);
  } catch (error) {
    if (!(error instanceof Refused)) error.hint = "Reload this page. If it happens again, tell the owner of the server.";
    return failed(error);
  }
};

function setState(next, why) {
  state = next;
  byId("state").textContent = next;
  byId("state").dataset.state = next;
  byId("doing").textContent = `${DOING[next] ?? ""} ${sentence(why ?? "")}`.trim();
  const isOver = ENDED.includes(next);
  for (const id of ["pause", "stop", "share"]) byId(id).disabled = isOver;
  byId("pause").textContent = next === "paused" ? "Resume" : "Pause";
}

const isLent = () => model.plan?.shards > 0; // the server gives each peer a part of its own data
const runOf = ({ run, name }) => run ?? name;
const nameOf = (number) => needs.classes[number] ?? `${number}`;

function items(list, texts) {
  byId(list).replaceChildren(...texts.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
}

function note(text, isWarning = false) {
  byId("notes").append(Object.assign(document.createElement("li"), { textContent: text, className: isWarning ? "warn" : "" }));
}

// -- the model ---------------------------------------------------------------------------------------------------------

function described() {
  const shape = pictureShape(needs), count = classCount(needs), sizes = needs.input.join(" × ");
  const what = shape ? `pictures of ${shape.width} × ${shape.height} points in ${shape.channels === 1 ? "grey" : "colour"}; larger ones are made smaller here` : `samples of ${sizes} numbers`;
  const classes = !count ? "" : needs.classes.length ? ` It tells ${count} classes apart: ${named(needs.classes, 12)}.` : ` It tells ${count} classes apart, with the numbers 0 to ${count - 1}.`;
  byId("needs").textContent = `The model learns from ${what}.${classes}`;
  document.body.classList.toggle("no-pictures", !shape || !count);
  if (!shape) byId("drop-text").replaceChildren(Object.assign(document.createElement("b"), { textContent: "Drop a .npz file with x and y here" }));
  byId("label").replaceChildren(new Option("choose a class", ""), ...[...Array(count).keys()].map((number) => new Option(nameOf(number), nameOf(number))));
  if (shape && count) {
    pictures = new Pictures(needs, white);
    new Camera({ count, nameOf, fail, take: safely((source, number) => {
      byId("notes").replaceChildren();
      pictures.add(pictures.values(source), number);
      showPictures();
    }) });
  }
}

// -- data ---------------------------------------------------------------------------------------------------------------

// Ask for the class of pictures that are in no folder. Return an empty text if they are left out.
function askedClass(count) {
  const dialog = byId("which"), select = byId("label");
  byId("which-text").textContent = count === 1 ? "This picture is in no folder, so its class is unknown." : `These ${whole(count)} pictures are in no folder, so their class is unknown.`;
  select.value = dialog.returnValue = "";
  dialog.showModal();
  select.focus();
  return new Promise((resolve) => { dialog.onclose = () => resolve(dialog.returnValue === "take" ? select.value : ""); });
}

async function readFiles(files) {
  byId("notes").replaceChildren();
  if (!files.length) return;
  const { found, others } = gathered(files), archives = others.filter(({ path }) => path.endsWith(".npz"));
  if (archives.length) {
    if (archives.length + found.length > 1) throw new Refused("one .npz file at a time can be read", "choose a single file");
    await readArchive(archives[0].file);
    return;
  }
  if (!found.length) throw new Refused(`there are no pictures among ${plural(others.length, "file")}`, "choose PNG, JPEG, GIF, WebP or BMP files, or one .npz file");
  if (!pictures) throw new Refused("this model does not learn from pictures", "choose a .npz file with x and y");
  const single = found.filter(({ label }) => label === null), label = single.length ? await askedClass(single.length) : "";
  const withLabels = found.map((one) => ({ ...one, label: one.label ?? label })).filter((one) => one.label);
  if (single.length && !label) note(`${plural(single.length, "picture")} left out: you chose no class.`);
  if (!withLabels.length) return;
  const { unreadable, large, unknown } = await pictures.read(withLabels, (done, all) => { byId("reading").textContent = `Reading picture ${whole(done + 1)} of ${whole(all)}`; });
  byId("reading").textContent = "";
  const those = (paths) => named(paths.map((path) => path.split("/").at(-1)));
  if (large.length) note(`${whole(large.length)} of ${plural(found.length, "picture")} have more than ${MOST_PIXELS / 1e6} million points or ${bytes(MOST_FILE_BYTES)}: ${those(large)}. Make them smaller.`, true);
  if (unreadable.length) note(`${whole(unreadable.length)} of ${plural(found.length, "picture")} could not be read: ${those(unreadable)}.`, true);
  if (unknown.length) {
    const labels = [...new Set(unknown.map((one) => one.label))];
    const known = needs.classes.length ? `the classes are ${named(needs.classes, 10)}` : `the server has agreed on no names, so a folder's name is a number from 0 to ${classCount(needs) - 1}`;
    note(`${whole(unknown.length)} of ${plural(found.length, "picture")} have a label that this model does not know (${named(labels)}): ${known}.`, true);
  }
  if (others.length) note(`${plural(others.length, "other file")} left out.`);
  if (!pictures.numbers.length) throw new Refused("none of these pictures can be used", "the lines below say why");
  showPictures();
}

async function readArchive(file) {
  byId("reading").textContent = `Reading ${file.name}`;
  try {
    if (file.size > 2 ** 30) throw new Refused(`${file.name} is larger than 1 GiB`, "save a part of the samples");
    const fitted = fitArrays(await readNpz(await file.arrayBuffer(), file.name), needs, file.name);
    forgetPictures();
    const top = fitted.data.inputs[0].data.reduce((most, value) => Math.max(most, value), 0);
    if (pictures && white === 1 && top > 16) note(`The values go up to ${top}, and this model wants about 0 to 1. Divide them by ${top > 255 ? top : 255}.`, true);
    fitted.notes.forEach((one) => note(sentence(one)));
    show(fitted);
  } finally {
    byId("reading").textContent = "";
  }
}

function forgetPictures() {
  if (pictures) pictures = new Pictures(needs, white);
}

function showPictures() {
  if (pictures.numbers.length < 2) {
    byId("seen").hidden = true;
    note("There is one picture. Training needs more.", true);
    return;
  }
  show(pictures.fitted());
}

function show(fitted) {
  chosen = fitted;
  const { inputs: [inputs], labels: [labels] } = fitted.data, count = inputs.shape[0], held = fitted.test?.inputs[0].shape[0] ?? 0;
  byId("seen").hidden = false;
  byId("counts").textContent = `${plural(count, "sample")} for training${held ? `, and ${whole(held)} held out to test the model` : ""}. ${count === 1 ? "It stays" : "They stay"} in this browser.`;
  const counts = counted(labels, needs), present = counts.filter((n) => n > 0).length;
  byId("classes").replaceChildren(...counts.map((n, number) => {
    const item = Object.assign(document.createElement("li"), { textContent: nameOf(number) });
    item.append(Object.assign(document.createElement("b"), { textContent: whole(n) }));
    return item;
  }).slice(0, 40));
  if (present === 1) note(`All samples have the label ${nameOf(counts.findIndex((n) => n > 0))}. From one class alone a model learns little: add another, or train with others who have it.`, true);
  const shape = pictureShape(needs), size = inputs.data.length / count, step = Math.max(1, Math.floor(count / MOST_SHOWN));
  const rows = [...Array(count).keys()].filter((n) => n % step === 0).slice(0, MOST_SHOWN);
  byId("samples").hidden = !shape;
  if (shape) byId("samples").replaceChildren(...rows.map((row) => {
    const item = document.createElement("li"), canvas = document.createElement("canvas"), name = classCount(needs) ? nameOf(classOf(labels, row, needs)) : `sample ${row + 1}`;
    paint(canvas, inputs.data.subarray(row * size, (row + 1) * size), shape, white);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `A picture with the label ${name}`);
    item.append(canvas, Object.assign(document.createElement("span"), { textContent: name, title: name }));
    return item;
  }));
  setState("ready");
  warnOfOtherTab();
}

// -- other tabs: they have the cookie, too, so they are the same peer ------------------------------------------------------

const TRAINS = "ddlf-peer-trains";

async function otherTrains() {
  const { held = [] } = (await navigator.locks?.query()) ?? {};
  return held.some(({ name }) => name === TRAINS);
}

async function warnOfOtherTab() {
  if (!peer && await otherTrains()) note("Another tab of this browser trains already. It ends if you start here: both are the same peer.", true);
}

let release = () => {};
const tellOtherTabs = () => navigator.locks?.request(TRAINS, { mode: "shared" }, () => new Promise((resolve) => { release = resolve; }));

// -- training -----------------------------------------------------------------------------------------------------------

const listeners = {
  state: ({ state: next, why }) => {
    setState(next, why);
    if (marked()) remember();
    if (ENDED.includes(next)) {
      forget();
      mark(null);
      release();
    }
  },
  progress,
  line({ text }) {
    const log = byId("log");
    log.append(Object.assign(document.createElement("li"), { textContent: text }));
    if (log.children.length > MOST_LINES) log.firstChild.remove();
  },
  failed({ why, hint }) {
    mark(null);
    release();
    setState("failed");
    fail(why, hint);
  },
};

function tile(name, value, more = "") {
  const box = document.createElement("div"), text = Object.assign(document.createElement("dd"), { textContent: value });
  if (more) text.append(Object.assign(document.createElement("small"), { textContent: more }));
  box.append(Object.assign(document.createElement("dt"), { textContent: name }), text);
  return box;
}

let joined = null;
const USUAL_DELTA = 1e-5; // of a plan that names none

function leaves(bytesUp, posts, code) {
  const codec = model.plan.codec ?? "float32", rounded = codec === "float32" ? "" : `, rounded to ${codec} (2 bytes each)`;
  const what = model.plan.secure_aggregation ? "what the model has learned here, under random masks" : `the weights of the model${rounded}`;
  const weights = `${whole(joined.parameters || parameterCount())} numbers, ${what}, were sent ${plural(posts, "time")}: ${bytes(bytesUp)} in all.`;
  const name = "The name that you typed, if you typed one.", metrics = model.visible.metrics ? "the loss and the accuracy" : "";
  const before = `${model.visible.before}${code ? ` If another peer sees the same code, nobody stands between you: ${code}.` : ""}`;
  const count = isLent() ? "" : `how many samples you have (${whole(chosen.data.inputs[0].shape[0])})`, also = [count, metrics].filter(Boolean).join(", ");
  return [weights, ...(before ? [before] : []), ...(also ? [`With them: ${also}.`] : []), name];
}

// Show who sees the updates and samples of this browser. The server's table has the words.
function showVisible({ samples, update, rows, remains }) {
  const cell = (kind, textContent) => Object.assign(document.createElement(kind), { textContent });
  byId("who-rows").replaceChildren(...rows.map(([party, ...sights]) => {
    const row = document.createElement("tr"), head = cell("th", party);
    head.scope = "row";
    row.append(head, ...sights.map((sight) => cell("td", sight)));
    return row;
  }));
  const whose = isLent() ? "The samples of the server" : `Your ${pictures ? "pictures" : "samples"} and their labels`;
  byId("who-samples").textContent = `${whose}: ${samples}.`;
  byId("who-updates").textContent = `Your updates leave this browser. ${update}`;
  byId("who-more").textContent = remains;
  byId("who").hidden = false;
}

function stays(wanted) {
  const tried = "What you draw, photograph or choose below to try the model.", computing = `All computing. ${whyDevice(joined, wanted)}`;
  if (isLent()) return [`Your own files: none is read. The server has sent ${plural(chosen.data.inputs[0].shape[0], "sample")} of its own, part ${joined.shard} of ${whole(model.plan.shards)}.`, tried, computing];
  return [
    `Your ${plural(chosen.data.inputs[0].shape[0] + (chosen.test?.inputs[0].shape[0] ?? 0), "sample")} and their labels: not one is sent.`, tried, computing,
    "A copy of your data in this browser's storage, so that a reload loses nothing. It is removed when you stop.",
  ];
}

function progress(told) {
  const { batches, batchesPerSecond, loss, accuracy, bytesUp, bytesDown, posts, merges, samples, seconds, code, epsilon } = told;
  charts.loss.add(batches, loss);
  charts.accuracy.add(batches, accuracy);
  byId("tiles").replaceChildren(
    tile("Batches/s", rate(batchesPerSecond), `on the ${device()}`), tile("Batches", whole(batches), time(seconds)),
    tile("Samples seen", whole(samples)), tile("Posts", whole(posts), "sets sent"),
    tile("Merges", whole(merges), "sets taken in"), tile("Sent", bytes(bytesUp)), tile("Received", bytes(bytesDown)),
    ...(model.plan.noise ? [tile("Epsilon", decimal(epsilon), `at delta ${(model.plan.delta ?? USUAL_DELTA).toExponential()}; lower protects more`)] : []),
  );
  items("leaves", leaves(bytesUp, posts, code));
}

const device = () => (joined?.device === "webgpu" ? "graphics card" : "processor");

function whyDevice({ device: taken, speeds = {} }, wanted) {
  if (wanted !== "auto") return `You chose the ${device()}.`;
  const [cpu, card] = [speeds.wasm, speeds.webgpu];
  if (card === undefined) return "This browser computes on the processor; it offers no graphics card (WebGPU).";
  return `The ${device()} is faster here: ${rate(taken === "webgpu" ? card : cpu)} batches a second, against ${rate(taken === "webgpu" ? cpu : card)}.`;
}

async function begin() {
  if (peer) return;
  const button = byId("start").querySelector("button"), wanted = byId("device").value;
  button.disabled = true;
  setState("connecting");
  try {
    await join();
    peer = new Peer((message) => listeners[message.told]?.(message));
    charts = {
      loss: new Chart(document.querySelectorAll("#train .chart")[0], { name: "Loss", show: decimal }),
      accuracy: new Chart(document.querySelectorAll("#train .chart")[1], { name: "Accuracy", show: percent, tick: (y) => `${Math.round(100 * y)} %`, top: 1 }),
    };
    joined = { device: wanted, parameters: parameterCount() };
    byId("choose").hidden = true;
    byId("train").hidden = false;
    byId("main").focus();
    progress({ batches: 0, batchesPerSecond: 0, loss: NaN, accuracy: NaN, bytesUp: 0, bytesDown: 0, posts: 0, merges: 0, samples: 0, seconds: 0, epsilon: -1 });
    tellOtherTabs();
    remember();
    if (!isLent()) await keep({ run: runOf(model), input: needs.input, chosen });
    joined = await peer.ask("join", { data: chosen?.data ?? null, test: chosen?.test ?? null, name: byId("name").value.trim(), device: wanted, share: Number(byId("share").value) / 100, seed: crypto.getRandomValues(new Uint32Array(1))[0] });
    if (isLent()) chosen = { data: joined.data, test: null };
    items("stays", stays(wanted));
    new Trial({ needs, pictures, count: classCount(needs), nameOf, fail, held: chosen.test ?? chosen.data, ask: (input) => peer.ask("predict", { inputs: [input] }) });
  } catch (error) {
    peer?.end();
    peer = null;
    if (isLent()) chosen = null;
    mark(null);
    release();
    byId("choose").hidden = false;
    byId("train").hidden = true;
    setState("ready");
    throw error;
  } finally {
    button.disabled = false;
  }
}

const remember = () => mark({ run: runOf(model), name: byId("name").value, device: byId("device").value, share: byId("share").value, isPaused: state === "paused" });

// Continue after a reload: with the data that this browser keeps, unless another tab trains.
async function goOn(last) {
  const doing = marked();
  if (doing?.run !== runOf(model) || !(isLent() || last) || await otherTrains()) return;
  for (const id of ["name", "device", "share"]) byId(id).value = doing[id];
  sayShare();
  if (last) show(last.chosen);
  await begin();
  if (doing.isPaused) await pause();
}

function sayShare() {
  const text = `${byId("share").value} %`;
  byId("share-value").textContent = text;
  byId("share").setAttribute("aria-valuetext", text);
}

async function pause() {
  await peer.ask(state === "paused" ? "resume" : "pause");
}

const parameterCount = () => model.graph.weights.reduce((sum, { shape }) => sum + shape.reduce((all, n) => all * n, 1), 0);

async function saveModel() {
  const { set } = await peer.ask("get"), url = URL.createObjectURL(new Blob([set], { type: "application/octet-stream" }));
  Object.assign(document.createElement("a"), { href: url, download: `${model.name || "model"}.safetensors` }).click();
  URL.revokeObjectURL(url);
}

function stop() {
  const dialog = byId("leave");
  dialog.returnValue = "";
  dialog.onclose = safely(async () => {
    if (dialog.returnValue !== "leave") return;
    byId("stop").disabled = true;
    await peer.ask("stop");
    await forget();
    release();
    if (!ENDED.includes(state)) setState("ended");
    byId("main").focus(); // the button that had the focus does nothing now
  });
  dialog.showModal();
}

// -- the page ------------------------------------------------------------------------------------------------------------

function theme() {
  const dark = matchMedia("(prefers-color-scheme: dark)"), set = () => { document.documentElement.dataset.theme = localStorage.getItem("theme") ?? (dark.matches ? "dark" : "light"); };
  dark.onchange = set;
  byId("theme").onclick = () => {
    localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    set();
  };
  set();
}

function choosing() {
  const taken = (input) => safely(async () => {
    const files = [...input.files].map((file) => [file, file.webkitRelativePath || file.name]);
    input.value = "";
    await readFiles(files);
  });
  byId("folder").onchange = taken(byId("folder"));
  byId("npz").onchange = taken(byId("npz"));
  byId("files").onchange = taken(byId("files"));
  const drop = byId("drop");
  for (const kind of ["dragenter", "dragover"]) drop.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", safely(async (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    await readFiles(await dropped(event.dataTransfer.items));
  }));
  byId("forget").onclick = safely(async () => {
    chosen = null;
    forgetPictures();
    byId("seen").hidden = true;
    byId("notes").replaceChildren();
    byId("again").hidden = true;
    await forget();
    byId(pictures ? "folder" : "npz").focus();
  });
  byId("start").onsubmit = (event) => { event.preventDefault(); return safely(begin)(); };
}

// A training with shards: there is nothing to choose.
function offerShard() {
  byId("subtitle").textContent = "This training uses data of the server, not yours.";
  byId("own").hidden = true;
  byId("lent").textContent = `This training is a study: the server lends each browser one of ${plural(model.plan.shards, "part")} of its own data. They come to this browser when you start, and go to another one when you have left. None of your files are read.`;
  for (const id of ["lent", "seen"]) byId(id).hidden = false;
  for (const id of ["look", "counts", "classes", "samples"]) byId(id).hidden = true;
  byId("tried").textContent = "A sample is one of the server's.";
  byId("sample").textContent = "A sample";
}

async function offerLast() {
  const last = await kept();
  if (last?.run !== runOf(model) || `${last.input}` !== `${needs.input}`) return null;
  byId("again").hidden = false;
  byId("again").onclick = safely(() => {
    byId("notes").replaceChildren();
    show(last.chosen);
  });
  return last;
}

byId("pause").onclick = safely(pause);
byId("stop").onclick = stop;
byId("save").onclick = safely(saveModel);
byId("share").oninput = sayShare;
byId("share").onchange = safely(({ target }) => { remember(); return peer.ask("share", { share: Number(target.value) / 100 }); });
addEventListener("beforeunload", (event) => { if (peer && !ENDED.includes(state)) event.preventDefault(); });
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => event.preventDefault()); // beside the field: a browser would leave the page

theme();
await safely(async () => {
  if (typeof WebAssembly === "undefined") throw new Refused("This browser cannot train: it has no WebAssembly.", "Use a current version of Firefox, Chrome, Edge or Safari.");
  takeCode();
  model = await readGraph();
  needs = needsOf(model);
  white = whiteOf(model.graph);
  byId("title").textContent = model.name ? `Train ${model.name} together` : "Train together";
  document.title = byId("title").textContent;
  described();
  choosing();
  const last = isLent() ? offerShard() : await offerLast();
  showVisible(model.visible);
  byId("choose").hidden = false;
  setState("ready");
  await warnOfOtherTab();
  await goOn(last);
})();
if (!needs) setState("failed");
