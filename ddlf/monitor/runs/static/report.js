"use strict";
const run = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const TONES = ["--a", "--b", "--c", "--d"];
const OF_TIMES = {whole: "--soft", computing: "--a", transfer: "--c", waiting: "--d"}; // as in the bars of the workers
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** An element: make("p", {class: "x"}, "text", other). Texts are never read as HTML. */
function make(tag, attributes, ...inside) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...inside.filter((part) => part !== null && part !== ""));
  return element;
}

function short(value, unit) {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value; // NaN
  if (unit === "B" || Math.abs(value) >= 1e5) {
    for (const [word, factor] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
      if (Math.abs(value) >= factor) return `${+(value / factor).toPrecision(3)} ${word}${unit}`;
  }
  const text = Math.abs(value) >= 1000 ? value.toFixed(0) : String(+value.toPrecision(4));
  return unit && unit !== "/s" ? `${text} ${unit}` : text;
}

const plots = [];

/** A chart whose curves each have their own places on the x axis. */
function chart(spec) {
  const joined = uPlot.join(spec.series.map((one) => [one.x, one.y]));
  const at = make("span", {class: "at"});
  const tone = (n) => OF_TIMES[spec.series[n].name] || TONES[n % TONES.length];
  const values = spec.series.map(() => make("b"));
  const keys = make("div", {class: "keys"}, ...spec.series.map((one, n) =>
    make("label", {style: `--tone: var(${tone(n)})`, title: "show or hide"},
      make("input", {type: "checkbox", checked: true, onchange: (event) => plot.setSeries(n + 1, {show: event.target.checked})}),
      make("i"), make("span", {}, one.name), values[n])), at);
  const place = make("div");
  const card = make("section", {class: "card chart"}, make("h3", {}, spec.title), keys, place);
  const few = joined[0].length <= 40;
  const axis = {stroke: () => css("--soft"), grid: {stroke: () => css("--grid"), width: 1}, ticks: {show: false}, font: "12px system-ui, sans-serif"};
  const marks = {hooks: {drawClear: [(u) => { // when workers were lost and came back
    const {ctx, bbox} = u;
    ctx.save();
    ctx.setLineDash([3, 4]);
    ctx.lineWidth = devicePixelRatio;
    for (const [x, kind] of run.marks) {
      const left = Math.round(u.valToPos(x, "x", true)) + 0.5;
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.strokeStyle = css(kind === "back" || kind === "joined" ? "--good" : "--bad");
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }]}};
  const tell = (index) => {
    at.textContent = index === null ? "" : `${spec.x} ${joined[0][index].toLocaleString("en")}`;
    values.forEach((value, n) => {
      let here = index === null ? spec.series[n].last : joined[n + 1][index];
      if (index !== null && here == null) { // this curve has no point just here: the one before
        const xs = spec.series[n].x;
        let before = xs.length - 1;
        while (before >= 0 && xs[before] > joined[0][index]) before--;
        here = before >= 0 ? spec.series[n].y[before] : null;
      }
      value.textContent = short(here, spec.unit);
    });
  };
  const size = () => ({width: Math.max(place.clientWidth, 200), height: window.innerWidth < 600 ? 190 : 230});
  let plot;
  const draw = () => {
    plot = new uPlot({
      ...size(),
      legend: {show: false},
      cursor: {y: false, sync: {key: "rounds", setSeries: false}, points: {size: 7}},
      scales: {x: {time: false, range: (u, low, high) => low === high ? [low - 1, high + 1] : [low, high]}},
      axes: [
        {...axis, size: 28, space: 60, values: (u, splits) => splits.map((v) => Number.isInteger(v) ? v.toLocaleString("en") : "")},
        {...axis, size: 62, space: 36, values: (u, splits) => splits.map((v) => short(v, spec.unit))},
      ],
      series: [{}, ...spec.series.map((one, n) => ({
        label: one.name, stroke: () => css(tone(n)), width: 2, spanGaps: true, dash: n === 1 && spec.unit === "B" ? [6, 5] : undefined,
        paths: spec.dots ? () => null : undefined,
        points: {show: spec.dots || few || one.x.length <= 40, size: 5, fill: () => css(tone(n))},
      }))],
      plugins: run.marks.length ? [marks] : [],
      hooks: {setCursor: [(u) => tell(u.cursor.idx ?? null)]},
    }, joined, place);
    tell(null);
    plots.push([plot, size]);
  };
  return [card, draw];
}

function copied(text) {
  const area = make("textarea", {style: "position: fixed; opacity: 0"});
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy"); // navigator.clipboard is not there for pages from the disk
  area.remove();
  return done;
}

function copier(word, text) {
  return make("button", {type: "button", onclick: (event) => {
    const button = event.currentTarget;
    button.textContent = copied(text) ? "copied" : "could not copy";
    setTimeout(() => { button.textContent = word; }, 1500);
  }}, word);
}

function grid(rows, options = {}) {
  const [head, ...body] = rows;
  const numeric = head.map((_, n) => n > 0 && body.every((row) => row[n] === "" || /^[-\d]/.test(row[n])) && !options.left);
  const cells = (tag, row) => row.map((cell, n) => make(tag, {class: numeric[n] ? "n" : null}, String(cell)));
  return make("div", {class: "scroll"}, make("table", {class: options.class || null},
    options.bare ? "" : make("thead", {}, make("tr", {}, ...cells("th", head))),
    make("tbody", {}, ...body.map((row) => make("tr", {}, ...cells("td", row))))));
}

// -- the page

document.body.className = run.state;
page.replaceChildren(make("header", {},
  make("h1", {}, run.name, make("span", {class: `badge ${run.state}`}, run.state)),
  make("div", {class: "facts"},
    ...[run.app, run.source, run.began && `began ${run.began}`, run.host && `on ${run.host}`, run.goes_on_from]
      .filter(Boolean).map((text) => make("span", {}, text))),
  run.why ? make("div", {class: `why ${run.state}`}, run.why) : ""));

page.append(make("section", {class: "tiles"}, ...run.tiles.map((tile) =>
  make("div", {class: "tile"}, make("b", {}, tile.value, tile.unit ? make("i", {}, tile.unit) : ""), make("span", {}, tile.what)))));

const drawing = [];
if (run.charts.length) {
  page.append(make("h2", {}, "Curves"));
  const charts = make("div", {class: "charts"});
  for (const spec of run.charts.filter((one) => one.series.some((curve) => curve.x.length))) {
    const [card, draw] = chart(spec);
    charts.append(card);
    drawing.push(draw);
  }
  page.append(charts, make("p", {class: "hint"}, "Drag over a chart to look closer, double-click for all of it." +
    (run.marks.length ? " Dashed lines are where a worker was lost, an update rejected or a number not finite (red), and where a worker came (green)." : "")));
} else {
  page.append(make("h2", {}, "Curves"), make("div", {class: "card empty"}, "No round was complete, so there are no curves."));
}

if (run.workers.length) {
  const parts = [["compute", "compute_s", "computing"], ["transfer", "transfer_s", "transfer"], ["wait", "wait_s", "waiting"], ["away", "away_s", "lost"]];
  const most = Math.max(...run.workers.map((worker) => parts.reduce((sum, [, key]) => sum + worker[key], 0)), 1e-9);
  const used = parts.filter(([, key]) => run.workers.some((worker) => worker[key] > 0.005 * most));
  page.append(make("h2", {}, "Workers", make("small", {}, "what each of them did with its time")),
    make("section", {class: "card"},
      make("div", {class: "keys"}, ...used.map(([kind, , word]) => make("label", {class: kind, style: "cursor: default"}, make("i"), word))),
      ...run.workers.map((worker) => {
        const seconds = (key) => `${short(worker[key], "s")}`;
        return make("div", {class: "lane"}, make("span", {}, worker.name),
          make("div", {class: "bar", title: used.map(([, key, word]) => `${word} ${seconds(key)}`).join(", ")},
            ...used.map(([kind, key]) => make("i", {class: kind, style: `width: ${(100 * worker[key]) / most}%`}))),
          make("em", {}, `${Math.round((100 * worker.compute_s) / Math.max(parts.reduce((sum, [, key]) => sum + worker[key], 0), 1e-9))}% computing` +
            ` · ${short(worker.bytes_out + worker.bytes_back, "B")}` + (worker.lost ? ` · lost ${worker.lost}×` : "")));
      })));
}

if (run.staleness.length) {
  const most = Math.max(...run.staleness.map(([, count]) => count));
  const all = run.staleness.reduce((sum, [, count]) => sum + count, 0);
  page.append(make("h2", {}, "Staleness", make("small", {}, "merges between an update's weights and itself")),
    make("section", {class: "card"}, ...run.staleness.map(([missed, count]) =>
      make("div", {class: "lane"}, make("span", {}, String(missed)),
        make("div", {class: "bar"}, make("i", {class: "compute", style: `width: ${(100 * count) / most}%`})),
        make("em", {}, `${count.toLocaleString("en")} update${count === 1 ? "" : "s"}, ${short((100 * count) / all)}%`)))));
}

page.append(make("h2", {}, "Out of the ordinary", make("small", {},
  Object.entries(run.counts).map(([kind, count]) => `${count.toLocaleString("en")} ${kind}`).join(", "))));
page.append(make("section", {class: "card"}, run.faults.length
  ? make("div", {class: "faults"}, make("table", {},
    make("thead", {}, make("tr", {}, ...["after", "round", "what", ""].map((word) => make("th", {}, word)))),
    make("tbody", {}, ...run.faults.map((fault) => make("tr", {},
      ...[fault.at, fault.round ? `round ${fault.round}` : "", fault.kind, fault.text].map((text) => make("td", {}, text)))))))
  : make("div", {class: "empty"}, "Nothing: no worker was lost, no update was rejected.")));

page.append(make("h2", {}, "Tables", make("small", {}, "to paste; also in tables/ beside this file")));
const [result, ...others] = run.tables.map((table, n) => make("section", {class: "card"},
  make("h3", {class: "row"}, make("span", {}, table.title), copier("CSV", table.csv), copier("LaTeX", table.latex)),
  grid(table.rows, {class: n ? "wide" : null, bare: !n})));

const pairs = (title, head, rows) => rows.length
  ? make("details", {class: "card"}, make("summary", {}, title), grid([head, ...rows], {left: true})) : "";
page.append(make("div", {class: "two"}, result, make("div", {class: "stack"}, ...others,
  pairs("Settings, and where each comes from", ["setting", "value", "from"], run.settings),
  pairs("Environment", ["what", "value"], run.environment))),
  make("footer", {}, "Made by DDLF from the run's own files. This page asks no other computer for anything."));

drawing.forEach((draw) => draw());
new ResizeObserver(() => plots.forEach(([plot, size]) => { const now = size(); if (now.width !== plot.width) plot.setSize(now); })).observe(page);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach(([plot]) => plot.redraw()));
