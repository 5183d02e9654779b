/** Tables of the fleet, and buttons that ask back. */

import { ask } from "../base/ask.js";
import { button, element } from "../base/dom.js";
import { attempt } from "../base/notices.js";

/** Returns a card with a table. A column is `[heading, class]`, a cell a text or nodes. */
export function card(title, columns, rows, { actions = [], empty = "None." } = {}) {
  const head = element(
    "thead",
    {},
    element(
      "tr",
      {},
      columns.map(([name, kind]) => element("th", { scope: "col", class: kind ?? "" }, element("span", {}, name))),
    ),
  );
  const cell = (content, at) => element("td", { class: columns[at][1] ?? "" }, content);
  const body = element(
    "tbody",
    {},
    rows.map((row) => element("tr", {}, row.map(cell))),
  );
  const shown = rows.length
    ? element(
        "div",
        { class: "scrolls", tabIndex: 0, role: "region", "aria-label": `Table: ${title}` },
        element("table", {}, head, body),
      )
    : element("p", { class: "quiet" }, empty);
  const header = element("header", {}, element("h2", {}, title), element("div", { class: "row end" }, actions));
  return element("section", { class: "card", "aria-label": title }, header, shown);
}

/** Returns a button that asks and then acts. `of`: what it acts on, for listeners. */
export function asking({ label, of, details, action, done }) {
  const act = async () => {
    if (await ask(`${label} ${of}?`, label, details)) await attempt(action);
    await done();
  };
  return button(label, act, { class: "small", "aria-label": `${label} ${of}` });
}

export const state = (name) => element("span", { class: `state ${name}` }, name);
