/** What happened, told to readers of the screen and to listeners. */

import { ApiError } from "./api.js";
import { button, byId, element } from "./dom.js";
import { iconButton } from "./icons.js";

const SHOWN_MS = 8000;
const MOST = 3;

/** Tells listeners of a screen reader. */
export function announce(text) {
  byId("announcer").textContent = text;
}

/** Shows a text for a while, an error until it is dismissed. `undo`: takes back what it tells. */
export function notice(text, kind = "", undo = null) {
  const shown = element("div", { class: `notice ${kind}` }, element("span", {}, text));
  const close = () => shown.remove();
  const undone = () => {
    close();
    undo();
  };
  if (undo) shown.append(button("Undo", undone, { class: "plain" }));
  shown.append(iconButton("close", "Dismiss", close));
  const others = [...byId("notices").children].filter((other) => other.textContent !== text);
  byId("notices").replaceChildren(...others.slice(1 - MOST), shown);
  if (kind !== "error") setTimeout(() => shown.remove(), SHOWN_MS);
}

/** Runs an action and shows its failure. Returns what it returned, or undefined. */
export async function attempt(action) {
  try {
    return await action();
  } catch (error) {
    if (error.name === "AbortError" || (error instanceof ApiError && error.status === 401)) return undefined;
    if (!(error instanceof ApiError)) console.error(error);
    notice(error.message, "error");
    return undefined;
  }
}
