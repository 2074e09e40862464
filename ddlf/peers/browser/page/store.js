// Keeps the data of a training in this browser's own storage, so that a reload needs no new choice. Nothing of it travels.

const NAME = "ddlf-page", TABLE = "data", KEY = "last";

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
