/** The models, and which of them are loaded. */

import { postJson } from "../base/api.js";
import { bytes } from "../base/format.js";
import { asking, card, state } from "./tables.js";

const COLUMNS = [["Model"], ["State"], ["Actions", "actions"]];

export function modelTable(models, done) {
  const rows = models.map((model) => [
    model.parent ? `${model.id}, an adapter of ${model.parent}` : [model.id, ...(model.aliases ?? [])].join(", "),
    [state(model.status?.failed ? "failed" : (model.status?.value ?? "loaded")), progress(model)],
    model.status ? action(model, done) : "",
  ]);
  return card("Models", COLUMNS, rows, { empty: "No model is up." });
}

function progress({ status }) {
  const download = status?.download;
  return download ? ` ${bytes(download.completed)} of ${bytes(download.total)}` : "";
}

function action({ id, status }, done) {
  const loads = status.value === "unloaded" || status.failed;
  if (!loads && status.value !== "loaded") return "";
  return asking({
    label: loads ? "Load" : "Unload",
    of: id,
    details: loads
      ? "Other models may have to make room for it."
      : "What runs on it ends first. Its next request has it loaded again.",
    action: () => postJson(loads ? "models/load" : "models/unload", { model: id }),
    done,
  });
}
