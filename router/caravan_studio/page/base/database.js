/** The browser's database, which all tabs share. Where the browser forbids it, records last as long as the page. */

const NAME = "caravan";
const VERSION = 1;
// The stores, each with the fields by which records are found.
const STORES = { conversations: [], nodes: ["conversation", "status"] };

let opened = null;

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** Returns the database, or null where there is none. */
function database() {
  opened ??= (async () => {
    try {
      const request = indexedDB.open(NAME, VERSION);
      request.onupgradeneeded = () => {
        for (const [name, fields] of Object.entries(STORES)) {
          const store = request.result.createObjectStore(name, { keyPath: "id" });
          for (const field of fields) store.createIndex(field, field);
        }
      };
      const found = await settled(request);
      // A later version of the page, in another tab, may change it.
      found.onversionchange = () => found.close();
      return found;
    } catch {
      return null;
    }
  })();
  return opened;
}

const inMemory = Object.fromEntries(Object.keys(STORES).map((name) => [name, new Map()]));

/** Runs an action on a store in one transaction. Returns what it returned, once that is stored. */
async function transact(name, mode, action, withoutDatabase) {
  const found = await database();
  if (!found) return withoutDatabase(inMemory[name]);
  const transaction = found.transaction(name, mode);
  const ended = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error ?? new Error("The browser did not store it."));
  });
  // What fails first is told.
  ended.catch(() => {});
  const result = await action(transaction.objectStore(name));
  if (mode === "readwrite") transaction.commit?.();
  await ended;
  return result;
}

/** Returns the records of a store; with a `field`, those that have this value in it. */
export const list = (name, field = null, value = null) =>
  transact(
    name,
    "readonly",
    (store) => settled(field === null ? store.getAll() : store.index(field).getAll(value)),
    (map) => [...map.values()].filter((one) => field === null || one[field] === value),
  );

/** Returns a record, or undefined. */
export const get = (name, id) =>
  transact(
    name,
    "readonly",
    (store) => settled(store.get(id)),
    (map) => map.get(id),
  );

/** Stores what `changed` makes of the record with an id, which may be undefined. No other tab changes it meanwhile. */
export const change = (name, id, changed) =>
  transact(
    name,
    "readwrite",
    async (store) => {
      const record = changed(await settled(store.get(id)));
      await settled(store.put(record));
      return record;
    },
    (map) => map.set(id, changed(map.get(id))).get(id),
  );

/** Stores records, all or none. */
export const put = (name, records) =>
  transact(
    name,
    "readwrite",
    (store) => Promise.all(records.map((record) => settled(store.put(record)))),
    (map) => records.forEach((record) => map.set(record.id, record)),
  );

/** Removes the records with these ids. */
export const remove = (name, ids) =>
  transact(
    name,
    "readwrite",
    (store) => Promise.all(ids.map((id) => settled(store.delete(id)))),
    (map) => ids.forEach((id) => map.delete(id)),
  );

/** Returns an id that no other record has. `crypto.randomUUID` is missing on pages that came over plain HTTP. */
export const newId = () =>
  [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
