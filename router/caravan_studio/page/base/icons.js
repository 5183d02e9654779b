/** Icons, drawn as lines of 24 by 24. */

import { element } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 4v7h-7",
  attach: "M20 11.5l-8.3 8.3a5 5 0 0 1-7.1-7.1L13.4 4a3.3 3.3 0 0 1 4.7 4.7l-8.7 8.7a1.7 1.7 0 0 1-2.4-2.4l8-8",
  chart: "M5 20v-7M12 20V4M19 20v-11",
  check: "M4.5 12.5l5 5 10-11",
  close: "M6 6l12 12M18 6L6 18",
  complete: "M4 6h16M4 11h16M4 16h8M16 16v4",
  copy: "M9 9h10v11H9zM5 15V4h10",
  edit: "M4 20l1-4L16.5 4.5l3 3L8 19zM14 7l3 3",
  file: "M6 3h8l5 5v13H6zM14 3v5h5",
  fleet: "M4 4h16v6H4zM4 14h16v6H4zM8 7h.01M8 17h.01",
  fork: "M7 7.5v9M17 7.5v1a4 4 0 0 1-4 4H7M9 5.5a2 2 0 1 1-4 0 2 2 0 0 1 4 0zM19 5.5a2 2 0 1 1-4 0 2 2 0 0 1 4 0zM9 18.5a2 2 0 1 1-4 0 2 2 0 0 1 4 0z",
  go: "M5 12h13M13 6l6 6-6 6",
  half: "M12 3.500a8.5 8.5 0 1 0 0 17zM12 3.500a8.5 8.5 0 0 1 0 17",
  menu: "M4 7h16M4 12h16M4 17h16",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  rewind: "M9 14L4 9l5-5M4 9h10a6 6 0 0 1 0 12h-3",
  send: "M12 20V5M6 11l6-6 6 6",
  settings: "M4 8h7M17 8h3M4 16h3M13 16h7M14 5v6M10 13v6",
  sound: "M9 18V6l10-2v12M9 18a2.5 2.5 0 1 1-5 0 2.5 2.5 0 0 1 5 0zM19 16a2.5 2.5 0 1 1-5 0 2.5 2.5 0 0 1 5 0z",
  stop: "M7 7h10v10H7z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2.500v2M12 19.500v2M2.5 12h2M19.5 12h2M5.3 5.300l1.4 1.400M17.3 17.300l1.4 1.400M5.3 18.700l1.4-1.400M17.3 6.700l1.4-1.4",
  talk: "M4 5h16v11H10l-4.5 4v-4H4z",
  tree: "M12 8v4M6 16v-4h12v4M9.5 3.5h5v4.5h-5zM3.5 16h5v4.5h-5zM15.5 16h5v4.5h-5z",
  watch: "M3 12h4l3-8 4 16 3-8h4",
};

/** Returns an icon that listeners of a screen reader do not notice. */
export function icon(name) {
  const shown = document.createElementNS(SVG, "svg");
  for (const [attribute, value] of [
    ["class", `icon ${name}`],
    ["viewBox", "0 0 24 24"],
    ["aria-hidden", "true"],
  ])
    shown.setAttribute(attribute, value);
  shown.append(document.createElementNS(SVG, "path"));
  shown.firstChild.setAttribute("d", PATHS[name]);
  return shown;
}

/** Returns a button that shows an icon; its label is told by a tooltip and to listeners. */
export function iconButton(name, label, onclick, properties = {}) {
  const { class: classes = "", ...others } = properties;
  return element(
    "button",
    { type: "button", onclick, class: `plain with-icon ${classes}`, "aria-label": label, title: label, ...others },
    icon(name),
  );
}

/** Draws the icons that the HTML names. */
export function drawIcons() {
  for (const place of document.querySelectorAll("[data-icon]")) place.prepend(icon(place.dataset.icon));
}
