// Keeps the data of a training in this browser's own storage, so that a reload needs no new choice, and remembers in this
// tab that it trains. Nothing of it travels.

const NAME = "ddlf-page", TABLE = "data", KEY = "last", MARK = "ddlf-trains", CODE = "ddlf-code";

function opened() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(TABLE);
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

// Do one thing with the table. A browser without storage, or a full one, keeps nothing: then this returns null.
async function within(mode, act) {
  try {
    const base = await opened();
    try {
      return await new Promise((resolve, reject) => {
        const asked = act(base.transaction(TABLE, mode).objectStore(TABLE));
        asked.onsuccess = () => resolve(asked.result ?? null);
        asked.onerror = () => reject(asked.error);
      });
    } finally {
      base.close();
    }
  } catch {
    return null;
  }
}

export const keep = (value) => within("readwrite", (table) => table.put(value, KEY));
export const kept = () => within("readonly", (table) => table.get(KEY));
export const forget = () => within("readwrite", (table) => table.delete(KEY));

// What this tab does: {run, name, device, share, isPaused} while it trains, or null. A reload keeps it, another tab has its own.
export function mark(doing) {
  try {
    if (doing) sessionStorage.setItem(MARK, JSON.stringify(doing));
    else sessionStorage.removeItem(MARK);
  } catch { /* a browser without storage begins anew after a reload */ }
}

// The code of the link that this tab was opened with; empty without one, or when it is used.
let code = "";

export function keepCode(next) {
  code = next;
  try {
    if (next) sessionStorage.setItem(CODE, next);
    else sessionStorage.removeItem(CODE);
  } catch { /* a browser without storage needs the link again after a reload */ }
}

export function keptCode() {
  try {
    return code || sessionStorage.getItem(CODE) || "";
  } catch {
    return code;
  }
}

export function marked() {
  try {
    return JSON.parse(sessionStorage.getItem(MARK));
  } catch {
    return null;
  }
}
