/** Starts the page: the key screen where a key is needed, else the views. */

import { startCompletion } from "../talk/completion.js";
import { startTalk } from "../talk/talk.js";
import { ApiError, getJson } from "./api.js";
import { byId } from "./dom.js";
import { startFleet } from "../fleet/fleet.js";
import { drawIcons } from "./icons.js";
import { dropKey, key, setKey } from "./key.js";
import { startModels } from "./models.js";
import { notice } from "./notices.js";
import { startThemeButton } from "./theme_button.js";
import { startViews } from "./views.js";
import { startWatch } from "../watch/watch.js";

let started = false;

async function begin() {
  if (document.documentElement.dataset.needsKey === "yes" && !key()) return showKeyScreen("");
  let refusal = "";
  try {
    await getJson("v1/models");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    // 503: no model is up yet, which the views tell.
    if (error.status === 401) refusal = "This key is unknown.";
    else if (error.status !== 503) notice(error.message, "error");
  }
  if (refusal) return showKeyScreen(refusal);
  byId("key-screen").hidden = true;
  byId("app").hidden = false;
  byId("sign-out").hidden = !key();
  if (started) return undefined;
  started = true;
  drawIcons();
  startThemeButton();
  startModels();
  startTalk();
  startCompletion();
  startWatch();
  startFleet();
  startViews();
  return undefined;
}

function showKeyScreen(error) {
  dropKey();
  // What was shown belongs to the key before.
  if (started) return location.reload();
  byId("key-error").textContent = error;
  byId("key-screen").hidden = false;
  byId("key-field").focus();
  return undefined;
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = byId("key-field");
  setKey(field.value.trim());
  field.value = "";
  begin();
});
byId("sign-out").addEventListener("click", () => showKeyScreen(""));
addEventListener("caravan:key-needed", () => started && showKeyScreen(""));

begin();
