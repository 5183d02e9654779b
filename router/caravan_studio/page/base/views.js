/** The views of the page. The part of the address after # names the one that is shown, and after a slash, what in it. */

import { byId } from "./dom.js";

const known = new Map();

/** Adds a view: `show` is called with the rest of the address when it appears or that changes, `hide` when it goes. */
export function addView(name, { show = () => {}, hide = () => {} } = {}) {
  known.set(name, { show, hide });
}

let shown = null;

function change() {
  const [asked, rest = ""] = location.hash.slice(1).split("/");
  const name = known.has(asked) ? asked : "talk";
  if (shown && name !== shown) known.get(shown).hide();
  shown = name;
  for (const other of known.keys()) byId(other).hidden = other !== name;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = "Caravan";
  known.get(name).show(rest);
}

/** Shows a part of a view, to which the browser's Back button returns. */
export const goTo = (name, rest) => (location.hash = `${name}/${rest}`);

/** Gives what is shown an address. */
export const nameShown = (name, rest) => history.replaceState(null, "", `#${name}/${rest}`);

export function startViews() {
  addEventListener("hashchange", change);
  change();
}
