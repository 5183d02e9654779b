/** Copies texts, and says so. */

import { icon, iconButton } from "./icons.js";
import { announce, notice } from "./notices.js";

const CONFIRMED_MS = 2000;

/** Copies a text. Returns whether it is in the clipboard. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Over plain HTTP from another host, browsers have no `navigator.clipboard`.
    return copiedBySelection(text);
  }
}

function copiedBySelection(text) {
  const focused = document.activeElement;
  const take = (event) => {
    event.preventDefault();
    event.clipboardData.setData("text/plain", text);
  };
  // Some browsers copy only if something is selected.
  const field = document.createElement("textarea");
  field.value = text.slice(0, 1) || " ";
  field.className = "for-listeners";
  field.setAttribute("aria-hidden", "true");
  document.body.append(field);
  field.select();
  document.addEventListener("copy", take, { once: true });
  try {
    return document.execCommand("copy");
  } finally {
    document.removeEventListener("copy", take);
    field.remove();
    focused?.focus();
  }
}

/** Returns a button that copies what `textOf` returns, and then says "Copied" for a moment. */
export function copyButton(textOf, properties = {}) {
  let timer = null;
  const show = (name, label) => {
    made.replaceChildren(icon(name));
    made.title = label;
    made.classList.toggle("confirms", name === "check");
  };
  const copy = async () => {
    if (!(await copied(textOf()))) return notice("This browser does not let the page copy. Select the text.", "error");
    announce("Copied");
    show("check", "Copied");
    clearTimeout(timer);
    timer = setTimeout(() => show("copy", "Copy"), CONFIRMED_MS);
    return undefined;
  };
  const made = iconButton("copy", "Copy", copy, properties);
  return made;
}
