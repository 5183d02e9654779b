/** How much of the model's context the conversation takes, and what is done when it is full. */

import { getJson } from "../base/api.js";
import { byId, element } from "../base/dom.js";
import { count } from "../base/format.js";
import { chosenModel, onModels } from "../base/models.js";
import { dropOldest, dropsOldest } from "./settings.js";

// Below this share nobody needs to decide.
const NOTED = 0.6;

export class ContextMeter {
  #sizes = new Map();
  #conversation = null;

  constructor() {
    this.bar = element("meter", { min: 0, "aria-label": "Context" });
    this.told = element("span", { title: "Tokens of the conversation, of those that the model can read" });
    this.drop = element("input", { type: "checkbox", onchange: () => dropOldest(this.drop.checked) });
    const label = " Drop the oldest turns when the context is full";
    this.choice = element("label", { class: "drops-oldest quiet", hidden: true }, this.drop, label);
    this.box = element("span", { class: "context quiet", hidden: true }, this.bar, this.told);
    document.querySelector(".composer-more").append(this.box);
    byId("composer").before(this.choice);
    onModels(() => this.#conversation && this.show(this.#conversation));
  }

  show(conversation) {
    this.#conversation = conversation;
    const usage = conversation.path.findLast((node) => node.usage)?.usage;
    const size = this.#sizes.get(chosenModel());
    if (size === undefined && usage) this.#read(chosenModel());
    this.box.hidden = this.choice.hidden = !usage || !size;
    if (this.box.hidden) return;
    const used = usage.input + usage.output;
    Object.assign(this.bar, { max: size, high: 0.9 * size, value: used });
    this.told.textContent = `${count(used)} of ${count(size)} tokens`;
    this.drop.checked = dropsOldest();
    this.choice.hidden = used < NOTED * size && !dropsOldest();
  }

  /** Reads the size of a model's context. One that is not loaded has none yet. */
  async #read(model) {
    this.#sizes.set(model, 0);
    try {
      const query = model ? `?model=${encodeURIComponent(model)}` : "";
      this.#sizes.set(model, (await getJson(`props${query}`)).default_generation_settings.n_ctx);
      this.show(this.#conversation);
    } catch {
      this.#sizes.delete(model);
    }
  }
}
