/** Shows Markdown that a model wrote. Pictures are links, and a sanitiser sees all that is made of it. */

import "../vendor/dompurify.js";
import { button, element, wrap } from "../base/dom.js";
import { bytes } from "../base/format.js";
import { frameCode } from "./code_block.js";
import { showFormulas } from "./formulas.js";
import { htmlOf, settledLength } from "./grammar.js";

// Beyond this many characters a text is shown as it is, and not at once: browsers need seconds for lines of a megabyte.
const MOST = 100_000;

const BLOCKS = "blockquote dd details dl dt h1 h2 h3 h4 h5 h6 hr li ol p pre summary table tbody td th thead tr ul";
const INLINE = "a b br code del em i ins kbd mark s span strong sub sup u";
const SANITISER = {
  ALLOWED_TAGS: `${BLOCKS} ${INLINE}`.split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "start", "title"],
  // The values of these are no addresses, as it would expect.
  ADD_URI_SAFE_ATTR: ["align", "start"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const TEXTS = "p, li, td, th, h1, h2, h3, h4, h5, h6, summary, dt, dd";

function fragmentOf(markdown, growing) {
  const fragment = globalThis.DOMPurify.sanitize(htmlOf(markdown, growing), SANITISER);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const box of fragment.querySelectorAll("span.check")) {
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", box.classList.contains("done") ? "Done" : "To do");
  }
  for (const table of fragment.querySelectorAll("table"))
    wrap(table, element("div", { class: "scrolls", tabIndex: 0, role: "region", "aria-label": "Table" }));
  for (const block of fragment.querySelectorAll("pre")) frameCode(block, growing && block.className === "open");
  showFormulas(fragment);
  for (const block of fragment.querySelectorAll(TEXTS)) block.dir = "auto";
  return fragment;
}

/** Shows a text as it is, the first part of it at once. */
export function plain(text) {
  const shown = element("div", { class: "as-is", dir: "auto" }, text.slice(0, MOST));
  if (text.length <= MOST) return [shown];
  const rest = button(`Show the other ${bytes(text.length - MOST)}`, () => {
    // Pieces, so that the browser lays out only those that are in sight.
    for (let at = MOST; at < text.length; at += MOST / 10) {
      rest.before(element("div", { class: "as-is piece", dir: "auto" }, text.slice(at, at + MOST / 10)));
    }
    rest.remove();
  });
  return [shown, rest];
}

/** Returns nodes that show a text. `growing`: it has no end yet. */
function rendered(text, growing = false) {
  if (text.length > MOST) return plain(text);
  try {
    return [fragmentOf(text, growing)];
  } catch {
    // It is nested too deeply for the parser.
    return plain(text);
  }
}

/** Shows a text that grows: blocks that are complete are rendered once, so that the whole costs no more than a part. */
export class GrowingMarkdown {
  #shown = 0;
  #rest = element("div");

  constructor() {
    this.node = element("div", { class: "markdown" }, this.#rest);
  }

  update(text) {
    if (this.#shown > MOST) return undefined;
    if (text.length > MOST) return this.finish(text);
    const rest = text.slice(this.#shown);
    const settled = settledLength(rest);
    if (settled) {
      this.#rest.before(...rendered(rest.slice(0, settled)));
      this.#shown += settled;
    }
    return this.#rest.replaceChildren(...rendered(text.slice(this.#shown), true));
  }

  /** Renders all of it together, since a block may refer to a later one. */
  finish(text) {
    this.node.replaceChildren(...rendered(text));
    this.#rest = element("div");
    this.node.append(this.#rest);
    this.#shown = text.length;
  }
}
