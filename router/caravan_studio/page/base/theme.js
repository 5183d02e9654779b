/** The theme: the system's, light or dark. The browser remembers which one was chosen. Runs before the page is drawn. */

import { read, write } from "./stored.js";

const DARK = matchMedia("(prefers-color-scheme: dark)");
export const THEMES = ["system", "light", "dark"];

export const theme = () => (THEMES.includes(read("theme")) ? read("theme") : "system");

export function setTheme(name) {
  write("theme", name);
  apply();
}

function apply() {
  const asked = theme();
  document.documentElement.dataset.theme = asked === "system" ? (DARK.matches ? "dark" : "light") : asked;
}

DARK.addEventListener("change", apply);
apply();
