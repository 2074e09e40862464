// What a peer needs to come back after a reload, in this browser's IndexedDB: one record per run. It never leaves the browser.

const NAME = "ddlf-peers", TABLE = "peers";

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function table(mode) {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(TABLE);
  const database = await done(request);
  return { rows: database.transaction(TABLE, mode).objectStore(TABLE), close: () => database.close() };
}

async function act(mode, what) {
  const { rows, close } = await table(mode);
  try {
    return await what(rows);
  } finally {
    close();
  }
}

// Return the record of a run; null without one, or in a browser that keeps none, as in a private window.
export async function load(run) {
  try {
    return (await act("readonly", (rows) => done(rows.get(run)))) ?? null;
  } catch {
    return null;
  }
}

// Keep the record of a run, and forget those of others. Return whether it worked.
export async function keep(run, record) {
  try {
    await act("readwrite", async (rows) => {
      for (const other of await done(rows.getAllKeys())) if (other !== run) await done(rows.delete(other));
      await done(rows.put(record, run));
    });
    return true;
  } catch {
    return false;
  }
}
