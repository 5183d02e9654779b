/** The view of the fleet, for operators: shards, models and cached prefixes, and what can be done to them. */

import { ApiError, getJson } from "../base/api.js";
import { byId, element } from "../base/dom.js";
import { nameShards } from "../base/shards.js";
import { addView } from "../base/views.js";
import { modelTable } from "./models.js";
import { prefixTables } from "./prefixes.js";
import { shardTable } from "./shards.js";

const REFRESH_MS = 2000;

let timer = null;

export function startFleet() {
  byId("fleet").append(element("div", { class: "fleet" }));
  addView("fleet", {
    show: () => {
      clearInterval(timer);
      refresh();
      timer = setInterval(refresh, REFRESH_MS);
    },
    hide: () => clearInterval(timer),
  });
}

/** Reads everything anew, unless a person is about to press a button, which would move. */
async function refresh() {
  const box = byId("fleet").firstChild;
  if (document.hidden || box.querySelector("button:active")) return;
  try {
    const read = ["admin/shards", "admin/prefixes", "v1/models"].map((path) => getJson(path));
    const [{ shards }, prefixes, { data: models }] = await Promise.all(read);
    nameShards(shards);
    show(box, [shardTable(shards, refresh), modelTable(models, refresh), ...prefixTables(prefixes, refresh)]);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    const refused = [403, 404].includes(error.status);
    if (refused) clearInterval(timer);
    const told =
      error.status === 403
        ? "The fleet is shown to operators: with a key of one, or without keys on the server's own host."
        : error.message;
    show(box, [element("p", { class: "card" }, told)]);
  }
}

/** Shows new content, and keeps the focus on the button that has the same name in it. */
function show(box, cards) {
  const focused = box.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  box.replaceChildren(...cards);
  if (focused) box.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
}
