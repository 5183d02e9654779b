/** The nodes of a conversation as a reader sees them: messages, answers and outputs of tools; and their tree. */

/** Returns the text of a message. */
export function textOf(item) {
  return (item.content ?? []).map((part) => part.text ?? "").join("");
}

/** Returns the text of a node without its thoughts and calls. */
export function textOfEntry(entry) {
  return entry.items
    .filter((item) => item.type === "message")
    .map(textOf)
    .join("\n");
}

/** Returns the calls of tools among items whose output is missing. A call that broke off is none. */
export function openCalls(items) {
  const answered = new Set(items.map((item) => (item.type.endsWith("_output") ? item.call_id : null)));
  return items.filter((item) => isCall(item) && isWhole(item) && !answered.has(item.call_id));
}

const isCall = (item) => /^(function|custom_tool)_call$/.test(item.type);
const isWhole = (item) => item.status !== "in_progress";

/** Returns items as the server takes them: without what it gave them, and without calls that broke off. */
export function sentItems(items) {
  return items
    .filter((item) => !isCall(item) || isWhole(item))
    .map(({ id, status, ...item }) => item)
    .filter((item) => item.type !== "message" || item.content.length);
}

/** Returns the nodes that follow each node, by its id; those without one before are under null. */
export function childrenOf(nodes) {
  const children = new Map();
  for (const node of nodes) {
    const before = children.get(node.parent);
    if (before) before.push(node);
    else children.set(node.parent, [node]);
  }
  return children;
}
