/** The models by name, with their state, and the one that is chosen. */

import { ApiError, getJson } from "./api.js";
import { byId, element } from "./dom.js";
import { read, write } from "./stored.js";

const REFRESH_MS = 5000;
const changes = new EventTarget();

let models = [];

/** Returns the chosen model's name; "" for the server's default. */
export const chosenModel = () => byId("model").value;
export const listedModels = () => models;
export const onModels = (listener) => changes.addEventListener("change", listener);

async function refreshModels() {
  try {
    models = (await getJson("v1/models")).data;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    models = [];
  }
  show();
  changes.dispatchEvent(new Event("change"));
}

function show() {
  const select = byId("model");
  const chosen = select.value || read("model", "");
  const labels = models.length ? models.map(label) : ["No model is up"];
  const values = models.length ? models.map((model) => model.id) : [""];
  const shown = [...select.options].map((option) => option.label);
  // A list that is open would close.
  if (shown.join("\n") === labels.join("\n")) return;
  select.replaceChildren(
    ...labels.map((text, at) => element("option", { value: values[at], selected: values[at] === chosen }, text)),
  );
}

function label(model) {
  const state = model.status?.failed ? "failed" : model.status?.value;
  const name = model.parent ? `${model.id} (adapter)` : model.id;
  return state && state !== "loaded" ? `${name}: ${state}` : name;
}

export function startModels() {
  byId("model").addEventListener("change", () => {
    write("model", chosenModel());
    changes.dispatchEvent(new Event("change"));
  });
  refreshModels();
  setInterval(() => document.hidden || refreshModels(), REFRESH_MS);
}
