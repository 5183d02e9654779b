/** The button that switches between the themes. */

import { byId } from "./dom.js";
import { icon } from "./icons.js";
import { announce } from "./notices.js";
import { THEMES, setTheme, theme } from "./theme.js";

const ICONS = { system: "half", light: "sun", dark: "moon" };

export function startThemeButton() {
  const button = byId("theme");
  const show = () => {
    const label = `Theme: ${theme()}`;
    button.replaceChildren(icon(ICONS[theme()]));
    button.setAttribute("aria-label", label);
    button.title = label;
  };
  button.addEventListener("click", () => {
    setTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
    show();
    announce(button.title);
  });
  show();
}
