/** Files that a message takes along: each becomes a part of the message, in the browser. */

import { element } from "../base/dom.js";
import { bytes } from "../base/format.js";
import { waveOf } from "./sound.js";
import { textOfPdf } from "./pdf.js";

const LONGEST_SIDE = 1536;
const QUALITY = 0.88;
export const MOST_TEXT_BYTES = 1_000_000;
const MOST_PDF_BYTES = 30_000_000;
// What the server takes.
const MOST_SOUND_BYTES = 25_000_000;
const AS_THEY_ARE = { "audio/wav": "wav", "audio/x-wav": "wav", "audio/mpeg": "mp3", "audio/flac": "flac" };

/**
 * Returns `{name, kind, size, part, preview}` of a file; `part` is what the API takes. `reads`: whether the model reads
 * "image" or "audio". Throws an error that names the file and the reason.
 */
export async function attachmentOf(file, reads) {
  const kind = kindOf(file);
  const made = { name: file.name || "pasted file", kind, size: file.size };
  if (kind === "image" && !reads("image")) refuse(made, "the model reads no images");
  if (kind === "audio" && !reads("audio")) refuse(made, "the model reads no audio");
  if (kind === "image") made.part = { type: "input_image", image_url: (made.preview = await smaller(file, made)) };
  else if (kind === "audio") made.part = { type: "input_audio", input_audio: await soundOf(file, made) };
  else made.part = textPart(made.name, await textOf(file, made));
  return made;
}

function refuse({ name }, reason) {
  throw new Error(`${name} was not added: ${reason}.`);
}

function kindOf({ name, type }) {
  if (type.startsWith("image/") && type !== "image/svg+xml") return "image";
  if (type.startsWith("audio/")) return "audio";
  return type === "application/pdf" || /\.pdf$/i.test(name) ? "pdf" : "text";
}

function limit(file, made, most) {
  if (file.size > most) refuse(made, `it has ${bytes(file.size)}, and ${bytes(most)} is the most`);
}

async function textOf(file, made) {
  limit(file, made, made.kind === "pdf" ? MOST_PDF_BYTES : MOST_TEXT_BYTES);
  const content = new Uint8Array(await file.arrayBuffer());
  if (made.kind !== "pdf") return decoded(content, made);
  let text = "";
  try {
    text = await textOfPdf(content);
  } catch (error) {
    // Other errors come of a file that is damaged.
    refuse(made, error.constructor === Error ? error.message : "it is damaged");
  }
  if (!text.trim()) refuse(made, "it has no text that can be read; a scan is an image");
  if (text.length > MOST_TEXT_BYTES) refuse(made, `its text has ${bytes(text.length)}, too much for one message`);
  return text;
}

function decoded(content, made) {
  const wide = (content[0] === 0xff && content[1] === 0xfe) || (content[0] === 0xfe && content[1] === 0xff);
  const encoding = wide ? (content[0] === 0xff ? "utf-16le" : "utf-16be") : "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(content);
    if (!text.includes("\0")) return text.replaceAll("\r\n", "\n");
  } catch {
    // It is told below.
  }
  return refuse(made, "it is no text, PDF, image or audio file");
}

/** Returns a picture as the URL of a JPEG that is no larger than a model needs. */
async function smaller(file, made) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    refuse(made, "it is not an image that this browser can read");
  }
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas", {
    width: Math.round(bitmap.width * scale),
    height: Math.round(bitmap.height * scale),
  });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}

async function soundOf(file, made) {
  let [sound, format] = [file, AS_THEY_ARE[file.type]];
  if (!format) {
    try {
      [sound, format] = [await waveOf(await file.arrayBuffer()), "wav"];
    } catch {
      refuse(made, "it is not audio that this browser can read");
    }
  }
  limit(sound, made, MOST_SOUND_BYTES);
  return { data: await base64Of(sound), format };
}

async function base64Of(blob) {
  const reader = new FileReader();
  const done = new Promise((resolve, reject) => {
    reader.addEventListener("load", resolve);
    reader.addEventListener("error", () => reject(reader.error));
  });
  reader.readAsDataURL(blob);
  await done;
  return reader.result.slice(reader.result.indexOf(",") + 1);
}

/** Returns the part that shows a model a text file. `fileTexts` finds it again. */
function textPart(name, text) {
  const safe = name.replace(/["\n<>]/g, "_");
  return { type: "input_text", text: `<file name="${safe}">\n${text.replace(/\n$/, "")}\n</file>\n\n` };
}

const FILE = /<file name="([^"\n<>]+)">\n([^]*?)\n<\/file>\n*/g;

/** Splits a text of a message at the files in it: `[{text}, {name, text}, …]`. */
export function fileTexts(text) {
  const pieces = [];
  let at = 0;
  for (const match of text.matchAll(FILE)) {
    if (match.index > at) pieces.push({ text: text.slice(at, match.index) });
    pieces.push({ name: match[1], text: match[2] });
    at = match.index + match[0].length;
  }
  if (at < text.length) pieces.push({ text: text.slice(at) });
  return pieces;
}
