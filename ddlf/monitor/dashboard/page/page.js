// The page: one WebSocket, whose messages say what is new, and what is drawn of them once a frame.

import { Charts } from "./charts.js";
import { bytes, clock, duration, metric, rate, scaled, seconds, whole } from "./format.js";
import { showRecord } from "./record.js";
import { Timeline } from "./timeline.js";

const MOST_SPANS = 800, MOST_LINES = 500, LONGEST_PAUSE_S = 10;
const $ = (id) => document.getElementById(id);

// -- light and dark ---------------------------------------------------------------------------------------------------

const root = document.documentElement, prefersDark = matchMedia("(prefers-color-scheme: dark)");
const kept = (() => { try { return localStorage.getItem("ddlf-theme"); } catch { return null; } })();
root.dataset.theme = kept ?? (prefersDark.matches ? "dark" : "light");
function setTheme(theme) {
  root.dataset.theme = theme;
  charts.recolor();
  redraw();
}
$("theme").onclick = () => {
  setTheme(root.dataset.theme === "dark" ? "light" : "dark");
  try { localStorage.setItem("ddlf-theme", root.dataset.theme); } catch { /* it is forgotten, then */ }
};
prefersDark.onchange = () => { if (!kept) setTheme(prefersDark.matches ? "dark" : "light"); };

// -- what is known ----------------------------------------------------------------------------------------------------

const charts = new Charts($("charts"));
const timeline = new Timeline($("timeline"), (text) => { $("at-cursor").textContent = text; });
let known, ahead = 0, socket = null, pause = 1, answered = false;

function forget() {
  known = { about: {}, run: null, lanes: [], workers: [], series: { x: [], columns: {} }, peers: null, spans: [], log: [], newLines: 0, held: 0, over: false };
}
forget();
globalThis.ddlf = { known: () => known, reach: () => charts.reach() }; // for the console, and tests

function take(message) {
  if (message.about) { forget(); known.about = message.about; $("log").replaceChildren(); }
  ahead = message.now - Date.now() / 1000;
  known.held = message.held_s;
  known.over = known.over || message.over;
  if ("run" in message) known.run = message.run;
  if (message.lanes) known.lanes = message.lanes;
  if (message.workers) known.workers = message.workers;
  if (message.series) takeSeries(known.series, message.series);
  if (message.peers) takeSeries((known.peers ??= { x: [], columns: {} }), message.peers);
  else if (message.series) known.peers = null;
  if (message.spans) known.spans = [...(message.spans.more ? known.spans : []), ...message.spans.new].slice(-MOST_SPANS);
  if (message.log) {
    known.log = [...(message.log.more ? known.log : []), ...message.log.new].slice(-MOST_LINES);
    known.newLines += message.log.new.length;
  }
  redraw();
}

function takeSeries(series, { from, x, columns, ...more }) {
  Object.assign(series, more);
  series.x.length = from;
  series.x.push(...x);
  for (const name of Object.keys(series.columns)) if (from === 0 && !(name in columns)) delete series.columns[name];
  for (const [name, values] of Object.entries(columns)) {
    const column = (series.columns[name] ??= []);
    while (column.length < from) column.push(null);
    column.length = from;
    column.push(...values);
  }
}

// -- the way to the master ----------------------------------------------------------------------------------------------

function connect() {
  const token = location.hash.slice(1);
  if (!token) return notice("The token is missing: open the whole URL that the run has printed, with all behind the #.");
  const url = new URL("live", location.href);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  url.hash = "";
  answered = false;
  socket = new WebSocket(url, ["ddlf", token]);
  socket.onmessage = (event) => { answered = true; pause = 1; take(JSON.parse(event.data)); };
  socket.onclose = closed;
  return null;
}

async function closed() {
  socket = null;
  redraw();
  if (!answered) {
    const answer = await fetch("live", { headers: { Authorization: `Bearer ${location.hash.slice(1)}` } }).catch(() => null);
    if (answer && answer.status !== 426) return notice(await answer.text());
  }
  notice(known.over ? "The master has ended. This is what it showed last." : "The master does not answer; trying again.");
  setTimeout(connect, pause * 1000);
  pause = Math.min(pause * 1.6, LONGEST_PAUSE_S);
  return null;
}

onhashchange = () => { socket?.close(); pause = 1; if (!socket) connect(); };

function notice(text) {
  $("notice").hidden = !text;
  if ($("notice").textContent !== text) $("notice").textContent = text;
}

// -- stop ---------------------------------------------------------------------------------------------------------------

$("stop").onclick = () => $("ask").showModal();
$("ask").onclose = () => {
  if ($("ask").returnValue === "yes") socket?.send(JSON.stringify({ stop: true }));
  $("ask").returnValue = "";
};

// -- what is drawn ------------------------------------------------------------------------------------------------------

let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; draw(); });
}
setInterval(redraw, 1000);

const set = (id, text) => { if ($(id).textContent !== text) $(id).textContent = text; };

function draw() {
  const { run, about } = known, peers = known.lanes.some((lane) => lane.is_peer), now = record ? inlined.now : Date.now() / 1000 + ahead;
  if (socket && answered) notice(known.held ? `The master has been busy for ${known.held.toFixed(0)} s and does not answer; what is shown of the workers is older.` : "");
  const phase = record ? record.state : !socket && !known.over ? "lost" : run ? (run.stopping && run.phase === "training" ? "stopping" : run.phase) : answered ? "connected" : "connecting";
  set("phase", phase === "lost" ? "no connection" : phase);
  $("phase").className = `pill ${phase}`;
  set("title", record?.name || run?.app || about.title || "DDLF");
  const facts = run ? [run.mode, run.model && `${run.model}, ${whole(run.parameters)} parameters`, run.keras && `Keras ${run.keras}`,
    run.samples && `${whole(run.samples)} samples`, `batch ${run.batch_size}`, `seed ${run.seed}`] : [about.host && `master on ${about.host}`];
  set("subtitle", [...(record?.about ?? []), ...facts].filter(Boolean).join(" · ") || "a cluster without a run");
  document.title = record ? record.name : run ? `${share(run)}${run.app}` : "DDLF";
  const why = record?.why || run?.why || "";
  $("why").hidden = !(record ? why : why.includes("\n"));
  set("why", why);
  $("run").hidden = !run;
  if (run) drawRun(run, now);
  drawWorkers(run, now);
  drawLog();
  set("cluster-title", peers ? "Peers" : "Cluster");
  set("cluster-name", about.cluster || "");
  set("foot", about.version ? `DDLF ${about.version}, process ${about.pid} on ${about.host}` : "");
}

// The finished share of a run, and what follows it; nothing if nobody knows when the run ends.
const share = (run, then = " ") => (run.has_end ? `${Math.floor(run.done * 100)} %${then}` : "");

function drawRun(run, now) {
  const ended = run.ended !== null, training = run.phase === "training";
  $("stop").hidden = ended || !about("can_stop") || !socket;
  $("stop").disabled = run.stopping || !training;
  set("where", training || ended ? (!run.rounds ? `Update ${run.version}` : run.in_rounds ? `Round ${run.round} of ${run.rounds}` : `Update ${run.version}, round ${run.round} of ${run.rounds}`) : "Getting ready");
  set("doing", run.why.split("\n")[0] || (run.waiting_until ? `no workers left: the run ends in ${duration(run.waiting_until - now)} unless one returns` : [...run.doing, training && run.pass && `last pass: step ${metric(run.pass.step)}, loss ${metric(run.pass.loss)}`].filter(Boolean).join(", ")));
  const left = run.left_s === null ? "" : `, ${duration(run.left_s)} left`;
  set("times", `${share(run, ", ")}${duration((run.ended ?? now) - run.began)} ${ended ? "in all" : "so far"}${left}`);
  $("done").style.width = `${run.done * 100}%`;
  const tiles = [];
  for (const name of Object.keys(run.metrics).filter((n) => !/^(val|test)_/.test(n)).sort((a, b) => (b === "loss") - (a === "loss")).slice(0, 3)) {
    const test = run.metrics[`test_${name}`] ?? run.metrics[`val_${name}`];
    tiles.push([name, metric(run.metrics[name]), test === undefined ? "" : `${run.metrics[`test_${name}`] === undefined ? "val" : "test"} ${metric(test)}`]);
  }
  const spent = run.compute_s + run.transfer_s;
  if (run.trained) {
    tiles.push([ended ? "samples in all" : "samples in a second", ended ? scaled(run.trained) : rate(run.rate), ended ? rate(run.trained / Math.max(run.ended - run.began, 0.001)) : ""]);
    tiles.push(["sent", bytes(run.bytes_out), ""], ["received", bytes(run.bytes_back), ""]);
  }
  if (spent) tiles.push(["time computing", `${Math.round((100 * run.compute_s) / spent)} %`, `transfer ${Math.round((100 * run.transfer_s) / spent)} %`]);
  if (run.lost || run.rejected) tiles.push(["faults", whole(run.lost + run.rejected), `${run.lost} lost, ${run.rejected} rejected`]);
  if (run.checkpoint) tiles.push(["checkpoint", whole(run.checkpoint), ""]);
  $("tiles").hidden = !tiles.length;
  fill($("tiles"), tiles.length, () => {
    const tile = document.createElement("div");
    tile.innerHTML = "<dt></dt><dd><span></span><small></small></dd>";
    return tile;
  }, (tile, index) => {
    const [name, value, more] = tiles[index];
    text(tile.querySelector("dt"), name);
    text(tile.querySelector("span"), value);
    tile.classList.toggle("bad", value === "NaN");
    text(tile.querySelector("small"), more);
  });
  drawParts(run);
  const some = known.series.x.length > 0;
  $("charts").hidden = !some;
  if (some) charts.show(known.series, run.in_rounds, run.metrics, record?.marks, known.peers);
  $("timeline-card").hidden = !known.lanes.length || !(training || known.spans.length);
  if (!$("timeline-card").hidden) timeline.show(known.spans, known.lanes, now, training);
}

function drawParts({ parts, micro_batches: pieces }) {
  $("parts-card").hidden = !parts.length;
  set("parts-of", `${whole(pieces)} micro-batches of each batch`);
  const names = new Map(known.lanes.map((lane) => [lane.worker, lane.name]));
  fill($("parts"), parts.length, () => {
    const row = document.createElement("tr");
    row.innerHTML = "<td></td><td></td><td></td><td class='number'></td><td class='number'></td><td><div class='track'><div class='bar'></div></div></td>";
    return row;
  }, (row, index) => {
    const { layers, worker, nbytes, idle } = parts[index], cells = row.children;
    const shown = layers.length > 4 ? [...layers.slice(0, 2), "..", layers.at(-1)] : layers;
    [index + 1, shown.join(" "), names.get(worker) ?? "", bytes(nbytes), idle === null ? "" : `${Math.round(100 * idle)} %`].forEach((value, n) => text(cells[n], String(value)));
    cells[1].title = layers.join(" ");
    row.lastChild.title = idle === null ? "" : "computing in the last round";
    row.querySelector(".bar").style.width = idle === null ? "0" : `${100 * (1 - idle)}%`;
  });
}

const about = (name) => known.about[name];
const text = (element, value) => { if (element.textContent !== value) element.textContent = value; };

// As many children as wanted, each brought up to date: elements are kept, so nothing flickers and nothing leaks.
function fill(home, count, make, update) {
  while (home.children.length > count) home.lastChild.remove();
  while (home.children.length < count) home.append(make());
  for (let index = 0; index < count; index += 1) update(home.children[index], index);
}

function drawWorkers(run, now) {
  const lanes = new Map(known.lanes.map((lane) => [lane.worker, lane]));
  const asked = new Map(known.workers.map((worker) => [worker.worker, worker]));
  const numbers = [...new Set([...asked.keys(), ...lanes.keys()])].sort((a, b) => a - b);
  const rows = numbers.map((number) => {
    const lane = lanes.get(number) ?? {}, worker = asked.get(number) ?? {};
    return { number, lane, worker, ...doing(lane, worker, run, now) };
  });
  const severalHosts = new Set(known.lanes.map((lane) => lane.host).filter(Boolean)).size > 1;
  const tally = (how) => rows.filter((row) => row.how === how).length;
  set("counts", rows.length ? ["busy", "idle", "suspect", "lost", "gone"].map((how) => [tally(how), how]).filter(([n]) => n).map((pair) => pair.join(" ")).join(", ") : "no worker yet");
  fill($("workers"), rows.length, makeWorker, (card, index) => {
    const { number, lane, worker, how, words, share, since } = rows[index];
    card.className = `worker ${how}`;
    const [name, address, where, does, bar, facts] = card.parts;
    text(name, worker.name && worker.name !== worker.address ? worker.name : lane.name || `worker ${number}`);
    text(address, worker.address ?? "");
    text(where, place(lane, severalHosts));
    where.hidden = !where.textContent;
    text(does.firstChild, since === undefined ? "" : seconds(since));
    text(does.lastChild, words);
    does.title = words;
    bar.style.width = `${Math.round(share * 1000) / 10}%`;
    const memory = worker.memory, list = [];
    if (lane.rate && run?.phase === "training") list.push([rate(lane.rate), "samples"]);
    if (lane.updates) list.push([whole(lane.updates), lane.updates === 1 ? "update" : "updates"]);
    if (worker.cores) list.push([whole(worker.cores), worker.cores === 1 ? "core" : "cores"]);
    if (memory?.used) list.push([bytes(memory.used), "memory"]);
    for (const card of worker.cards ?? []) {
      if (card.utilisation !== null) list.push([`${card.utilisation} %`, `of card ${card.number}`]);
      if (card.memory !== null) list.push([bytes(card.memory), `on card ${card.number}`]);
      if (card.watts !== null) list.push([`${Math.round(card.watts)} W`, ""]);
      if (card.celsius !== null) list.push([`${card.celsius} °C`, ""]);
    }
    if (worker.sent !== undefined) list.push([bytes(worker.sent), "sent"], [bytes(worker.received), "received"]);
    const { done, backup, dropped } = lane.portions ?? {};
    if (done) list.push([whole(done), done === 1 ? "portion" : "portions"]);
    if (backup) list.push([whole(backup), "backup"]);
    if (dropped) list.push([whole(dropped), "dropped"]);
    if (worker.restarts) list.push([whole(worker.restarts), worker.restarts === 1 ? "restart" : "restarts"]);
    if (lane.lost) list.push([whole(lane.lost), lane.lost === 1 ? "time lost" : "times lost"]);
    card.title = memory?.total ? `${worker.host}: ${bytes(memory.free)} of ${bytes(memory.total)} memory free, Python ${worker.python}` : "";
    fill(facts, list.length, () => {
      const fact = document.createElement("span");
      fact.append(document.createElement("b"), "");
      return fact;
    }, (fact, at) => { text(fact.firstChild, list[at][0]); fact.lastChild.data = ` ${list[at][1]}`; });
  });
}

function makeWorker() {
  const card = document.createElement("div");
  card.innerHTML = "<div class='top'><b></b><span class='quiet'></span></div><p class='place quiet'></p><p class='does'><span class='quiet'></span><i></i></p><div class='track'><div class='bar'></div></div><div class='facts'></div>";
  card.parts = ["b", ".top .quiet", ".place", ".does", ".bar", ".facts"].map((part) => card.querySelector(part));
  return card;
}

// Where an engine runs a worker, and what became of the one before it.
function place({ host, engine, incarnation, left }, severalHosts) {
  const which = incarnation > 1 && `${incarnation}${["nd", "rd"][incarnation - 2] ?? "th"} worker here`;
  const parts = [engine, which && (left ? `${which}: ${reason(left)}` : which)].filter(Boolean);
  return parts.length || severalHosts ? [host && `on ${host}`, ...parts].filter(Boolean).join(", ") : "";
}

// The first line of a reason, without the worker's name: the card has it.
const reason = (why) => why.split("\n")[0].replace(/^worker \d+ \([^)]*\): /, "");

function doing(lane, worker, run, now) {
  if (lane.state === "gone") return { how: "gone", words: `excluded: ${reason(lane.why)}`, share: 0 };
  if (lane.state === "lost" || worker.state === "dead" || worker.state === "missing") {
    const why = reason(lane.why || worker.why || (worker.state === "missing" ? "it was not reached" : ""));
    if (lane.is_peer) return { how: "lost", words: `away: ${why}`, share: 0 };
    return { how: "lost", words: `lost${lane.state === "lost" ? ` ${duration(now - lane.since)} ago` : ""}${why && `: ${why}`}`, share: 0 };
  }
  if (worker.state === "suspect") return { how: "suspect", words: `silent for ${seconds(worker.silent_s)}`, share: lane.done ?? 0 };
  if (lane.is_peer) return { how: "busy", words: [`post ${lane.round}`, lane.loss !== null && `loss ${metric(lane.loss)}`].filter(Boolean).join(", "), share: 0 };
  if (lane.slot && run?.phase === "training") {
    const facts = [run.parts.length ? `part ${lane.slot}` : lane.slot !== lane.worker && `slot ${lane.slot}`, `round ${lane.round}`, (run.worker_epochs > 1 || run.worker_steps) && lane.epoch && `epoch ${lane.epoch}`, lane.loss !== null && `loss ${metric(lane.loss)}`];
    return { how: "busy", words: facts.filter(Boolean).join(", "), since: now - lane.since, share: lane.done ?? 0 };
  }
  if (lane.doing) return { how: "busy", words: lane.doing, share: 0 };
  if (run?.phase === "training") return { how: "idle", words: "waits", share: 0 };
  if (worker.busy) return { how: "busy", words: `busy with ${worker.busy.method}`, since: worker.busy.seconds, share: 0 };
  if (worker.executor && worker.executor !== "ready") return { how: "suspect", words: `executor ${worker.executor}`, share: 0 };
  return { how: "idle", words: "idle", share: 0 };
}

function drawLog() {
  const list = $("log");
  $("log-card").hidden = !known.log.length;
  if (!known.newLines) return;
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 30;
  for (const [at, level, who, what] of known.log.slice(-known.newLines)) {
    const line = document.createElement("li");
    line.className = level;
    const time = document.createElement("time"), words = document.createElement("span");
    time.textContent = clock(at);
    words.className = "text";
    words.textContent = what;
    line.append(time);
    if (who) {
      const name = document.createElement("span");
      name.className = "who";
      name.textContent = who;
      line.append(name);
    }
    line.append(words);
    list.append(line);
  }
  known.newLines = 0;
  while (list.children.length > MOST_LINES) list.firstChild.remove();
  if (atEnd) list.scrollTop = list.scrollHeight;
}

// -- a report: the state of a run that is over is in the page itself, and there is nobody to ask ----------------------------

const inlined = JSON.parse($("state")?.textContent ?? "null"), record = inlined?.record;
if (record) {
  take(inlined);
  showRecord($("record"), record);
  $("cluster").hidden = true;
  document.body.className = "report";
} else addEventListener("load", connect);
