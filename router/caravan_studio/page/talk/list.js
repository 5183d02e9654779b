/** The list of the conversations that this browser keeps: to open, find, rename, export, import and delete them. */

import { button, byId, element } from "../base/dom.js";
import { attempt, notice } from "../base/notices.js";
import * as archive from "./archive.js";
import { asJson, asMarkdown, download, readFile } from "./exchange.js";

const SEARCH_MS = 150;

export class ConversationList {
  #records = [];
  #found = null;
  #shown = null;
  #searching = null;

  /** `open` and `rename` get an id; "new" stands for a conversation that is to begin. `remove` gets a record. */
  constructor({ open, rename, remove, close }) {
    Object.assign(this, { open, rename, remove });
    this.list = element("ul", { class: "families" });
    this.search = element("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations" });
    this.search.addEventListener("input", () => {
      clearTimeout(this.#searching);
      this.#searching = setTimeout(() => attempt(() => this.#find()), SEARCH_MS);
    });
    const file = element("input", { type: "file", accept: ".json", hidden: true, "aria-label": "File to import" });
    file.addEventListener("change", () => attempt(() => this.#import(file)));
    byId("conversations").append(
      element("header", {}, element("h2", {}, "Conversations"), button("Close", close, { class: "plain only-narrow" })),
      button("New conversation", () => open("new"), { class: "new" }),
      this.search,
      this.list,
      element(
        "div",
        { class: "row" },
        button("Export all", () => attempt(() => this.#export(this.#records)), { class: "plain small" }),
        button("Import", () => file.click(), { class: "plain small" }),
        file,
      ),
    );
  }

  /** Reads the archive anew. */
  async refresh() {
    this.#records = await archive.conversations();
    if (this.#found) await this.#find();
    this.#place();
  }

  /** Marks the conversation that is shown. */
  show(conversation) {
    const { id, busy } = conversation;
    if (this.#shown === id && this.list.querySelector("[aria-current]")) return;
    this.#shown = id;
    if (!busy || conversation.begun) this.#place();
  }

  async #find() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.#found = words.length ? { words, ids: await archive.matching(words) } : null;
    this.#place();
  }

  #place() {
    // A name that is being written stays.
    if (this.list.querySelector("form")) return;
    const isFound = ({ id, title }) =>
      !this.#found ||
      this.#found.ids.has(id) ||
      this.#found.words.every((word) => title.toLowerCase().includes(word));
    const lines = this.#records.filter(isFound).map((record) => this.#line(record));
    const none = this.#found ? element("li", { class: "quiet" }, "Nothing is found.") : "";
    this.list.replaceChildren(...(lines.length ? lines : [none]));
  }

  #line(record) {
    const { id, title } = record;
    const open = button(title, () => this.open(id), { class: "plain family", dir: "auto" });
    if (id === this.#shown) open.setAttribute("aria-current", "true");
    const line = element("li", {}, open, this.#menu(record, () => line.replaceChildren(this.#nameForm(record))));
    return line;
  }

  #menu(record, edit) {
    const { title } = record;
    const act = (label, action) => {
      const done = () => {
        menu.open = false;
        action();
      };
      return button(label, done, { class: "plain small", "aria-label": `${label} ${title}` });
    };
    const menu = element(
      "details",
      { class: "menu" },
      element("summary", { "aria-label": `Actions for ${title}` }, "⋯"),
      element(
        "div",
        { class: "card" },
        act("Rename", edit),
        act("Export", () => attempt(() => this.#export([record]))),
        act("Export as Markdown", () => attempt(() => this.#exportText(record))),
        act("Delete", () => this.remove(record)),
      ),
    );
    menu.addEventListener("focusout", (event) => menu.contains(event.relatedTarget) || (menu.open = false));
    menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !menu.open) return;
      event.stopPropagation();
      menu.open = false;
      menu.firstChild.focus();
    });
    return menu;
  }

  #nameForm({ id, title }) {
    const field = element("input", { value: title, "aria-label": "Name", maxLength: 200, required: true });
    const form = element("form", { class: "family" }, field);
    const close = () => {
      form.remove();
      this.#place();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      close();
      this.rename(id, field.value.trim() || title);
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      close();
    });
    requestAnimationFrame(() => field.select());
    return form;
  }

  async #export(records) {
    const whole = await Promise.all(records.map(async (one) => [one, await archive.nodesOf(one.id)]));
    download(records.length === 1 ? records[0].title : "conversations", "json", asJson(whole));
  }

  async #exportText(record) {
    download(record.title, "md", asMarkdown(record, await archive.nodesOf(record.id)));
  }

  async #import(file) {
    const [chosen] = file.files;
    file.value = "";
    const read = readFile(await chosen.text());
    for (const { record, nodes } of read) {
      await archive.saveNodes(nodes);
      await archive.saveConversation(record);
    }
    notice(`Imported: ${read.map(({ record }) => record.title).join(", ")}`);
    await this.refresh();
    if (read.length === 1) this.open(read[0].record.id);
  }
}
