/** The colour of a request, and the colours of the theme as a canvas needs them. */

// Neighbours in number are far apart in hue.
const GOLDEN_ANGLE = 137.508;

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const named = (name) => style.getPropertyValue(`--${name}`).trim();
  const dark = document.documentElement.dataset.theme === "dark";
  const lightness = dark ? 62 : 50;
  return {
    ...Object.fromEntries(
      ["ground", "surface", "sunken", "line", "text", "quiet", "accent", "danger"].map((name) => [name, named(name)]),
    ),
    ofRequest: (request) => `hsl(${Math.round((request * GOLDEN_ANGLE) % 360)} 55% ${lightness}%)`,
  };
}
