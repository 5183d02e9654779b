/** The items of a conversation as a reader sees them: messages, answers and outputs of tools; and their tree. */

const KINDS = {
  reasoning: "answer",
  function_call: "answer",
  custom_tool_call: "answer",
  function_call_output: "output",
  custom_tool_call_output: "output",
};

const kindOf = (item) => KINDS[item.type] ?? (item.role === "assistant" ? "answer" : "message");

/** Returns entries `{key, kind, items}`. What a model wrote without a break is one entry, whatever its parts. */
export function entriesOf(items) {
  const entries = [];
  for (const item of items) {
    const kind = kindOf(item);
    const last = entries.at(-1);
    if (last?.kind === kind && kind !== "message") last.items.push(item);
    else entries.push({ kind, items: [item] });
  }
  for (const entry of entries) entry.key = entry.items.map((item) => item.id).join(" ");
  return entries;
}

/** Returns the text of a message. */
export function textOf(item) {
  return (item.content ?? []).map((part) => part.text ?? "").join("");
}

/** Returns the text of an entry without its thoughts and calls. */
export function textOfEntry(entry) {
  return entry.items
    .filter((item) => item.type === "message")
    .map(textOf)
    .join("\n");
}

/** Returns the calls at the end of a conversation whose output is missing. */
export function openCalls(items) {
  const answered = new Set(items.map((item) => (item.type.endsWith("_output") ? item.call_id : null)));
  return items.filter((item) => /^(function|custom_tool)_call$/.test(item.type) && !answered.has(item.call_id));
}

/**
 * Returns the root of a tree `{entry, children, branches}` of the entries of all branches: forks have the items of what
 * they share. `branches` are the ids of those that have the entry.
 */
export function treeOf(itemsByBranch) {
  const root = { entry: null, children: [], branches: [...itemsByBranch.keys()] };
  for (const [branch, items] of itemsByBranch) {
    let node = root;
    for (const entry of entriesOf(items)) {
      let child = node.children.find((one) => one.entry.key === entry.key);
      if (!child) node.children.push((child = { entry, children: [], branches: [] }));
      child.branches.push(branch);
      node = child;
    }
  }
  return root;
}
