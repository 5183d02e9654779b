/** Conversations as files: JSON with all branches, which can be read again, and Markdown of what is shown. */

import { element } from "../base/dom.js";
import { newConversation, newNode } from "./archive.js";
import { textOf } from "./entries.js";

const FORMAT = "caravan-conversations";
const KINDS = ["message", "answer", "output"];

/** Returns a file of conversations: pairs of a record and its nodes. */
export function asJson(whole) {
  const conversations = whole.map(([{ title, used, tip }, nodes]) => ({
    title,
    used,
    tip,
    nodes: nodes.map(({ id, parent, kind, items, made, status, model, column, usage, error }) => ({
      ...{ id, parent, kind, items, made, status, model, column, usage, error },
    })),
  }));
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/** Returns the branch that is shown as Markdown. */
export function asMarkdown({ title, tip }, nodes) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const parts = [];
  for (let node = byId.get(tip); node; node = byId.get(node.parent)) {
    const who = { message: "You", answer: node.model || "Answer", output: "Tool" }[node.kind];
    parts.unshift(`## ${who}\n\n${node.items.map(markdownOf).filter(Boolean).join("\n\n")}\n`);
  }
  return [`# ${title}\n`, ...parts].join("\n");
}

function markdownOf(item) {
  if (item.type === "message") return [textOf(item), ...filesOf(item)].filter(Boolean).join("\n\n");
  if (item.type === "reasoning") return textOf(item).replace(/^/gm, "> ");
  const { name, arguments: given, input, output } = item;
  const data = given ?? input ?? (typeof output === "string" ? output : JSON.stringify(output));
  return `${name ? `Calls \`${name}\`:\n\n` : ""}\`\`\`\n${data}\n\`\`\``;
}

const filesOf = (item) =>
  item.content.filter((part) => part.text === undefined).map((part) => `*(${part.filename ?? part.type})*`);

/** Returns `{record, nodes}` of each conversation in a file. They get new ids. Throws Error. */
export function readFile(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.conversations))
    throw new Error("This file has no conversations that were exported from a page like this one.");
  return file.conversations.map(readConversation);
}

function readConversation({ title, used, tip, nodes }) {
  const record = { ...newConversation(), title: String(title), used: Number(used) || Date.now() };
  const ids = new Map();
  const made = nodes.map((node) => {
    const { kind, items, status } = node;
    if (!KINDS.includes(kind) || !items?.every?.(isItem)) throw new Error(`“${record.title}” is not a whole conversation.`);
    const { model, column, usage, error } = node;
    const isWhole = ["done", "cut", "failed", "interrupted"].includes(status);
    const fresh = newNode(record.id, node.parent, kind, items, { model, column, usage, error });
    ids.set(node.id, fresh.id);
    return { ...fresh, status: isWhole ? status : "interrupted", made: Number(node.made) || fresh.made };
  });
  for (const node of made) node.parent = ids.get(node.parent) ?? null;
  return { record: { ...record, tip: ids.get(tip) ?? made.at(-1)?.id ?? null }, nodes: made };
}

function isItem(item) {
  if (typeof item?.type !== "string") return false;
  return item.type !== "message" || Boolean(item.content?.every?.((part) => typeof part?.type === "string"));
}

/** Has the browser save a text as a file. */
export function download(name, ending, text) {
  const url = URL.createObjectURL(new Blob([text]));
  const file = `${name.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "conversation"}.${ending}`;
  element("a", { href: url, download: file }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
