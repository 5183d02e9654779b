/** The parts of an answer: texts, thoughts and calls of tools. Each part shows one item, also while it grows. */

import { element } from "../base/dom.js";
import { bytes } from "../base/format.js";
import { icon } from "../base/icons.js";
import { textOf } from "./entries.js";
import { fileTexts } from "./files.js";
import { GrowingMarkdown, plain } from "./markdown.js";

/** Returns `{node, update(item, growing)}` for an item. */
export function partOf(item) {
  if (item.type === "message") return textPart();
  if (item.type === "reasoning") return thoughtPart();
  if (item.type.endsWith("_output")) return outputPart();
  if (item.type.endsWith("_call")) return callPart();
  return { node: element("p", { class: "quiet" }, `(${item.type})`), update() {} };
}

const MOST_SHOWN = 100_000;

/** Returns the nodes of a part of a message that a user wrote: text, with files folded; an image or audio. */
export function messagePart(part) {
  if (part.image_url?.startsWith?.("data:image/")) {
    return [element("img", { src: part.image_url, alt: "Image that was sent" })];
  }
  const sound = part.input_audio;
  if (sound?.data && /^\w{2,5}$/.test(sound.format)) {
    const type = sound.format === "mp3" ? "mpeg" : sound.format;
    return [element("audio", { controls: true, src: `data:audio/${type};base64,${sound.data}` })];
  }
  return fileTexts(part.text ?? `(${part.type})`).map(({ name, text }) => {
    if (!name) return element("span", {}, text.slice(0, MOST_SHOWN));
    const size = element("span", { class: "quiet" }, bytes(new Blob([text]).size));
    const summary = element("summary", {}, icon("file"), element("span", {}, name), size);
    const shown = element("pre", { tabIndex: 0, role: "region", "aria-label": name }, text.slice(0, MOST_SHOWN));
    return element("details", { class: "sent-file" }, summary, shown);
  });
}

function textPart() {
  const markdown = new GrowingMarkdown();
  return {
    node: markdown.node,
    update(item, growing) {
      if (growing) markdown.update(textOf(item));
      else markdown.finish(textOf(item));
    },
  };
}

function thoughtPart() {
  const summary = element("summary", {}, "Thinking…");
  const text = element("div", { class: "thought-text" });
  return {
    node: element("details", { class: "thought" }, summary, text),
    update(item, growing) {
      const thought = textOf(item) || (item.summary ?? []).map((part) => part.text).join("\n");
      summary.textContent = growing ? "Thinking…" : "Reasoning";
      text.replaceChildren(...plain(thought));
    },
  };
}

function callPart() {
  const name = element("code");
  const given = element("pre", { tabIndex: 0 });
  return {
    node: element("details", { class: "call" }, element("summary", {}, "Calls ", name), given),
    update(item) {
      name.textContent = item.name;
      given.textContent = indented(item.arguments ?? item.input ?? "").slice(0, MOST_SHOWN);
    },
  };
}

function outputPart() {
  const given = element("pre", { tabIndex: 0 });
  return {
    node: element("details", { class: "call" }, element("summary", {}, "Output of the tool"), given),
    update(item) {
      const output = typeof item.output === "string" ? item.output : JSON.stringify(item.output);
      given.textContent = indented(output).slice(0, MOST_SHOWN);
    },
  };
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
