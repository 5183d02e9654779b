/** The field for a message, with what sends it and what stops an answer. */

import { byId, element } from "../base/dom.js";
import { icon, iconButton } from "../base/icons.js";
import { Attachments } from "./attachments.js";

const MOST_ANSWERS = 6;
const HINT = "Enter sends, Shift+Enter begins a line, Escape stops";

export class Composer {
  /** `send` gets the text, the number of answers and the parts that are files; `stop` nothing. */
  constructor({ send, stop }) {
    this.text = element("textarea", { rows: 1, placeholder: "Message", "aria-label": "Message" });
    const numbers = Array.from({ length: MOST_ANSWERS }, (_, at) => String(at + 1));
    const options = numbers.map((number) =>
      element("option", { value: number }, number === "1" ? "1 answer" : `${number} answers`),
    );
    this.answers = element("select", { "aria-label": "Answers side by side" }, options);
    // What is sent before a conversation is read, and shown, would belong to none.
    this.send = element(
      "button",
      { type: "submit", class: "primary round", "aria-label": "Send", title: "Send", disabled: true },
      icon("send"),
    );
    this.stop = iconButton("stop", "Stop", stop, { class: "round", hidden: true });
    this.hint = element("span", { class: "quiet hint" }, HINT);
    this.attachments = new Attachments(this.text);
    const { opener, input, shown } = this.attachments;
    const form = byId("composer");
    form.append(
      element(
        "div",
        { class: "composer-box" },
        shown,
        this.text,
        element("div", { class: "composer-start" }, opener, input),
        element("div", { class: "composer-more" }, this.answers, this.hint),
        element("div", { class: "composer-end" }, this.stop, this.send),
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit(send);
    });
    this.text.addEventListener("keydown", (event) => {
      // A key that ends the input of a character, such as in Japanese, sends nothing.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#submit(send);
    });
  }

  #submit(send) {
    const text = this.text.value;
    if (!(text.trim() || this.attachments.any) || this.send.disabled) return;
    this.text.value = "";
    send(text, Number(this.answers.value), this.attachments.take());
  }

  show({ busy, choosing }) {
    this.stop.hidden = !busy;
    this.send.hidden = busy;
    this.send.disabled = busy || choosing;
    this.hint.textContent = choosing && !busy ? "Choose an answer to go on" : HINT;
  }
}
