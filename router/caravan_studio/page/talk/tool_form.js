/** Asks for the output of a tool that the model called. */

import { element, labelled } from "../base/dom.js";

export function toolForm(call, giveOutput) {
  const output = element("textarea", { rows: 3, required: true });
  const form = element(
    "form",
    { class: "card tool-form" },
    labelled(`Output of ${call.name}`, output),
    element("button", { type: "submit", class: "primary" }, "Give it to the model"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    giveOutput(call, output.value);
  });
  return form;
}
