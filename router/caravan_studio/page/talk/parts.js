/** The parts of an answer: texts, thoughts and calls of tools. Each part shows one item, also while it grows. */

import { element } from "../base/dom.js";
import { textOf } from "./entries.js";
import { GrowingMarkdown, plain } from "./markdown.js";

/** Returns `{node, update(item, growing)}` for an item. */
export function partOf(item) {
  if (item.type === "message") return textPart();
  if (item.type === "reasoning") return thoughtPart();
  if (item.type.endsWith("_output")) return outputPart();
  if (item.type.endsWith("_call")) return callPart();
  return { node: element("p", { class: "quiet" }, `(${item.type})`), update() {} };
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
      given.textContent = indented(item.arguments ?? item.input ?? "").slice(0, 100_000);
    },
  };
}

function outputPart() {
  const given = element("pre", { tabIndex: 0 });
  return {
    node: element("details", { class: "call" }, element("summary", {}, "Output of the tool"), given),
    update(item) {
      const output = typeof item.output === "string" ? item.output : JSON.stringify(item.output);
      given.textContent = indented(output).slice(0, 100_000);
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
