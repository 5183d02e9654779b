/** What answers side by side have of their own: sampling parameters, each in place of the one in the settings. */

import { byId, element } from "../base/dom.js";
import { columnSettings, setColumn } from "./settings.js";

const FIELDS = { temperature: [0, 100], top_p: [0, 1], top_k: [0, null], min_p: [0, 1], seed: [0, null] };

export class Columns {
  /** `answers`: the control with the number of answers. */
  constructor(answers) {
    this.rows = element("div", { class: "columns-fields" });
    this.box = element(
      "details",
      { class: "columns", hidden: true },
      element("summary", {}, "Sampling of each answer"),
      this.rows,
    );
    byId("composer").before(this.box);
    const show = () => this.#show(Number(answers.value));
    answers.addEventListener("change", show);
    show();
  }

  /** Returns the own settings of this many answers. */
  of(answers) {
    return answers === 1 ? [{}] : columnSettings().slice(0, answers);
  }

  #show(answers) {
    this.box.hidden = answers < 2;
    this.rows.replaceChildren(...Array.from({ length: answers }, (_, at) => this.#row(at)));
  }

  #row(at) {
    const fields = Object.entries(FIELDS).map(([name, [min, max]]) => {
      const field = element("input", {
        type: "number",
        inputMode: "decimal",
        min: String(min),
        max: max === null ? null : String(max),
        step: name === "seed" || name === "top_k" ? "1" : "any",
        placeholder: "as set",
        value: columnSettings()[at][name] ?? "",
        "aria-label": `${name} of answer ${at + 1}`,
      });
      field.addEventListener("change", () => {
        if (field.reportValidity()) setColumn(at, name, field.value === "" ? undefined : Number(field.value));
      });
      return element("label", {}, element("span", { class: "quiet" }, name), field);
    });
    return element("fieldset", {}, element("legend", {}, `Answer ${at + 1}`), fields);
  }
}
