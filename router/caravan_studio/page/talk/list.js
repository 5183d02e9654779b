/** The list of conversations that this browser knows. */

import { button, byId, element } from "../base/dom.js";
import { families } from "./families.js";

export class ConversationList {
  constructor({ open, begin, remove, close }) {
    this.open = open;
    this.remove = remove;
    this.list = element("ul", { class: "families" });
    byId("conversations").append(
      element("header", {}, element("h2", {}, "Conversations"), button("Close", close, { class: "plain only-narrow" })),
      button("New conversation", begin, { class: "new" }),
      this.list,
    );
  }

  show(shownRoot) {
    this.list.replaceChildren(...families().map((family) => this.#line(family, family.root === shownRoot)));
  }

  #line(family, isShown) {
    const open = button(family.title, () => this.open(family), { class: "plain family", dir: "auto" });
    if (isShown) open.setAttribute("aria-current", "true");
    const remove = button("✕", () => this.remove(family), {
      class: "plain small",
      "aria-label": `Delete ${family.title}`,
      title: "Delete",
    });
    return element("li", {}, open, remove);
  }
}
