/** Shows Markdown that a model wrote. Raw HTML in it is text, pictures are links, and a sanitiser sees all that is left. */

import "../vendor/dompurify.js";
import { Marked } from "../vendor/marked.js";
import { button, element } from "../base/dom.js";
import { bytes } from "../base/format.js";

// Beyond this many characters a text is shown as it is, and not at once: browsers need seconds for lines of a megabyte.
const MOST = 100_000;

const TAGS = [
  "a",
  "blockquote",
  "br",
  "code",
  "del",
  "em",
  "h1",
  "h2",
  "h3",
  "h4",
  "h5",
  "h6",
  "hr",
  "input",
  "li",
  "ol",
  "p",
  "pre",
  "strong",
  "table",
  "tbody",
  "td",
  "th",
  "thead",
  "tr",
  "ul",
];
const ATTRIBUTES = ["align", "checked", "class", "disabled", "href", "start", "title", "type"];
const SANITISER = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ATTRIBUTES,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

const escape = (text) => text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
const marked = new Marked({
  gfm: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || "picture")}</a>`,
  },
});

function fragmentOf(markdown) {
  const fragment = globalThis.DOMPurify.sanitize(marked.parse(markdown), SANITISER);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const box of fragment.querySelectorAll("input")) box.disabled = true;
  for (const table of fragment.querySelectorAll("table"))
    wrap(table, element("div", { class: "scrolls", tabIndex: 0, role: "region", "aria-label": "Table" }));
  for (const block of fragment.querySelectorAll("pre")) frame(block);
  for (const block of fragment.querySelectorAll("p, li, td, th, h1, h2, h3, h4, h5, h6")) block.dir = "auto";
  return fragment;
}

function wrap(inner, outer) {
  inner.replaceWith(outer);
  outer.append(inner);
}

/** Gives a block of code its language and a button that copies it. */
function frame(block) {
  const language = /language-([\w+#-]{1,24})/.exec(block.firstElementChild?.className ?? "")?.[1] ?? "code";
  const copy = button("Copy", () => navigator.clipboard?.writeText(block.textContent), { class: "plain" });
  block.tabIndex = 0;
  block.setAttribute("role", "region");
  block.setAttribute("aria-label", `Code: ${language}`);
  const figure = element(
    "div",
    { class: "code" },
    element("div", { class: "row code-head" }, element("span", {}, language), copy),
  );
  wrap(block, figure);
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

/** Returns nodes that show a text. */
export function rendered(text) {
  if (text.length > MOST) return plain(text);
  try {
    return [fragmentOf(text)];
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
    const whole = this.#whole(rest);
    if (whole) {
      this.#rest.before(...rendered(rest.slice(0, whole)));
      this.#shown += whole;
    }
    return this.#rest.replaceChildren(...rendered(text.slice(this.#shown)));
  }

  /** Renders all of it together, since a block may refer to a later one. */
  finish(text) {
    this.node.replaceChildren(...rendered(text));
    this.#rest = element("div");
    this.node.append(this.#rest);
    this.#shown = text.length;
  }

  /** Returns the length of the blocks that can no longer change: all but the last two. */
  #whole(text) {
    let blocks;
    try {
      blocks = marked.lexer(text);
    } catch {
      return 0;
    }
    const filled = blocks.map((block, at) => (block.type === "space" ? -1 : at)).filter((at) => at >= 0);
    if (filled.length < 3) return 0;
    return blocks.slice(0, filled.at(-2)).reduce((length, block) => length + block.raw.length, 0);
  }
}
