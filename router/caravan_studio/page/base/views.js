/** The views of the page. The part of the address after # names the one that is shown. */

import { byId } from "./dom.js";

const known = new Map();

/** Adds a view: `show` is called when it appears, and `hide` when it goes. */
export function addView(name, { show = () => {}, hide = () => {} } = {}) {
  known.set(name, { show, hide });
}

let shown = null;

function change() {
  const asked = location.hash.slice(1);
  const name = known.has(asked) ? asked : "talk";
  if (name === shown) return;
  if (shown) known.get(shown).hide();
  shown = name;
  for (const other of known.keys()) byId(other).hidden = other !== name;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  known.get(name).show();
}

export function startViews() {
  addEventListener("hashchange", change);
  change();
}
