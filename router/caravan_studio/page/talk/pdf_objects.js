/** The objects of a PDF file (ISO 32000-1, chapter 7), as far as its texts need them. */

// What the streams of a file may unfold to, in bytes: small files can hold very large ones.
const MOST_UNFOLDED = 200_000_000;
const MOST_DEPTH = 100;
const PIECE = 32_768;

/** Returns bytes as a string, one character a byte. The decoder that browsers call Latin-1 has other characters. */
function latin(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += PIECE) text += String.fromCharCode(...bytes.subarray(at, at + PIECE));
  return text;
}

export class Name extends String {}

class Reference {
  constructor(number) {
    this.number = number;
  }
}

/** Reads values and operators from bytes in the form of a Latin-1 string. */
export class Reader {
  constructor(text, at = 0) {
    this.text = text;
    this.at = at;
  }

  /** Returns the next value, `{operator}`, or undefined at the end. Strings are `{bytes}`, one character a byte. */
  next(depth = 0) {
    if (depth > MOST_DEPTH) throw new Error("it is nested too deeply");
    const token = this.#token();
    if (token === undefined) return undefined;
    if (token === "<<") return this.#dictionary(depth);
    if (token === "[") return this.#list("]", depth);
    if (token === "(") return { bytes: this.#string() };
    if (token[0] === "<") return { bytes: ofHex(token.slice(1, -1)) };
    if (token[0] === "/") return new Name(token.slice(1).replace(/#([\da-f]{2})/gi, (_, hex) => ofHex(hex)));
    if (/^[+-]?[\d.]/.test(token)) return this.#number(token);
    if (token === "true" || token === "false") return token === "true";
    return token === "null" ? null : { operator: token };
  }

  #token() {
    const pattern = /(?:[\s\0]+|%[^\r\n]*)*(<<|>>|<[\da-fA-F\s]*>|[[\]({})]|\/[^\s\0<>[\](){}/%]*|[^\s\0<>[\](){}/%]+)/y;
    pattern.lastIndex = this.at;
    const match = pattern.exec(this.text);
    if (!match) return undefined;
    this.at = pattern.lastIndex;
    return match[1];
  }

  #number(token) {
    const pattern = /\s+\d+\s+R\b/y;
    pattern.lastIndex = this.at;
    if (!/^\d+$/.test(token) || !pattern.test(this.text)) return Number.parseFloat(token) || 0;
    this.at = pattern.lastIndex;
    return new Reference(Number(token));
  }

  #list(end, depth) {
    const values = [];
    for (;;) {
      const value = this.next(depth + 1);
      if (value === undefined || value?.operator === end) return values;
      values.push(value);
    }
  }

  #dictionary(depth) {
    const values = this.#list(">>", depth);
    const made = new Map();
    for (let at = 0; at + 1 < values.length; at += 2) made.set(String(values[at]), values[at + 1]);
    return made;
  }

  #string() {
    let [text, open] = ["", 1];
    for (; this.at < this.text.length; this.at += 1) {
      const character = this.text[this.at];
      if (character === "\\") text += this.#escaped();
      else if (character === ")" && (open -= 1) === 0) break;
      else {
        if (character === "(") open += 1;
        text += character;
      }
    }
    this.at += 1;
    return text;
  }

  #escaped() {
    const octal = /^[0-7]{1,3}/.exec(this.text.slice(this.at + 1, this.at + 4));
    if (octal) {
      this.at += octal[0].length;
      return String.fromCharCode(Number.parseInt(octal[0], 8) & 255);
    }
    this.at += 1;
    const named = { n: "\n", r: "\r", t: "\t", b: "\b", f: "\f", "\n": "", "\r": "" };
    return named[this.text[this.at]] ?? this.text[this.at] ?? "";
  }
}

function ofHex(hex) {
  const digits = hex.replace(/\s/g, "");
  return digits.replace(/..?/g, (two) => String.fromCharCode(Number.parseInt(two.padEnd(2, "0"), 16)));
}

function ofBase85(text) {
  const digits = text.replace(/\s/g, "").replace(/~>[^]*$/, "").replaceAll("z", "!!!!!");
  let bytes = "";
  for (let at = 0; at < digits.length; at += 5) {
    const five = digits.slice(at, at + 5);
    let value = 0;
    for (const digit of five.padEnd(5, "u")) value = value * 85 + digit.charCodeAt(0) - 33;
    const four = [24, 16, 8, 0].map((shift) => String.fromCharCode(Math.floor(value / 2 ** shift) & 255));
    bytes += four.slice(0, five.length - 1).join("");
  }
  return bytes;
}

export class PdfObjects {
  #objects = new Map();
  #unfolded = 0;

  /** Reads a file. Throws an error if it is none, or is encrypted. */
  static async of(content) {
    const made = new PdfObjects();
    made.text = latin(content);
    if (!made.text.slice(0, 1024).includes("%PDF-")) throw new Error("it is no PDF file");
    if (/\/Encrypt\s+\d+\s+\d+\s+R/.test(made.text)) throw new Error("it is encrypted");
    // Every object stands behind its number. Looking for them finds what damaged tables of offsets would not.
    for (const found of made.text.matchAll(/(\d{1,10})\s+\d{1,5}\s+obj\b/g))
      made.#objects.set(Number(found[1]), { at: found.index + found[0].length, text: made.text });
    for (const number of [...made.#objects.keys()]) {
      const object = made.get(new Reference(number));
      if (String(object?.dictionary?.get("Type")) === "ObjStm") await made.#readPacked(object);
    }
    return made;
  }

  /** Returns a value, of a reference what it refers to. Streams are `{dictionary, at}`. */
  get(value, depth = 0) {
    if (!(value instanceof Reference)) return value;
    const known = this.#objects.get(value.number);
    if (!known || depth > MOST_DEPTH) return null;
    if (known.value === undefined) {
      const reader = new Reader(known.text, known.at);
      known.value = reader.next() ?? null;
      const stream = /\s*stream\r?\n/y;
      stream.lastIndex = reader.at;
      if (known.value instanceof Map && known.text === this.text && stream.test(this.text))
        known.value = { dictionary: known.value, at: stream.lastIndex };
    }
    return this.get(known.value, depth + 1);
  }

  /** Returns the value of a key of a dictionary or a stream; null if there is none. */
  at(dictionary, key) {
    const held = dictionary?.dictionary ?? dictionary;
    return held instanceof Map ? (this.get(held.get(key)) ?? null) : null;
  }

  /** Returns the content of a stream as a Latin-1 string. */
  async contentOf(stream) {
    const length = this.at(stream, "Length");
    let end = stream.at + length;
    if (typeof length !== "number" || !/^\s*endstream/.test(this.text.slice(end, end + 20)))
      end = this.text.indexOf("endstream", stream.at);
    const content = this.text.slice(stream.at, end < 0 ? undefined : end);
    const filters = [this.at(stream, "Filter") ?? []].flat().map((filter) => String(this.get(filter)));
    let unpacked = content;
    for (const filter of filters) {
      if (/^A(SCII)?85/.test(filter)) unpacked = ofBase85(unpacked);
      else if (/^Fl/.test(filter)) unpacked = await this.#inflated(unpacked);
      else throw new Error(`its texts are packed by ${filters.join(", ")}`);
    }
    return unpacked;
  }

  async #inflated(content) {
    const bytes = Uint8Array.from(content, (character) => character.charCodeAt(0));
    const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")).getReader();
    let text = "";
    try {
      for (let part = await reader.read(); !part.done; part = await reader.read()) {
        text += latin(part.value);
        this.#unfolded += part.value.length;
        if (this.#unfolded > MOST_UNFOLDED) break;
      }
    } catch {
      // What stands before the damage is read, as other readers do.
    }
    if (this.#unfolded > MOST_UNFOLDED) throw new Error("it is too large");
    return text;
  }

  async #readPacked(stream) {
    const text = await this.contentOf(stream);
    const [first, most] = [this.at(stream, "First"), this.at(stream, "N")];
    const reader = new Reader(text);
    for (let number = 0; number < most; number += 1) {
      const [id, offset] = [reader.next(), reader.next()];
      if (typeof id !== "number" || typeof offset !== "number") return;
      this.#objects.set(id, { at: first + offset, text });
    }
  }

  /** Returns the pages in their order, as `{page, resources}`. */
  pages() {
    const all = [...this.#objects.keys()].map((number) => this.get(new Reference(number)));
    const catalog = all.findLast((one) => String(this.at(one, "Type")) === "Catalog");
    const found = [];
    const walk = (node, inherited, depth) => {
      const resources = this.at(node, "Resources") ?? inherited;
      const kids = this.at(node, "Kids");
      if (!Array.isArray(kids)) found.push({ page: node, resources });
      else if (depth < MOST_DEPTH) for (const kid of kids) walk(this.get(kid), resources, depth + 1);
    };
    walk(this.at(catalog, "Pages"), null, 0);
    return found.filter(({ page }) => page instanceof Map);
  }
}
