/** The view to talk to a model: brings a conversation, its transcript, its tree and the composer together. */

import { ask } from "../base/ask.js";
import { button, byId } from "../base/dom.js";
import { attempt } from "../base/notices.js";
import { addView } from "../base/views.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { families } from "./families.js";
import { ConversationList } from "./list.js";
import { panel } from "./panels.js";
import { responseFields, startSettings } from "./settings.js";
import { Transcript } from "./transcript.js";
import { TreeView } from "./tree_view.js";

const NARROW = matchMedia("(max-width: 62rem)");

let conversation;
let transcript;
let composer;
let tree;
let list;

export function startTalk() {
  const closeTree = panel("tree", () => tree.show(conversation));
  const fillSettings = startSettings(() => closeSettings());
  const closeSettings = panel("settings", () => fillSettings());
  const closeList = panel("conversations");
  transcript = new Transcript(actions());
  composer = new Composer({ send, stop: () => attempt(() => conversation.stop()) });
  tree = new TreeView({ go: (branch, entry) => goTo(branch, entry), close: closeTree });
  list = new ConversationList({
    open: (family) => open(family, closeList),
    begin: () => open(null, closeList),
    remove,
    close: closeList,
  });
  const showList = () => (byId("conversations").hidden = NARROW.matches);
  NARROW.addEventListener("change", showList);
  showList();
  byId("talk").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && conversation.busy) attempt(() => conversation.stop());
  });
  addView("talk", { show: focusComposer });
  open(families()[0] ?? null, () => {});
}

function open(family, closeList) {
  conversation = new Conversation(family, responseFields);
  const opened = conversation;
  opened.addEventListener("change", () => opened === conversation && show());
  transcript.clear();
  show();
  if (NARROW.matches) closeList();
  attempt(async () => {
    await opened.load();
    transcript.scrollToEnd();
  });
  focusComposer();
}

/** Readies the field for the next message, but on small screens, where a keyboard would cover the page. */
function focusComposer() {
  if (!NARROW.matches) composer.text.focus();
}

function show() {
  byId("title").textContent = conversation.family.title;
  transcript.show(conversation);
  composer.show({ busy: conversation.busy, choosing: conversation.candidates !== null });
  if (!byId("tree").hidden) tree.show(conversation);
  list.show(conversation.family.root);
}

async function send(text, answers, pictures) {
  const asked = conversation;
  let sent = false;
  await attempt(async () => {
    const written = text.trim() ? [{ type: "input_text", text }] : [];
    const content = pictures.length ? [...pictures, ...written] : text;
    const saying = asked.during(() => asked.say(content, answers));
    transcript.scrollToEnd();
    await saying;
    sent = true;
  });
  if (!sent && asked === conversation) composer.restore(text);
}

function actions() {
  const doing =
    (action) =>
    async (...given) => {
      const used = conversation;
      await attempt(() => used.during(() => action(...given)));
      // The button that was pressed may be gone.
      if (document.activeElement === document.body) focusComposer();
    };
  const rewind = doing((entry) => conversation.rewind(entry));
  return {
    goOn: doing((entry) => conversation.goOn(entry)),
    again: doing((entry) => conversation.again(entry)),
    fork: doing((entry) => conversation.fork(entry)),
    giveOutput: doing((call, output) => conversation.giveOutput(call, output)),
    askAnew: doing((entry, text) => conversation.askAnew(entry, text)),
    changeHere: doing((entry, text) => conversation.change(entry, text, { inFork: false })),
    changeInFork: doing((entry, text) => conversation.change(entry, text, { inFork: true })),
    rewind: async (entry) => {
      const details = "What follows is taken from this branch. Other branches keep it.";
      if (await ask("Go back to here?", "Rewind", details)) await rewind(entry);
    },
    use: (live) => conversation.switchTo(live.branch),
    siblings,
  };
}

/** Returns the buttons that lead to the other branches at an entry. */
function siblings(entry) {
  const found = parentOf(conversation.tree, entry.key);
  if (!found || found.children.length < 2) return [];
  const at = found.children.findIndex((child) => child.entry.key === entry.key);
  const to = (step, label, sign) => {
    const other = found.children[at + step];
    const go = () => goTo(other.branches.at(-1), other.entry);
    return button(sign, go, { class: "plain small", "aria-label": label, disabled: !other });
  };
  const place = document.createTextNode(`${at + 1} of ${found.children.length}`);
  return [to(-1, "Branch before", "‹"), place, to(1, "Next branch", "›")];
}

function parentOf(node, key) {
  for (const child of node.children) {
    if (child.entry.key === key) return node;
    const found = child.branches.includes(conversation.branch) && parentOf(child, key);
    if (found) return found;
  }
  return null;
}

function goTo(branch, entry) {
  if (branch !== conversation.branch) conversation.switchTo(branch);
  transcript.scrollTo(entry.key);
}

async function remove(family) {
  if (!(await ask("Delete this conversation?", "Delete", `“${family.title}” and all its forks.`))) return;
  const isShown = family.root === conversation.family.root;
  const removed = isShown ? conversation : new Conversation(family, responseFields);
  await attempt(() => removed.remove());
  if (isShown) open(families()[0] ?? null, () => {});
  else list.show(conversation.family.root);
}
