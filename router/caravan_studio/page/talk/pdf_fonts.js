/** Which characters the bytes of a text in a PDF file are, and how wide: by its font (ISO 32000-1, 9.6 to 9.10). */

import { Reader } from "./pdf_objects.js";

const WIDE = 1000;
const USUAL = 500;
// Names of glyphs that are no letter and no digit, of those that texts have.
const GLYPHS = Object.fromEntries(
  (
    "space=  period=. comma=, hyphen=- colon=: semicolon=; quotesingle=' quotedbl=\" quoteright=’ quoteleft=‘ " +
    "quotedblleft=“ quotedblright=” endash=– emdash=— bullet=• parenleft=( parenright=) bracketleft=[ bracketright=] " +
    "slash=/ exclam=! question=? percent=% ampersand=& plus=+ equal== less=< greater=> at=@ numbersign=# dollar=$ " +
    "underscore=_ asterisk=* bar=| braceleft={ braceright=} asciitilde=~ degree=° section=§ copyright=© germandbls=ß " +
    "adieresis=ä odieresis=ö udieresis=ü Adieresis=Ä Odieresis=Ö Udieresis=Ü eacute=é egrave=è agrave=à ccedilla=ç " +
    "ff=ff fi=fi fl=fl ffi=ffi ffl=ffl zero=0 one=1 two=2 three=3 four=4 five=5 six=6 seven=7 eight=8 nine=9"
  )
    .split(/ (?=[A-Za-z])/)
    .map((pair) => [pair.slice(0, pair.indexOf("=")), pair.slice(pair.indexOf("=") + 1)]),
);

/** Returns `{read(bytes)}` of a font, which gives `{text, width}`; null if there is none. */
export async function fontOf(objects, font) {
  if (!font) return null;
  const composite = String(objects.at(font, "Subtype")) === "Type0";
  const unicode = objects.at(font, "ToUnicode");
  const map = unicode?.dictionary ? cmapOf(await objects.contentOf(unicode)) : null;
  const plain = composite ? null : encodingOf(objects, font);
  const widthOf = composite ? widthsOfComposite(objects, font) : widthsOf(objects, font);
  const size = composite ? (map?.size ?? 2) : 1;
  return {
    read(bytes) {
      let [text, width] = ["", 0];
      for (let at = 0; at < bytes.length; at += size) {
        let code = 0;
        for (const byte of bytes.slice(at, at + size)) code = code * 256 + byte.charCodeAt(0);
        text += map?.texts.get(code) ?? plain?.(code) ?? "";
        width += widthOf(code);
      }
      return { text, width };
    },
  };
}

function encodingOf(objects, font) {
  const encoding = objects.at(font, "Encoding");
  const base = String(encoding instanceof Map ? objects.at(encoding, "BaseEncoding") : encoding);
  const decoder = new TextDecoder(base === "MacRomanEncoding" ? "macintosh" : "windows-1252");
  const differences = new Map();
  let code = 0;
  for (const value of objects.at(encoding, "Differences") ?? []) {
    if (typeof value === "number") code = value;
    else differences.set(code++, characterOf(String(value)));
  }
  return (one) => differences.get(one) ?? decoder.decode(Uint8Array.of(one));
}

function characterOf(glyph) {
  const name = glyph.replace(/\..*/, "");
  const number = /^(?:uni|u)([\dA-F]{4,6})$/.exec(name);
  if (number) return String.fromCodePoint(Math.min(0x10ffff, Number.parseInt(number[1].slice(0, 6), 16)));
  return GLYPHS[name] ?? (name.length === 1 ? name : "");
}

function widthsOf(objects, font) {
  const first = objects.at(font, "FirstChar") ?? 0;
  const widths = objects.at(font, "Widths") ?? [];
  return (code) => numberOr(objects.get(widths[code - first]), USUAL);
}

function widthsOfComposite(objects, font) {
  const inner = objects.get(objects.at(font, "DescendantFonts")?.[0]);
  const usual = numberOr(objects.at(inner, "DW"), WIDE);
  const given = (objects.at(inner, "W") ?? []).map((one) => objects.get(one));
  const widths = new Map();
  for (let at = 0; at + 1 < given.length; ) {
    if (Array.isArray(given[at + 1])) {
      given[at + 1].forEach((width, more) => widths.set(given[at] + more, width));
      at += 2;
    } else {
      const end = Math.min(given[at + 1], given[at] + 65_535);
      for (let code = given[at]; code <= end; code += 1) widths.set(code, given[at + 2]);
      at += 3;
    }
  }
  return (code) => numberOr(widths.get(code), usual);
}

const numberOr = (value, other) => (typeof value === "number" ? value : other);

/** Returns `{texts, size}` of a CMap: the text by code, and the bytes of a code. */
function cmapOf(content) {
  const texts = new Map();
  let [size, given] = [1, []];
  const reader = new Reader(content);
  const number = ({ bytes }) => [...bytes].reduce((sum, byte) => sum * 256 + byte.charCodeAt(0), 0);
  for (let value = reader.next(); value !== undefined; value = reader.next()) {
    if (!value?.operator) {
      given.push(value);
      continue;
    }
    if (value.operator === "endcodespacerange") size = given[0]?.bytes?.length ?? 1;
    if (value.operator === "endbfchar")
      for (let at = 0; at + 1 < given.length; at += 2) texts.set(number(given[at]), wideText(given[at + 1]));
    if (value.operator === "endbfrange")
      for (let at = 0; at + 2 < given.length; at += 3) addRange(texts, number(given[at]), number(given[at + 1]), given[at + 2]);
    given = [];
  }
  return { texts, size };
}

function addRange(texts, first, last, to) {
  for (let code = first; code <= Math.min(last, first + 65_535); code += 1) {
    if (Array.isArray(to)) texts.set(code, wideText(to[code - first] ?? { bytes: "" }));
    else {
      const text = wideText(to);
      texts.set(code, text.slice(0, -1) + String.fromCharCode(text.charCodeAt(text.length - 1) + code - first));
    }
  }
}

/** Returns a text of UTF-16 in two bytes each. */
const wideText = ({ bytes }) => new TextDecoder("utf-16be").decode(Uint8Array.from(bytes ?? "", (one) => one.charCodeAt(0)));
