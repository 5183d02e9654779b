/** Panels beside the conversation that a button opens. On a narrow screen a panel covers the page; Escape closes it. */

import { byId } from "../base/dom.js";

/** `shown` is called when the panel opens. Returns the function that closes it. */
export function panel(name, shown = () => {}) {
  const opener = byId(`open-${name}`);
  const box = byId(name);
  const set = (open) => {
    box.hidden = !open;
    opener.setAttribute("aria-expanded", String(open));
    if (open) {
      shown();
      box.querySelector("button, input, textarea, select")?.focus();
    } else if (box.contains(document.activeElement) || document.activeElement === document.body) opener.focus();
  };
  opener.addEventListener("click", () => set(box.hidden));
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    set(false);
  });
  return () => set(false);
}
