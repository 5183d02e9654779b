/** The text of a PDF file. It is read in the browser; layout, pictures and scanned pages are left out. */

import { fontOf } from "./pdf_fonts.js";
import { Name, PdfObjects, Reader } from "./pdf_objects.js";

const MOST_FORMS = 8;
// A gap of this many thousandths of the font's size is a space between words.
const SPACE = 180;

/** Returns the text of a file. Throws an error with the reason if it cannot be read. */
export async function textOfPdf(content) {
  const objects = await PdfObjects.of(content);
  const texts = [];
  for (const { page, resources } of objects.pages()) {
    const streams = [objects.at(page, "Contents") ?? []].flat().map((one) => objects.get(one));
    const parts = [];
    for (const stream of streams) if (stream?.dictionary) parts.push(await objects.contentOf(stream));
    const writer = new Writer();
    await run(objects, parts.join("\n"), resources, writer, 0);
    texts.push(writer.text.replace(/[ \t]+\n/g, "\n").trim());
  }
  return texts.filter(Boolean).join("\n\n");
}

/** Puts texts at places into lines: a new height begins a line, a gap is a space. */
class Writer {
  text = "";
  #last = null;

  add(text, place, size) {
    if (!text) return;
    if (this.#last) {
      const down = this.#last.y - place.y;
      if (Math.abs(down) > size * 0.4) this.text += Math.abs(down) > size * 1.8 ? "\n\n" : "\n";
      else if (place.x - this.#last.x > size * 0.2 && !/\s$/.test(this.text) && !/^\s/.test(text)) this.text += " ";
    }
    this.text += text;
  }

  moved(place) {
    this.#last = place;
  }
}

const times = ([a, b, c, d, e, f], [g, h, i, j, k, l]) => [
  a * g + b * i,
  a * h + b * j,
  c * g + d * i,
  c * h + d * j,
  e * g + f * i + k,
  e * h + f * j + l,
];

/** Runs the operators of a page or a form that show text (ISO 32000-1, chapter 9). */
async function run(objects, content, resources, writer, depth, outer = [1, 0, 0, 1, 0, 0]) {
  const fonts = new Map();
  const reader = new Reader(content);
  let [state, given] = [{ base: outer, font: null, size: 1, leading: 0 }, []];
  let [line, at] = [outer, outer];
  const saved = [];
  const begin = (matrix) => (line = at = matrix);
  const down = (x, y) => begin(times([1, 0, 0, 1, x, y], line));
  const show = (bytes) => {
    const placed = times(at, state.base);
    const size = state.size * Math.hypot(placed[2], placed[3]);
    const { text, width } = state.font?.read(bytes) ?? { text: "", width: 0 };
    writer.add(text, { x: placed[4], y: placed[5] }, size);
    at = times([1, 0, 0, 1, (width / 1000) * state.size, 0], at);
    const end = times(at, state.base);
    writer.moved({ x: end[4], y: end[5] });
  };
  const showAll = (parts) => {
    for (const part of parts) {
      if (typeof part !== "number") show(part?.bytes ?? "");
      else {
        if (-part > SPACE && !/\s$/.test(writer.text)) writer.text += " ";
        at = times([1, 0, 0, 1, (-part / 1000) * state.size, 0], at);
        const end = times(at, state.base);
        writer.moved({ x: end[4], y: end[5] });
      }
    }
  };
  for (let value = reader.next(); value !== undefined; value = reader.next()) {
    if (!value?.operator) {
      given.push(value);
      continue;
    }
    const numbers = given.filter((one) => typeof one === "number");
    switch (value.operator) {
      case "q":
        saved.push(state);
        break;
      case "Q":
        state = saved.pop() ?? state;
        break;
      case "cm":
        if (numbers.length === 6) state = { ...state, base: times(numbers, state.base) };
        break;
      case "BT":
        begin([1, 0, 0, 1, 0, 0]);
        break;
      case "Tf": {
        const name = String(given[0]);
        if (!fonts.has(name)) fonts.set(name, await fontOf(objects, objects.at(objects.at(resources, "Font"), name)));
        state = { ...state, font: fonts.get(name), size: numbers[0] ?? 1 };
        break;
      }
      case "TL":
        state = { ...state, leading: numbers[0] ?? 0 };
        break;
      case "Tm":
        if (numbers.length === 6) begin(numbers);
        break;
      case "TD":
        state = { ...state, leading: -(numbers[1] ?? 0) };
        down(numbers[0] ?? 0, numbers[1] ?? 0);
        break;
      case "Td":
        down(numbers[0] ?? 0, numbers[1] ?? 0);
        break;
      case "T*":
        down(0, -state.leading);
        break;
      case "Tj":
        show(given.at(-1)?.bytes ?? "");
        break;
      case "'":
      case '"':
        down(0, -state.leading);
        show(given.at(-1)?.bytes ?? "");
        break;
      case "TJ":
        if (Array.isArray(given.at(-1))) showAll(given.at(-1));
        break;
      case "Do": {
        const form = given[0] instanceof Name && objects.at(objects.at(resources, "XObject"), String(given[0]));
        if (form?.dictionary && String(objects.at(form, "Subtype")) === "Form" && depth < MOST_FORMS) {
          const matrix = objects.at(form, "Matrix");
          const base = matrix?.length === 6 ? times(matrix, state.base) : state.base;
          const own = objects.at(form, "Resources") ?? resources;
          await run(objects, await objects.contentOf(form), own, writer, depth + 1, base);
        }
        break;
      }
      case "BI": {
        // The bytes of a picture in the page are no operators.
        const end = /\sEI\s/g;
        end.lastIndex = reader.at;
        reader.at = end.test(content) ? end.lastIndex : content.length;
        break;
      }
    }
    given = [];
  }
}
