/** Formulas in Markdown: which texts are TeX, and how it is shown, as MathML. */

import { element } from "../base/dom.js";

// A line that is empty ends a formula, as it ends a paragraph.
const LINES = String.raw`(?:[^\n]|\n(?![ \t]*\n))`;
const BRACKETS = new RegExp(String.raw`^\\\[((?:(?!\\\])${LINES})+)\\\]`);
const PARENTHESES = new RegExp(String.raw`^\\\(((?:(?!\\\))${LINES})+)\\\)`);
const DOLLARS = new RegExp(String.raw`^\$\$((?:(?!\$\$)${LINES})+)\$\$`);
const DOLLAR = /^\$(?![\s$])((?:\\[^\n]|[^\\$`\n])+?)(?<!\s)\$(?![\p{L}\d$])/u;
const ENVIRONMENT = new RegExp(
  String.raw`^(\\begin\{((?:equation|align|alignat|gather|multline)\*?)\}${LINES}+?\\end\{\2\})`,
);
const UNFINISHED = new RegExp(String.raw`^(?:\\\[|\\\(|\$\$|\\begin\{(?:equation|align|gather|multline))${LINES}*$`);
const UNFINISHED_DOLLAR = /^\$[^\s$\d][^$`\n]{0,200}$/;

const DELIMITERS = /^(?:\\\[|\\\(|\$\$?)|(?:\\\]|\\\)|\$\$?)$/g;

// The longest formula that is shown as one. TeX can ask for much more work than its length lets expect.
const MOST = 5000;
const LIMITS = { trust: false, throwOnError: true, maxExpand: 200, maxSize: [20, 200] };

/** Whether what stands between single dollars is a formula, not the words between two prices or variables. */
function isTex(body) {
  if (/[\\^_={}<>+]/.test(body)) return true;
  return !/\p{L}{3}/u.test(body) && !/^\d.*\s/.test(body);
}

/** Brackets with a backslash are also how Markdown writes brackets that are none of a link. */
const isBracketed = (body) => /^\s|\s$|[\\^_={}<>+]/.test(body);

function found(source, before, growing) {
  const whole =
    checked(BRACKETS, source, true, isBracketed) ??
    checked(DOLLARS, source, true) ??
    checked(ENVIRONMENT, source, true) ??
    checked(PARENTHESES, source, false) ??
    (/[\p{L}\d]$/u.test(before) ? null : checked(DOLLAR, source, false, isTex));
  if (whole) return whole;
  if (growing && (UNFINISHED.test(source) || (UNFINISHED_DOLLAR.test(source) && isTex(source.slice(1)))))
    return { type: "formula", raw: source, text: source, kind: "unfinished" };
  return null;
}

function checked(pattern, source, display, isOne = () => true) {
  const match = pattern.exec(source);
  if (!match || !isOne(match[1])) return null;
  return { type: "formula", raw: match[0], text: match[0], kind: display ? "display" : "inline" };
}

/** Returns the extension of the parser. `growing`: the text has no end yet, and its last formula may lack one. */
export function formulaExtensions(escape, growing) {
  const shown = ({ text, kind }) => `<code class="tex ${kind}">${escape(text)}</code>`;
  return [
    {
      name: "formulaBlock",
      level: "block",
      // One that begins at the end of a line of a paragraph ends the paragraph: its lines may look like lists.
      start: (source) => /^ {0,3}(?:\\\[|\$\$|\\begin\{)|(?:\\\[|\$\$)[ \t]*\n/m.exec(source)?.index,
      tokenizer(source) {
        const indent = /^ {0,3}/.exec(source)[0];
        const rest = source.slice(indent.length);
        if (!/^(?:\\\[|\$\$|\\begin)/.test(rest)) return undefined;
        const formula = found(growing ? rest.replace(/\n[ \t]*\n[^]*/, "") : rest, "", growing);
        if (!formula || formula.kind === "inline") return undefined;
        const end = /^[ \t]*(?:\n+|$)/.exec(rest.slice(formula.raw.length)) ?? [""];
        // It is part of a line.
        if (!end[0] && !formula.raw.includes("\n") && rest.length > formula.raw.length) return undefined;
        return { ...formula, type: "formulaBlock", raw: indent + formula.raw + end[0] };
      },
      renderer: (token) => `<p>${shown(token)}</p>\n`,
    },
    {
      name: "formula",
      level: "inline",
      start: (source) => /\\[[(]|\\begin\{|\$/.exec(source)?.index,
      tokenizer(source, tokens) {
        if (!/^(?:\$|\\[[(b])/.test(source)) return undefined;
        return found(source, tokens.at(-1)?.raw ?? "", growing) ?? undefined;
      },
      renderer: shown,
    },
  ];
}

/** Shows the formulas of a fragment that the sanitiser has passed. What is no TeX stays as it was written. */
export function showFormulas(fragment) {
  for (const code of fragment.querySelectorAll("code.tex:not(.unfinished)")) {
    const tex = code.textContent.replace(DELIMITERS, "");
    const display = code.classList.contains("display");
    const made = element("span", { class: display ? "formula display" : "formula", dir: "ltr" });
    try {
      if (tex.length > MOST) continue;
      // It makes elements, never HTML, and sets styles one by one, which the policy of the page allows.
      globalThis.temml.render(tex, made, { ...LIMITS, displayMode: display });
    } catch {
      continue;
    }
    if (display) Object.assign(made, { tabIndex: 0 }).setAttribute("role", "group");
    if (display) made.setAttribute("aria-label", "Formula");
    code.replaceWith(made);
  }
}
