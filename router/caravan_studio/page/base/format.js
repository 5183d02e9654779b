/** Numbers and times as people read them. */

export const count = (number) => Math.round(number).toLocaleString("en");

export function few(number, digits = 1) {
  return number >= 100 ? count(number) : number.toFixed(digits);
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172_800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86_400)} days`;
}

export function bytes(value) {
  if (value < 1000) return `${value} B`;
  const units = ["kB", "MB", "GB", "TB"];
  const power = Math.min(units.length, Math.floor(Math.log10(value) / 3));
  return `${few(value / 1000 ** power)} ${units[power - 1]}`;
}

export const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** Returns the first words of a text, on one line. */
export function beginning(text, characters = 60) {
  const line = text
    .slice(0, characters * 4)
    .replace(/\s+/g, " ")
    .trim();
  return line.length > characters ? `${line.slice(0, characters)}…` : line;
}
