/** Edits the text of an entry in its place. */

import { button, element } from "../base/dom.js";
import { textOfEntry } from "./entries.js";

/** Returns a form that stands in for `body` until it is done. */
export function editor(entry, body, actions) {
  const text = element("textarea", { "aria-label": "New text", rows: 4, value: textOfEntry(entry) });
  const close = () => form.replaceWith(body);
  const done = (action) => () => {
    close();
    action(entry, text.value);
  };
  const asks = entry.kind === "message" && entry.items[0].role === "user";
  const form = element(
    "form",
    { class: "editor" },
    text,
    element(
      "div",
      { class: "row" },
      asks ? button("Ask anew in a fork", done(actions.askAnew), { class: "primary" }) : null,
      button("Change here", done(actions.changeHere)),
      asks ? null : button("Change in a fork", done(actions.changeInFork)),
      button("Cancel", close, { class: "plain" }),
    ),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  requestAnimationFrame(() => text.focus());
  return form;
}
