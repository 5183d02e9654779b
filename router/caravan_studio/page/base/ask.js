/** Asks before something is done that cannot be undone. */

import { button, element } from "./dom.js";

/** Returns whether the answer to a question was the `action`; Escape and Cancel are no. */
export function ask(question, action, details = "") {
  return new Promise((resolve) => {
    const dialog = element("dialog", { class: "ask", "aria-labelledby": "ask-question" });
    const answer = (agreed) => () => {
      dialog.returnValue = agreed ? "yes" : "";
      dialog.close();
    };
    dialog.append(
      element("h2", { id: "ask-question" }, question),
      details ? element("p", {}, details) : "",
      element(
        "div",
        { class: "row end" },
        button("Cancel", answer(false)),
        button(action, answer(true), { class: "danger" }),
      ),
    );
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
