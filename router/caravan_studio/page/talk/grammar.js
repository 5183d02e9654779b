/** The Markdown that answers are read as: GitHub's, with formulas and a few elements of HTML. */

import { Marked } from "../vendor/marked.js";
import { formulaExtensions } from "./formulas.js";

// Elements that models write for want of Markdown. They pass without attributes; all other HTML is text.
const BARE = "b|br|dd|del|details|dl|dt|em|i|ins|kbd|mark|s|strong|sub|summary|sup|u";
const TAG = new RegExp(String.raw`<(/?)(${BARE})(?: +open)? */?>`, "gi");
const CLOSED_FENCE = /\n[ \t>]*(?:`{3,}|~{3,})\s*$/;
const OPEN_FENCE = /^[ \t]*(?:`{3,}|~{3,})/;

const escape = (text) => text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

function html({ text }) {
  let [shown, at] = ["", 0];
  for (const tag of text.matchAll(TAG)) {
    shown += `${escape(text.slice(at, tag.index))}<${tag[1]}${tag[2].toLowerCase()}>`;
    at = tag.index + tag[0].length;
  }
  return shown + escape(text.slice(at));
}

function code({ text, lang, raw }) {
  const language = /^[\w+#.-]{1,24}/.exec(lang ?? "")?.[0] ?? "";
  const open = OPEN_FENCE.test(raw) && !CLOSED_FENCE.test(raw);
  return `<pre${open ? ' class="open"' : ""}><code class="language-${language}">${escape(text)}</code></pre>\n`;
}

function parser(growing) {
  return new Marked({
    gfm: true,
    renderer: {
      html,
      code,
      image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || "picture")}</a>`,
      checkbox: ({ checked }) => `<span class="check${checked ? " done" : ""}"></span> `,
    },
  }).use({ extensions: formulaExtensions(escape, growing) });
}

const WHOLE = parser(false);
const GROWING = parser(true);

/** Returns HTML that is not safe yet. `growing`: the text has no end yet. Throws an error if it is nested too deeply. */
export const htmlOf = (markdown, growing) => (growing ? GROWING : WHOLE).parse(markdown);

/** Returns the length of the blocks of a growing text that can no longer change: all but the last two. */
export function settledLength(text) {
  let blocks;
  try {
    blocks = GROWING.lexer(text);
  } catch {
    return 0;
  }
  const filled = blocks.map((block, at) => (block.type === "space" ? -1 : at)).filter((at) => at >= 0);
  if (filled.length < 3) return 0;
  let [settled, length, depth] = [0, 0, 0];
  for (const block of blocks.slice(0, filled.at(-2))) {
    length += block.raw.length;
    if (block.type === "html") depth += count(block.raw, /<details\b/gi) - count(block.raw, /<\/details\b/gi);
    // What is folded is shown together.
    if (depth <= 0) settled = length;
  }
  return settled;
}

const count = (text, pattern) => text.match(pattern)?.length ?? 0;
