/** Blocks of code: their language, their colours and a button that copies them. */

import hljs from "../vendor/highlight.js";
import { copyButton } from "../base/copy.js";
import { element, wrap } from "../base/dom.js";

// Longer code is shown in one colour, since colours take about a millisecond for a thousand characters.
const MOST = 50_000;
const KEPT = 16;
const SPANS = { ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };

// The last blocks of an answer that grows are shown again and again.
const coloured = new Map();

function colours(language, code) {
  const key = `${language}\n${code}`;
  if (!coloured.has(key)) {
    const { value } = hljs.highlight(code, { language, ignoreIllegals: true });
    coloured.set(key, globalThis.DOMPurify.sanitize(value, SPANS));
    if (coloured.size > KEPT) coloured.delete(coloured.keys().next().value);
  }
  return coloured.get(key).cloneNode(true);
}

/** Frames a `pre`. `isOpen`: its code still grows, and gets its colours when it has ended. */
export function frameCode(block, isOpen) {
  const code = block.querySelector("code") ?? block;
  const language = /language-(\S{1,24})/.exec(code.className)?.[1] ?? "";
  const text = code.textContent;
  if (!isOpen && text.length <= MOST && hljs.getLanguage(language)) code.replaceChildren(colours(language, text));
  block.tabIndex = 0;
  block.dir = "ltr";
  block.setAttribute("role", "region");
  block.setAttribute("aria-label", `Code: ${language || "text"}`);
  const copy = copyButton(() => text.replace(/\n$/, ""), { class: "small" });
  const head = element("div", { class: "row code-head" }, element("span", {}, language || "text"), copy);
  wrap(block, element("div", { class: "code" }, head));
}
