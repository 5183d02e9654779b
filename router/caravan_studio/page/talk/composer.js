/** The field for a message, with what sends it and what stops an answer. */

import { button, byId, element } from "../base/dom.js";
import { Pictures } from "./pictures.js";

const MOST_ANSWERS = 6;

export class Composer {
  /** `send` gets the text, the number of answers and the parts that are pictures; `stop` nothing. */
  constructor({ send, stop }) {
    this.text = element("textarea", { rows: 1, placeholder: "Message", "aria-label": "Message" });
    const numbers = Array.from({ length: MOST_ANSWERS }, (_, at) => String(at + 1));
    const options = numbers.map((number) =>
      element("option", { value: number }, number === "1" ? "1 answer" : `${number} answers`),
    );
    this.answers = element("select", { "aria-label": "Answers side by side" }, options);
    this.send = element("button", { type: "submit", class: "primary" }, "Send");
    this.stop = button("Stop", stop, { hidden: true });
    this.hint = element("span", { class: "quiet" }, "Enter sends, Shift and Enter begin a line, Escape stops");
    const form = byId("composer");
    this.pictures = new Pictures(this.text);
    const { opener, file, shown } = this.pictures;
    form.append(
      shown,
      this.text,
      element(
        "div",
        { class: "row" },
        this.answers,
        opener,
        file,
        this.hint,
        element("span", { class: "row end" }, this.stop, this.send),
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
    if (!text.trim() || this.send.disabled) return;
    this.text.value = "";
    send(text, Number(this.answers.value), this.pictures.take());
  }

  show({ busy, choosing }) {
    this.stop.hidden = !busy;
    this.send.disabled = busy || choosing;
    this.hint.textContent =
      choosing && !busy ? "Choose an answer to go on" : "Enter sends, Shift and Enter begin a line, Escape stops";
  }
}
