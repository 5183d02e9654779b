/** The tree of a conversation and its forks: what each part cost, and where the branches are. */

import { button, byId, element } from "../base/dom.js";
import { beginning, count } from "../base/format.js";
import { textOfEntry } from "./entries.js";

export class TreeView {
  /** `go`: shows a branch and an entry of it. */
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
    const { children } = conversation.tree;
    this.list.replaceChildren(
      children.length ? this.#chains(children, conversation) : element("p", { class: "quiet" }, "Nothing yet."),
    );
  }

  /** Returns the alternatives that begin at one place, each with what follows it. */
  #chains(nodes, conversation) {
    if (nodes.length === 1) return this.#chain(nodes[0], conversation);
    const forks = nodes.map((node) => element("li", { class: "fork" }, this.#chain(node, conversation)));
    return element("ul", { class: "forks", "aria-label": `${nodes.length} branches` }, forks);
  }

  /** Returns a node and all after it up to the next fork, as a flat list: long conversations would else be deep. */
  #chain(node, conversation) {
    const list = element("ol", { class: "chain" });
    for (let at = node; at; at = at.children.length === 1 ? at.children[0] : null) {
      list.append(element("li", {}, this.#node(at, conversation)));
      if (at.children.length > 1) list.append(element("li", {}, this.#chains(at.children, conversation)));
    }
    return list;
  }

  #node({ entry, branches }, conversation) {
    const isShown = branches.includes(conversation.branch);
    const who = { message: "You", answer: "Answer", output: "Tool" }[entry.kind];
    const text = beginning(textOfEntry(entry), 44) || entry.items.map((item) => item.name ?? item.type).join(", ");
    const shown = button("", () => this.go(isShown ? conversation.branch : branches.at(-1), entry), {
      class: `node ${entry.kind}`,
    });
    if (isShown) shown.setAttribute("aria-current", "true");
    shown.append(
      element("strong", {}, who),
      " ",
      element("span", {}, text),
      ...costOfNode(conversation.usageOf(entry)),
    );
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
