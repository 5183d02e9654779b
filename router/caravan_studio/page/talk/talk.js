/** The view to talk to a model: brings a conversation, its transcript, its tree and the composer together. */

import { ask } from "../base/ask.js";
import { button, byId } from "../base/dom.js";
import { attempt, notice } from "../base/notices.js";
import { forget, read, write } from "../base/stored.js";
import { addView, goTo, nameShown } from "../base/views.js";
import * as archive from "./archive.js";
import { Columns } from "./columns.js";
import { Composer } from "./composer.js";
import { ContextMeter } from "./context_meter.js";
import { Conversation } from "./conversation.js";
import { ConversationList } from "./list.js";
import { panel } from "./panels.js";
import { dropOldest, responseFields, startSettings } from "./settings.js";
import { Transcript } from "./transcript.js";
import { TreeView } from "./tree_view.js";

const NARROW = matchMedia("(max-width: 62rem)");
const NEW = "new";

// Those that were opened since the page was: their answers go on while another one is shown.
const opened = new Map();
let conversation = null;
let transcript;
let composer;
let columns;
let meter;
let tree;
let list;
let closeList;

export function startTalk() {
  const closeTree = panel("tree", () => conversation && tree.show(conversation));
  const fillSettings = startSettings(() => closeSettings());
  const closeSettings = panel("settings", () => fillSettings());
  closeList = panel("conversations");
  transcript = new Transcript(actions());
  composer = new Composer({ send, stop: () => conversation.stop() });
  columns = new Columns(composer.answers);
  meter = new ContextMeter();
  tree = new TreeView({ go: showBranch, close: closeTree });
  list = new ConversationList({ open: (id) => goTo("talk", id), rename, remove, close: closeList });
  const showList = () => (byId("conversations").hidden = NARROW.matches);
  NARROW.addEventListener("change", showList);
  showList();
  byId("talk").addEventListener("keydown", (event) => {
    if (event.key === "Escape" && conversation?.busy) conversation.stop();
  });
  composer.text.addEventListener("input", () => conversation && write(draftOf(conversation), composer.text.value));
  archive.onChange((id) => attempt(() => changedElsewhere(id)));
  addView("talk", { show: (id) => attempt(() => route(id)) });
  attempt(goOnWithAnswers);
}

/** Shows the conversation that an address names; without a name, the one that was shown last. */
async function route(id) {
  if (id === NEW) return open(null);
  const [latest = null] = id ? [] : await archive.conversations();
  const asked = id || conversation?.id || latest?.id;
  const found = opened.get(asked) ?? (asked ? await archive.conversation(asked) : null);
  if (id && !found) notice("This browser has no such conversation.");
  if (!id || !found) nameShown("talk", found?.id ?? NEW);
  return open(found);
}

/** Shows a conversation: one that is open, a record of the archive, or null for a new one. */
async function open(found) {
  const isOpen = found instanceof Conversation;
  if (isOpen && found === conversation) return show();
  const isFirst = !conversation;
  conversation = isOpen ? found : await openedFrom(found);
  transcript.clear();
  // What is typed before the first one is read belongs to it.
  const typed = isFirst ? composer.text.value : "";
  if (typed) write(draftOf(conversation), typed);
  composer.text.value = typed || read(draftOf(conversation), "");
  if (NARROW.matches && !byId("conversations").hidden) closeList();
  show();
  transcript.scrollToEnd();
  list.refresh();
  return focusComposer();
}

/** Returns a conversation whose stored nodes are read. */
async function openedFrom(record) {
  const made = new Conversation(record, responseFields);
  made.addEventListener("change", () => made === conversation && show());
  made.addEventListener("begun", () => {
    opened.set(made.id, made);
    if (made === conversation) nameShown("talk", made.id);
    list.refresh();
  });
  if (record) opened.set(record.id, made);
  await made.load();
  return made;
}

/** Follows answers that had not ended when the page was closed; browsers have few connections to a server. */
async function goOnWithAnswers() {
  await archive.purge();
  for (const id of await archive.unfinished()) {
    const record = opened.has(id) ? null : await archive.conversation(id);
    if (record) await ended(await openedFrom(record));
  }
}

const ended = (used) =>
  new Promise((resolve) => {
    const look = () => used.busy || resolve();
    used.addEventListener("change", look);
    look();
  });

async function changedElsewhere(id) {
  await opened.get(id)?.load();
  list.refresh();
}

const draftOf = ({ begun, id }) => `draft.${begun ? id : NEW}`;

/** Readies the field for the next message, but on small screens, where a keyboard would cover the page. */
function focusComposer() {
  if (!NARROW.matches) composer.text.focus();
}

function show() {
  const { title } = conversation.record;
  byId("title").textContent = title;
  if (!byId("talk").hidden) document.title = conversation.begun ? `${title} · Caravan` : "Caravan";
  transcript.show(conversation);
  composer.show({ busy: conversation.busy, choosing: conversation.candidates !== null });
  meter.show(conversation);
  if (!byId("tree").hidden) tree.show(conversation);
  list.show(conversation);
}

async function send(text, answers, parts) {
  const asked = conversation;
  const draft = draftOf(asked);
  asked.addEventListener("kept", () => forget(draft), { once: true });
  const content = [...parts, ...(text.trim() ? [{ type: "input_text", text }] : [])];
  await attempt(async () => {
    const saying = asked.during(() => asked.say(content, columns.of(answers)));
    transcript.scrollToEnd();
    await saying;
  });
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
  const rewind = doing((node) => conversation.rewind(node));
  return {
    goOn: doing((node) => conversation.goOn(node)),
    again: doing((node) => conversation.again(node)),
    answer: doing((node) => conversation.answer(node)),
    retry: doing((node) => conversation.retry(node)),
    dropOldest: doing((node) => {
      dropOldest(true);
      return conversation.retry(node);
    }),
    fork: doing((node) => conversation.fork(node)),
    giveOutput: doing((call, output) => conversation.giveOutput(call, output)),
    askAnew: doing((node, text) => conversation.askAnew(node, text)),
    changeHere: doing((node, text) => conversation.change(node, text, { inFork: false })),
    changeInFork: doing((node, text) => conversation.change(node, text, { inFork: true })),
    rewind: async (node) => {
      const details = "What follows is taken from this branch. Other branches keep it.";
      if (await ask("Go back to here?", "Rewind", details)) await rewind(node);
    },
    use: doing((node) => conversation.use(node)),
    siblings,
  };
}

/** Returns the buttons that lead to the other branches at a node. */
function siblings(node) {
  const found = conversation.children.get(node.parent) ?? [];
  if (found.length < 2) return [];
  const at = found.indexOf(node);
  const to = (step, label, sign) => {
    const other = found[at + step];
    const go = () => showBranch(other);
    return button(sign, go, { class: "plain small", "aria-label": label, disabled: !other });
  };
  const place = document.createTextNode(`${at + 1} of ${found.length}`);
  return [to(-1, "Branch before", "‹"), place, to(1, "Next branch", "›")];
}

async function showBranch(node) {
  await attempt(() => conversation.goTo(node));
  transcript.scrollTo(node);
}

async function rename(id, title) {
  const open = opened.get(id);
  await attempt(() => (open ? open.rename(title) : archive.changeConversation(id, { title })));
  list.refresh();
}

async function remove({ id, title }) {
  await attempt(async () => {
    opened.get(id)?.stop();
    await archive.setDeleted(id, true);
    opened.delete(id);
  });
  const isShown = id === conversation.id;
  const back = async () => {
    await archive.setDeleted(id, false);
    list.refresh();
    if (isShown) goTo("talk", id);
  };
  notice(`“${title}” is deleted.`, "", () => attempt(back));
  if (!isShown) return list.refresh();
  conversation = null;
  return attempt(() => route(""));
}
