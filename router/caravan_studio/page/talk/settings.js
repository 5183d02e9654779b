/** The settings of answers. The names and ranges of the sampling parameters are those of the server's own description. */

import { getJson } from "../base/api.js";
import { button, byId, element, labelled } from "../base/dom.js";
import { attempt } from "../base/notices.js";
import { chosenModel } from "../base/models.js";
import { read, write } from "../base/stored.js";

const NAME = "settings";
const FIRST = ["temperature", "top_p", "top_k", "min_p", "seed"];
const EFFORTS = ["", "none", "minimal", "low", "medium", "high"];

const NONE = { instructions: "", effort: "", tools: "", most: null, sampling: {}, dropsOldest: false, columns: [] };
const MOST_COLUMNS = 6;

/** Returns what is set: `{instructions, effort, tools, most, sampling, dropsOldest, columns}`. */
const settings = () => ({ ...NONE, ...read(NAME, {}) });
const set = (changed) => write(NAME, { ...settings(), ...changed });

/** Returns the fields of a request for a response. */
export function responseFields() {
  const { instructions, effort, tools, most, sampling, dropsOldest } = settings();
  const fields = { model: chosenModel(), ...sampling };
  if (dropsOldest) fields.truncation = "auto";
  if (instructions.trim()) fields.instructions = instructions;
  if (effort) fields.reasoning = { effort };
  if (most) fields.max_output_tokens = most;
  if (tools.trim()) fields.tools = JSON.parse(tools);
  return fields;
}

/** Whether turns are dropped that no longer fit into the context. */
export const dropsOldest = () => settings().dropsOldest;
export const dropOldest = (drops) => set({ dropsOldest: drops });

/** Returns the sampling parameters that each of several answers has of its own. */
export const columnSettings = () => Array.from({ length: MOST_COLUMNS }, (_, at) => settings().columns[at] ?? {});

export function setColumn(at, name, value) {
  const columns = columnSettings();
  columns[at] = { ...columns[at], [name]: value };
  set({ columns });
}

/** Returns the fields of a request for a completion. */
export function completionFields() {
  const { most, sampling } = settings();
  return { model: chosenModel(), ...sampling, ...(most ? { max_tokens: most } : {}) };
}

export function startSettings(close) {
  const panel = byId("settings");
  panel.append(
    element("header", {}, element("h2", {}, "Settings"), button("Close", close, { class: "plain" })),
    textField("Instructions", "instructions", 3, "The system message before the conversation."),
    numberField("Longest answer, in tokens", "most", { type: "integer", minimum: 1 }),
    effortField(),
  );
  const sampling = element("div");
  panel.append(element("h3", {}, "Sampling"), sampling, toolsField());
  return () => sampling.childElementCount || attempt(async () => sampling.append(...(await samplingFields())));
}

function textField(label, name, rows, hint) {
  const field = element("textarea", { rows, value: settings()[name], onchange: () => set({ [name]: field.value }) });
  return labelled(label, field, element("span", { class: "quiet" }, hint));
}

function effortField() {
  const options = EFFORTS.map((effort) => element("option", { value: effort }, effort || "as the model does"));
  const field = element("select", { onchange: () => set({ effort: field.value }) }, options);
  field.value = settings().effort;
  return labelled("Thinking", field);
}

function toolsField() {
  const field = textField("Tools", "tools", 4, "A JSON list of function tools, as in OpenAI's responses.");
  const text = field.querySelector("textarea");
  text.classList.add("mono");
  text.addEventListener("input", () => text.setCustomValidity(problemOf(text.value)));
  text.addEventListener("change", () => text.reportValidity());
  return field;
}

function problemOf(tools) {
  try {
    return !tools.trim() || Array.isArray(JSON.parse(tools)) ? "" : "This is no list.";
  } catch (error) {
    return error.message;
  }
}

async function samplingFields() {
  const { properties } = (await getJson("openapi.json")).components.schemas.SamplingFields;
  const numbers = Object.entries(properties).flatMap(([name, { anyOf }]) => {
    const kind = anyOf.find(({ type }) => type === "number" || type === "integer");
    return kind ? [[name, kind]] : [];
  });
  const fieldOf = ([name, kind]) => numberField(name, name, kind, true);
  const isFirst = ([name]) => FIRST.includes(name);
  const first = FIRST.flatMap((name) => numbers.filter(([one]) => one === name));
  const more = element(
    "details",
    {},
    element("summary", {}, "More parameters"),
    numbers.filter((one) => !isFirst(one)).map(fieldOf),
  );
  return [...first.map(fieldOf), more];
}

/** Returns a field of a number that may be empty, which means the server's default. `sampled`: it is a sampling parameter. */
function numberField(label, name, kind, sampled = false) {
  const least = kind.minimum ?? kind.exclusiveMinimum;
  const value = (sampled ? settings().sampling : settings())[name];
  const field = element("input", {
    type: "number",
    inputMode: "decimal",
    min: String(least),
    max: kind.maximum === undefined ? null : String(kind.maximum),
    step: kind.type === "integer" ? "1" : "any",
    placeholder: "default",
    value: value ?? "",
  });
  field.addEventListener("change", () => {
    if (!field.reportValidity()) return;
    const given = field.value === "" ? undefined : Number(field.value);
    set(sampled ? { sampling: { ...settings().sampling, [name]: given } } : { [name]: given });
  });
  const range = kind.maximum === undefined ? `from ${least}` : `${least} to ${kind.maximum}`;
  return labelled(label, field, element("span", { class: "quiet" }, range));
}
