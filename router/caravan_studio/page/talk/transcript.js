/** The transcript: the entries of the branch that is shown, then the answers that are being generated. */

import { copyButton } from "../base/copy.js";
import { button, byId, element } from "../base/dom.js";
import { iconButton } from "../base/icons.js";
import { announce } from "../base/notices.js";
import { AnswerView, costOf } from "./answer_view.js";
import { editor } from "./editor.js";
import { entriesOf, openCalls, textOfEntry } from "./entries.js";
import { messagePart, partOf } from "./parts.js";
import { showProbabilities } from "./probabilities.js";
import { toolForm } from "./tool_form.js";

const NEAR_END_PX = 80;

export class Transcript {
  #views = new Map();
  #lives = new Map();

  /** `actions`: what the buttons do, by name; each gets an entry. */
  constructor(actions) {
    this.box = byId("transcript");
    this.actions = actions;
  }

  /** Forgets what is shown. */
  clear() {
    this.#views.clear();
    this.#lives.clear();
  }

  show(conversation) {
    const atEnd = this.#isAtEnd();
    const entries = entriesOf(conversation.items);
    const candidates = conversation.candidates;
    const alone = conversation.live.filter((live) => live.branch === conversation.branch && !candidates);
    const shown = entries.slice(0, candidates ? this.#shared(entries, candidates) : undefined);
    const nodes = shown.map((entry, at) => this.#entry(conversation, entry, at === shown.length - 1));
    if (candidates) nodes.push(this.#sideBySide(candidates));
    nodes.push(...alone.map((live) => this.#live(live).node));
    const calls = alone.length || candidates ? [] : openCalls(conversation.items);
    nodes.push(...calls.map((call) => toolForm(call, this.actions.giveOutput)));
    if (!nodes.length) nodes.push(welcome());
    this.#place(nodes);
    if (atEnd) this.scrollToEnd();
  }

  scrollToEnd() {
    this.box.scrollTop = this.box.scrollHeight;
  }

  /** Brings an entry into sight. */
  scrollTo(key) {
    this.#views.get(key)?.node.scrollIntoView({ block: "center" });
  }

  /** Shows these nodes. What stays in its place keeps the focus, and the reader does, too. */
  #place(nodes) {
    const shown = [...this.box.children];
    const same = nodes.findIndex((node, at) => node !== shown[at]);
    if (same < 0 && nodes.length === shown.length) return;
    const { scrollTop } = this.box;
    for (const node of shown.slice(same < 0 ? nodes.length : same)) node.remove();
    this.box.append(...nodes.slice(same < 0 ? nodes.length : same));
    this.box.scrollTop = scrollTop;
  }

  #isAtEnd() {
    return this.box.scrollHeight - this.box.scrollTop - this.box.clientHeight < NEAR_END_PX;
  }

  /** Returns how many entries all candidates share: those before the answers. */
  #shared(entries, candidates) {
    const own = candidates.flatMap((live) => live.items.map((item) => item.id));
    const at = entries.findIndex((entry) => entry.items.some((item) => own.includes(item.id)));
    return at < 0 ? entries.length : at;
  }

  #entry(conversation, entry, isLast) {
    let view = this.#views.get(entry.key);
    if (!view) this.#views.set(entry.key, (view = this.#made(entry)));
    view.cost.textContent = costOf(conversation.usageOf(entry));
    view.tools.replaceChildren(...this.#tools(conversation, entry, view, isLast));
    return view.node;
  }

  #made(entry) {
    const body = entry.kind === "message" ? messageBody(entry) : answerBody(entry);
    const cost = element("p", { class: "quiet cost" });
    const tools = element("div", { class: "row tools" });
    const who = { message: entry.items[0].role === "user" ? "You" : "System", answer: "Answer", output: "Tool" }[
      entry.kind
    ];
    const node = element("article", { class: `entry ${entry.kind}`, "aria-label": who }, body, tools, cost);
    return { node, body, cost, tools };
  }

  #tools(conversation, entry, view, isLast) {
    if (conversation.busy || entry.items[0].id === "unsaved") return [];
    const { actions } = this;
    const act = (name, label, action) => iconButton(name, label, () => action(entry));
    const edit = () => view.body.replaceWith(editor(entry, view.body, actions));
    const shown = [copyButton(() => textOfEntry(entry))];
    if (entry.kind === "message" || textOfEntry(entry)) shown.push(act("edit", "Edit", edit));
    if (entry.kind === "answer") {
      const usage = conversation.usageOf(entry);
      if (isLast && usage?.cut && entry.items.at(-1).type === "message") shown.push(act("go", "Continue", actions.goOn));
      shown.push(act("again", "Another answer", actions.again));
      if (textOfEntry(entry)) shown.push(act("chart", "Probabilities", () => showProbabilities(conversation, entry, view.body)));
    }
    shown.push(act("fork", "Fork", actions.fork));
    if (!isLast) shown.push(act("rewind", "Rewind to here", actions.rewind));
    return [...actions.siblings(entry), ...shown];
  }

  #live(live) {
    let view = this.#lives.get(live);
    if (view) return view;
    const answer = new AnswerView();
    const state = element("p", { class: "quiet cost" }, "Waiting…");
    const node = element(
      "article",
      { class: "entry answer", "aria-label": "Answer", "aria-busy": "true" },
      answer.body,
      state,
    );
    view = { node, answer, state };
    this.#lives.set(live, view);
    const told = () => {
      const atEnd = this.#isAtEnd();
      if (live.running) answer.grow(live.items, () => atEnd && this.scrollToEnd());
      else {
        answer.show(live.items);
        if (atEnd) this.scrollToEnd();
      }
      state.textContent =
        live.error ?? (live.running ? (live.items.length ? "Answering…" : "Waiting…") : costOf(live.usage));
      state.classList.toggle("error", Boolean(live.error));
      node.setAttribute("aria-busy", String(live.running));
      if (!live.running) announce(live.error ?? "The answer is complete.");
    };
    live.addEventListener("change", told);
    return view;
  }

  #sideBySide(candidates) {
    const columns = candidates.map((live, at) => {
      const view = this.#live(live);
      const use = button("Use this answer", () => this.actions.use(live), { class: "primary", disabled: live.running });
      const label = `Answer ${at + 1} of ${candidates.length}`;
      return element("section", { class: "candidate", "aria-label": label }, element("h3", {}, label), view.node, use);
    });
    return element("div", { class: "side-by-side" }, columns);
  }
}

function messageBody(entry) {
  const body = element("div", { class: "message-body", dir: "auto" });
  for (const part of entry.items[0].content) body.append(...messagePart(part));
  return body;
}

function answerBody(entry) {
  const view = new AnswerView();
  if (entry.kind === "answer") view.show(entry.items);
  else for (const item of entry.items) showPart(view.body, item);
  return view.body;
}

function showPart(body, item) {
  const part = partOf(item);
  part.update(item, false);
  body.append(part.node);
}

function welcome() {
  return element(
    "div",
    { class: "welcome" },
    element("p", { class: "lead" }, "Ask something."),
    element(
      "p",
      { class: "quiet" },
      "Answers are kept by the server, so that you can fork a conversation at any message, go back, and compare. ",
      "What is computed once is found again.",
    ),
  );
}
