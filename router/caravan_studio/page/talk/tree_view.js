/** The tree of a conversation: what each part cost, and where the branches are. */

import { button, byId, element } from "../base/dom.js";
import { beginning, count } from "../base/format.js";
import { textOfEntry } from "./entries.js";

export class TreeView {
  /** `go`: shows the branch of a node. */
  constructor({ go, close }) {
    this.go = go;
    this.list = element("div");
    const header = element("header", {}, element("h2", {}, "Tree"), button("Close", close, { class: "plain" }));
    const legend = element(
      "p",
      { class: "quiet" },
      "What the prompt of each answer took: ",
      element("span", { class: "swatch cached" }),
      " tokens found in the cache, ",
      element("span", { class: "swatch computed" }),
      " tokens computed.",
    );
    byId("tree").append(header, legend, this.list);
  }

  show(conversation) {
    const { children } = conversation;
    const roots = children.get(null) ?? [];
    const shown = new Set(conversation.path);
    this.list.replaceChildren(
      roots.length ? this.#chains(roots, children, shown) : element("p", { class: "quiet" }, "Nothing yet."),
    );
  }

  /** Returns the alternatives that begin at one place, each with what follows it. */
  #chains(nodes, children, shown) {
    if (nodes.length === 1) return this.#chain(nodes[0], children, shown);
    const forks = nodes.map((node) => element("li", { class: "fork" }, this.#chain(node, children, shown)));
    return element("ul", { class: "forks", "aria-label": `${nodes.length} branches` }, forks);
  }

  /** Returns a node and all after it up to the next fork, as a flat list: long conversations would else be deep. */
  #chain(node, children, shown) {
    const list = element("ol", { class: "chain" });
    for (let at = node; at; ) {
      list.append(element("li", {}, this.#node(at, shown.has(at))));
      const next = children.get(at.id) ?? [];
      if (next.length > 1) list.append(element("li", {}, this.#chains(next, children, shown)));
      at = next.length === 1 ? next[0] : null;
    }
    return list;
  }

  #node(node, isShown) {
    const who = { message: "You", answer: "Answer", output: "Tool" }[node.kind];
    const text = beginning(textOfEntry(node), 44) || node.items.map((item) => item.name ?? item.type).join(", ");
    const shown = button("", () => this.go(node), { class: `node ${node.kind}` });
    if (isShown) shown.setAttribute("aria-current", "true");
    shown.append(element("strong", {}, who), " ", element("span", {}, text), ...costOfNode(node.usage));
    return shown;
  }
}

function costOfNode(usage) {
  if (!usage) return [];
  const computed = usage.input - usage.cached;
  const bar = element(
    "span",
    { class: "cost-bar", "aria-hidden": "true" },
    element("span", { class: "cached" }),
    element("span", { class: "computed" }),
  );
  bar.firstChild.style.flexGrow = usage.cached;
  bar.lastChild.style.flexGrow = computed;
  const told = `${count(usage.cached)} cached, ${count(computed)} computed, ${count(usage.output)} generated`;
  return [bar, element("span", { class: "quiet" }, told)];
}
