/** The view to complete a text as it is, token by token. */

import { postForEvents } from "../base/api.js";
import { button, byId, element, labelled } from "../base/dom.js";
import { count } from "../base/format.js";
import { announce, attempt } from "../base/notices.js";
import { addView } from "../base/views.js";
import { tokensFrom, tokenView } from "./probabilities.js";
import { completionFields } from "./settings.js";

const ALTERNATIVES = 5;
const MOST_TOKENS = 100;
const HINT = "Control and Enter complete, Escape stops";

class Completion {
  #abort = null;
  #text = "";

  constructor(box) {
    this.prompt = element("textarea", { rows: 8, class: "mono", required: true });
    this.go = element("button", { type: "submit", class: "primary" }, "Complete");
    this.stop = button("Stop", () => this.#abort.abort(), { hidden: true });
    this.take = button("Add to the prompt", () => this.#take(), { hidden: true });
    this.told = element("span", { class: "quiet" }, HINT);
    this.result = element("div", { class: "card", hidden: true });
    const row = element("div", { class: "row" }, this.go, this.stop, this.take, this.told);
    const heading = element("h2", {}, "Complete");
    const form = element("form", { class: "completion" }, heading, labelled("Prompt", this.prompt), row, this.result);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      attempt(() => this.#complete());
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.ctrlKey && !this.go.disabled) form.requestSubmit();
      if (event.key === "Escape") this.#abort?.abort();
    });
    box.append(form);
  }

  async #complete() {
    this.#abort = new AbortController();
    this.#text = "";
    const view = tokenView([]);
    this.result.replaceChildren(view);
    this.#show({ busy: true });
    const body = { ...this.#fields(), stream: true, stream_options: { include_usage: true } };
    try {
      for await (const { data } of postForEvents("v1/completions", body, this.#abort.signal)) this.#add(data, view);
      announce("The text is complete.");
    } finally {
      this.#show({ busy: false });
    }
  }

  #fields() {
    return { max_tokens: MOST_TOKENS, ...completionFields(), prompt: this.prompt.value, logprobs: ALTERNATIVES };
  }

  #add(data, view) {
    if (data.error) throw new Error(data.error.message);
    const [choice] = data.choices;
    this.#text += choice?.text ?? "";
    if (choice?.logprobs) tokensFrom(choice.logprobs).forEach(view.add);
    const usage = data.usage;
    if (usage)
      this.told.textContent = `${count(usage.completion_tokens)} tokens, prompt of ${count(usage.prompt_tokens)}`;
  }

  #take() {
    this.prompt.value += this.#text;
    this.#text = "";
    this.#show({ busy: false });
    this.prompt.focus();
  }

  #show({ busy }) {
    this.go.disabled = busy;
    this.stop.hidden = !busy;
    this.take.hidden = busy || !this.#text;
    this.result.hidden = false;
  }
}

export function startCompletion() {
  const completion = new Completion(byId("complete"));
  addView("complete", { show: () => completion.prompt.focus() });
}
