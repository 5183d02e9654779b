/**
 * The conversations that the browser keeps. Each is a tree of nodes: messages, answers and outputs of tools, each a
 * record of its own, so that tabs never overwrite what another one added. Tabs tell each other what they stored.
 *
 * A conversation is `{id, owner, title, used, tip, choosing, deleted}`: `owner` tells API keys apart, `tip` is the last
 * node of the branch that is shown, `choosing` has the answers of which one is to be chosen.
 *
 * A node is `{id, conversation, parent, kind, items, made, status, version, ...}`. `items` are those of a response. An
 * answer's `status` is "sending", "running", "continuing", "done", "cut", "failed" or "interrupted"; it has the id of
 * its `response`, the `sequence` number of the last event in it, its `column` of settings, `model`, `usage` and `error`. `tab`: the tab
 * that sends it. `version` counts what people changed in it.
 */

import * as database from "../base/database.js";
import { keyTag } from "../base/key.js";

// Strings above this are kept as blobs: files, which nobody needs to read a list of.
const MOST_INLINE = 4096;
// A deleted conversation can be brought back for this time.
const UNDO_MS = 600_000;

const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("caravan") : new EventTarget();

/** Calls a listener with the id of each conversation that another tab has changed. */
export const onChange = (listener) => channel.addEventListener("message", ({ data }) => listener(data));
const tellOthers = (id) => channel.postMessage?.(id);

/** Returns the conversations of the API key, the last used first. */
export async function conversations() {
  const owner = keyTag();
  const all = await database.list("conversations");
  return all.filter((one) => one.owner === owner && !one.deleted).sort((one, other) => other.used - one.used);
}

/** Returns a conversation of the API key, or null. */
export async function conversation(id) {
  const found = await database.get("conversations", id);
  return found && found.owner === keyTag() && !found.deleted ? found : null;
}

/** Returns a conversation that is not stored yet. */
export const newConversation = () => ({
  id: database.newId(),
  owner: keyTag(),
  title: "New conversation",
  used: Date.now(),
  tip: null,
  choosing: null,
});

let last = 0;

/** Returns a time that is later than any before, so that it tells the order. */
const now = () => (last = Math.max(Date.now(), last + 1));

export const newNode = (conversation, parent, kind, items, more = {}) => ({
  id: database.newId(),
  conversation,
  parent,
  kind,
  items,
  made: now(),
  status: "done",
  version: 0,
  sequence: -1,
  ...more,
});

export async function saveConversation(record) {
  await database.put("conversations", [{ ...record }]);
  tellOthers(record.id);
}

/** Changes some fields of a stored conversation. */
export async function changeConversation(id, fields) {
  await database.change("conversations", id, (old) => ({ ...old, ...fields }));
  tellOthers(id);
}

/** Returns the nodes of a conversation, the oldest first: those of `known`, by id, where they are in the same state. */
export async function nodesOf(id, known = new Map()) {
  const found = await database.list("nodes", "conversation", id);
  const nodes = found.map((node) => (isSame(node, known.get(node.id)) ? known.get(node.id) : unpacked(node)));
  return (await Promise.all(nodes)).sort((one, other) => one.made - other.made);
}

const isSame = (node, known) =>
  known !== undefined && ["version", "sequence", "status"].every((name) => node[name] === known[name]);

/** Stores a node, unless another tab has stored a later state of it. `quiet`: other tabs are not told. */
export async function saveNode(node, { quiet = false } = {}) {
  const record = packed(node);
  await database.change("nodes", node.id, (old) => (old && isLater(old, record) ? old : record));
  if (!quiet) tellOthers(node.conversation);
}

export async function saveNodes(nodes) {
  await database.put("nodes", nodes.map(packed));
  if (nodes.length) tellOthers(nodes[0].conversation);
}

export async function dropNodes(nodes) {
  await database.remove(
    "nodes",
    nodes.map((node) => node.id),
  );
  if (nodes.length) tellOthers(nodes[0].conversation);
}

export const isRunning = (node) => ["sending", "running", "continuing"].includes(node.status);

function isLater(old, record) {
  if (old.version !== record.version) return old.version > record.version;
  if (old.sequence !== record.sequence) return old.sequence > record.sequence;
  return isRunning(record) && !isRunning(old);
}

/** Marks a conversation as deleted, or brings it back. */
export const setDeleted = (id, deleted) => changeConversation(id, { deleted: deleted ? Date.now() : 0 });

/** Removes what was deleted so long ago that nobody wants it back. */
export async function purge() {
  const before = Date.now() - UNDO_MS;
  for (const { id, deleted } of await database.list("conversations")) {
    if (!deleted || deleted > before) continue;
    const nodes = await database.list("nodes", "conversation", id);
    await database.remove(
      "nodes",
      nodes.map((node) => node.id),
    );
    await database.remove("conversations", [id]);
  }
}

/** Returns the ids of conversations with answers that had not ended when they were stored. */
export async function unfinished() {
  const nodes = await database.list("nodes", "status", "running");
  return new Set(nodes.map((node) => node.conversation));
}

/** Returns the ids of conversations with all these words in a text. */
export async function matching(words) {
  const texts = new Map();
  for (const { conversation: id, items } of await database.list("nodes"))
    texts.set(id, `${texts.get(id) ?? ""}\n${textWithin(items)}`);
  const hits = [...texts].filter(([, text]) => words.every((word) => text.includes(word)));
  return new Set(hits.map(([id]) => id));
}

function textWithin(items) {
  const parts = items.flatMap((item) => (Array.isArray(item.content) ? item.content : []));
  return parts
    .map((part) => part.text ?? "")
    .join("\n")
    .toLowerCase();
}

/** Returns a value with long strings of files as blobs. Texts stay as they are. */
function packed(value, name = "") {
  if (typeof value === "string") return value.length > MOST_INLINE && !isText(name) ? new Blob([value]) : value;
  if (Array.isArray(value)) return value.map((one) => packed(one));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, packed(one, key)]));
}

const isText = (name) => ["text", "arguments", "output", "input", "error", ""].includes(name);

async function unpacked(value) {
  if (value instanceof Blob) return value.text();
  if (Array.isArray(value)) return Promise.all(value.map(unpacked));
  if (value === null || typeof value !== "object") return value;
  const entries = Object.entries(value).map(async ([key, one]) => [key, await unpacked(one)]);
  return Object.fromEntries(await Promise.all(entries));
}
