/** The transcript: the nodes of the branch that is shown, and answers side by side of which one is to be chosen. */

import { copyButton } from "../base/copy.js";
import { button, byId, element } from "../base/dom.js";
import { iconButton } from "../base/icons.js";
import { announce } from "../base/notices.js";
import { AnswerView, costOf } from "./answer_view.js";
import { isRunning } from "./archive.js";
import { editor } from "./editor.js";
import { openCalls, textOfEntry } from "./entries.js";
import { messagePart, partOf } from "./parts.js";
import { showProbabilities } from "./probabilities.js";
import { toolForm } from "./tool_form.js";

const NEAR_END_PX = 80;

export class Transcript {
  #views = new Map();
  #announced = new WeakSet();

  /** `actions`: what the buttons do, by name; each gets a node. */
  constructor(actions) {
    this.box = byId("transcript");
    this.actions = actions;
  }

  /** Forgets what is shown. */
  clear() {
    this.#views.clear();
  }

  show(conversation) {
    const atEnd = this.#isAtEnd();
    const { path, candidates } = conversation;
    const nodes = path.map((node) => this.#shown(conversation, node, node === path.at(-1) && !candidates));
    if (candidates) nodes.push(this.#sideBySide(conversation, candidates));
    const calls = conversation.busy || candidates ? [] : openCalls(conversation.items);
    nodes.push(...calls.map((call) => toolForm(call, this.actions.giveOutput)));
    if (!nodes.length) nodes.push(welcome());
    this.#place(nodes);
    if (atEnd) this.scrollToEnd();
  }

  scrollToEnd() {
    this.box.scrollTop = this.box.scrollHeight;
  }

  /** Brings a node into sight. */
  scrollTo(node) {
    this.#views.get(node.id)?.article.scrollIntoView({ block: "center" });
  }

  /** Shows these elements. What stays in its place keeps the focus, and the reader does, too. */
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

  /** Returns the element that shows a node, as it is now. */
  #shown(conversation, node, isLast) {
    let view = this.#views.get(node.id);
    if (view?.version !== node.version) this.#views.set(node.id, (view = made(node)));
    const live = conversation.liveOf(node);
    if (live && view.live !== live) live.addEventListener("change", () => this.#grow(view, node, live));
    view.live = live;
    this.#grow(view, node, live);
    view.tools.replaceChildren(...this.#tools(conversation, node, view, isLast));
    return view.article;
  }

  /** Shows the state of an answer. */
  #grow(view, node, live) {
    const running = Boolean(live?.running);
    const atEnd = this.#isAtEnd();
    if (running) view.answer?.grow(node.items, () => atEnd && this.scrollToEnd());
    else if (view.items !== node.items || view.running) {
      view.answer?.show(node.items);
      if (atEnd) this.scrollToEnd();
    }
    Object.assign(view, { items: node.items, running });
    const error = running ? null : errorOf(node);
    view.state.textContent = running ? live.state : (error ?? costLine(node));
    view.state.classList.toggle("error", error !== null);
    view.article.setAttribute("aria-busy", String(running));
    if (!live || running || this.#announced.has(live)) return;
    this.#announced.add(live);
    announce(node.error ?? "The answer is complete.");
  }

  #tools(conversation, node, view, isLast) {
    if (conversation.busy) return [];
    const { actions } = this;
    const act = (name, label, action) => iconButton(name, label, () => action(node));
    const edit = () => view.body.replaceWith(editor(node, view.body, actions));
    const text = textOfEntry(node);
    const shown = [];
    if (text) shown.push(copyButton(() => text));
    if (node.kind === "message" || text) shown.push(act("edit", "Edit", edit));
    if (node.kind === "answer") {
      const error = errorOf(node);
      const isCut = error || node.status === "cut";
      if (isLast && isCut && node.items.at(-1)?.type === "message") shown.push(act("go", "Continue", actions.goOn));
      if (error) shown.push(...this.#mending(node));
      else shown.push(act("again", "Another answer", actions.again));
      const show = () => showProbabilities(conversation, node, view.body);
      if (text) shown.push(act("chart", "Probabilities", show));
    } else if (isLast && !openCalls(conversation.items).length) shown.push(act("talk", "Answer", actions.answer));
    if (!isLast) shown.push(act("fork", "Fork", actions.fork), act("rewind", "Rewind to here", actions.rewind));
    return [...actions.siblings(node), ...shown];
  }

  /** Returns the buttons that may help where an answer has failed. */
  #mending(node) {
    const act = (label, action) => button(label, () => action(node), { class: "small primary" });
    const again = act("Try again", this.actions.retry);
    if (node.code !== "context_length_exceeded") return [again];
    return [act("Drop the oldest turns and try again", this.actions.dropOldest), again];
  }

  #sideBySide(conversation, candidates) {
    const columns = candidates.map((node, at) => {
      const article = this.#shown(conversation, node, false);
      const use = button("Use this answer", () => this.actions.use(node), {
        class: "primary",
        disabled: Boolean(conversation.liveOf(node)),
      });
      const label = `Answer ${at + 1} of ${candidates.length}`;
      const own = Object.entries(node.column ?? {}).map(([name, value]) => `${name} ${value}`);
      const heading = element("h3", {}, [label, ...own].join(" · "));
      return element("section", { class: "candidate", "aria-label": label }, heading, article, use);
    });
    return element("div", { class: "side-by-side" }, columns);
  }
}

/** Returns the elements that show a node. An answer's grow with it. */
function made(node) {
  const answer = node.kind === "answer" ? new AnswerView() : null;
  const body = answer?.body ?? (node.kind === "message" ? messageBody(node) : outputBody(node));
  const state = element("p", { class: "quiet cost" });
  const tools = element("div", { class: "row tools" });
  const who = { message: "You", answer: "Answer", output: "Tool" }[node.kind];
  const article = element("article", { class: `entry ${node.kind}`, "aria-label": who }, body, tools, state);
  return { article, body, answer, state, tools, version: node.version, items: null, running: false, live: null };
}

/** Returns why an answer that is not being generated here is not whole, or null. */
const errorOf = (node) => (isRunning(node) ? "No server has answered yet." : (node.error ?? null));

/** Returns which model wrote an answer, and what it cost. */
const costLine = (node) => [node.usage && node.model, costOf(node.usage)].filter(Boolean).join(" · ");

function messageBody(entry) {
  const body = element("div", { class: "message-body", dir: "auto" });
  for (const part of entry.items[0].content) body.append(...messagePart(part));
  return body;
}

function outputBody(entry) {
  const body = element("div", { class: "answer-body" });
  for (const item of entry.items) {
    const part = partOf(item);
    part.update(item, false);
    body.append(part.node);
  }
  return body;
}

function welcome() {
  return element(
    "div",
    { class: "welcome" },
    element("p", { class: "lead" }, "Ask something."),
    element(
      "p",
      { class: "quiet" },
      "Conversations are kept in this browser. You can fork one at any message, go back, and compare answers.",
    ),
  );
}
