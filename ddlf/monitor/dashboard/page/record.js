// What only the report of a run has: where its time went, unusual events, tables, settings.

import { bytes, seconds, whole } from "./format.js";

const PARTS = { compute: "compute_s", transfer: "transfer_s", wait: "wait_s", lost: "away_s" };

// An element: make("p", "quiet", "text", other). Texts are never read as HTML.
function make(tag, className, ...inside) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...inside.filter((part) => part !== ""));
  return element;
}

function bar(parts, most) {
  const home = make("div", "bar");
  for (const [kind, size] of parts) {
    const part = make("i", kind);
    part.style.width = `${(100 * size) / most}%`;
    home.append(part);
  }
  return home;
}

function card(title, note, ...inside) {
  return make("section", "card", make("h2", "", title, " ", make("span", "quiet", note)), ...inside);
}

function grid(rows, head = true, className = "") {
  const [first, ...body] = rows;
  const isNumber = first.map((_, n) => n > 0 && body.every((row) => /^(?:|[-\d].*)$/.test(row[n])));
  const line = (tag, row) => make("tr", "", ...row.map((cell, n) => make(tag, isNumber[n] ? "number" : "", String(cell))));
  return make("div", `wide ${className}`, make("table", "", head ? make("thead", "", line("th", first)) : "", make("tbody", "", ...body.map((row) => line("td", row)))));
}

function copier(word, text) {
  const button = make("button", "", word);
  button.type = "button";
  button.onclick = () => {
    const area = make("textarea", "copied");
    area.value = text;
    document.body.append(area);
    area.select();
    button.textContent = document.execCommand("copy") ? "copied" : "could not copy"; // pages from the disk have no navigator.clipboard
    area.remove();
    setTimeout(() => { button.textContent = word; }, 1500);
  };
  return button;
}

function times(workers) {
  const sum = (worker) => Object.values(PARTS).reduce((all, name) => all + worker[name], 0);
  const most = Math.max(...workers.map(sum), 1e-9);
  const used = Object.entries(PARTS).filter(([, name]) => workers.some((worker) => worker[name] > 0.005 * most));
  const rows = workers.map((worker) => {
    const drawn = bar(used.map(([kind, name]) => [kind, worker[name]]), most);
    drawn.title = used.map(([kind, name]) => `${kind} ${seconds(worker[name])}`).join(", ");
    const facts = [`${Math.round((100 * worker.compute_s) / Math.max(sum(worker), 1e-9))} % compute`, bytes(worker.bytes_out + worker.bytes_back)];
    if (worker.lost) facts.push(`lost ${worker.lost}×`);
    return make("div", "share", make("span", "", worker.name), drawn, make("span", "quiet", facts.join(" · ")));
  });
  return card("Workers", "what each of them did with its time", make("p", "", ...used.map(([kind]) => make("span", `key ${kind}`, kind))), ...rows);
}

function staleness(counts) {
  const most = Math.max(...counts.map(([, count]) => count)), all = counts.reduce((sum, [, count]) => sum + count, 0);
  return card("Staleness", "merges between reading weights and applying the update", ...counts.map(([missed, count]) =>
    make("div", "share", make("span", "", String(missed)), bar([["compute", count]], most),
      make("span", "quiet", `${whole(count)} ${count === 1 ? "update" : "updates"}, ${Math.round((100 * count) / all)} %`))));
}

function pairs(title, head, rows) {
  return rows.length ? make("details", "card", make("summary", "", title), grid([head, ...rows])) : "";
}

export function showRecord(home, record) {
  const counts = Object.entries(record.counts).map(([kind, count]) => `${whole(count)} ${kind}`).join(", ");
  const faults = record.faults.map((fault) => [fault.at, fault.round ? `round ${fault.round}` : "", fault.kind, fault.text]);
  const [result, ...others] = record.tables.map((table, n) => {
    const shown = card(table.title, "", grid(table.rows, n > 0));
    shown.firstChild.append(make("span", "fill"), copier("CSV", table.csv), copier("LaTeX", table.latex));
    return shown;
  });
  home.append(
    record.workers.length ? times(record.workers) : "",
    record.staleness.length ? staleness(record.staleness) : "",
    card("Unusual events", counts, faults.length ? grid([["after", "", "what", ""], ...faults], true, "events") : make("p", "quiet", "None: no worker was lost, no update was rejected.")),
    make("div", "two", result, make("div", "stack", ...others,
      pairs("Settings and their origins", ["setting", "value", "from"], record.settings), pairs("Environment", ["what", "value"], record.environment))),
  );
  home.hidden = false;
}
