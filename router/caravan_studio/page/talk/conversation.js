/**
 * A conversation and what a person does with it. The browser's copy is what counts: the server is asked to continue its
 * own copy of a turn where it has one, which finds the exact tokens, and else gets all items again. Tells listeners by
 * "change" when it looks different.
 */

import { ApiError } from "../base/api.js";
import { newId } from "../base/database.js";
import { beginning } from "../base/format.js";
import { notice } from "../base/notices.js";
import { read, write } from "../base/stored.js";
import * as archive from "./archive.js";
import * as calls from "./calls.js";
import { continued } from "./continuing.js";
import { childrenOf, openCalls, sentItems } from "./entries.js";
import { fileTexts } from "./files.js";
import { follow } from "./following.js";
import { LiveAnswer } from "./live_answer.js";

const SAVE_MS = 200;
const TAB = thisTab();

export class Conversation extends EventTarget {
  #underWay = 0;
  #edits = 0;
  #loading = Promise.resolve();
  #nodes = new Map();
  #lives = new Map();
  #stored;

  /** `record`: one of the archive, or null. `fields`: returns the fields of a request that the settings decide. */
  constructor(record, fields) {
    super();
    this.record = record ?? archive.newConversation();
    this.#stored = record !== null;
    this.fields = fields;
  }

  get id() {
    return this.record.id;
  }

  /** Whether it has a message that is kept. */
  get begun() {
    return this.#stored;
  }

  /** The nodes of the branch that is shown, the first one first. */
  get path() {
    return this.#pathTo(this.record.tip);
  }

  get items() {
    return itemsOf(this.path);
  }

  get children() {
    return childrenOf(this.#nodes.values());
  }

  /** The answers of which one is to be chosen, or null. */
  get candidates() {
    const found = this.record.choosing?.map((id) => this.#nodes.get(id)).filter(Boolean);
    return found?.length ? found : null;
  }

  get busy() {
    return this.#underWay > 0 || this.#lives.size > 0;
  }

  /** Returns the answer that is being generated into a node, or undefined. */
  liveOf(node) {
    return this.#lives.get(node.id);
  }

  /** Does something with the conversation, which is busy until that ends. */
  async during(action) {
    this.#underWay += 1;
    this.#changed();
    try {
      return await action();
    } finally {
      this.#underWay -= 1;
      this.#changed();
    }
  }

  /** Reads what is stored, also what other tabs added, and follows answers that have not ended. */
  load() {
    // One after the other, so that what was read first is not taken for news.
    this.#loading = this.#loading.catch(() => {}).then(() => this.#load());
    return this.#loading;
  }

  async #load() {
    if (!this.#stored) return;
    let edits, record, nodes;
    do {
      edits = this.#edits;
      [record, nodes] = await Promise.all([archive.conversation(this.id), archive.nodesOf(this.id, this.#nodes)]);
      // What was changed here meanwhile may not be in what was read.
    } while (edits !== this.#edits);
    this.#nodes = new Map(nodes.map((node) => [node.id, node]));
    for (const { node } of this.#lives.values()) this.#nodes.set(node.id, node);
    if (record) {
      const { tip } = this.record;
      this.record = record;
      // What is shown stays, unless the other tab went on with it.
      if (this.#nodes.has(tip) && !this.path.some((node) => node.id === tip)) record.tip = tip;
    }
    for (const node of this.#nodes.values()) {
      if (!archive.isRunning(node) || this.#lives.has(node.id)) continue;
      if (node.response) this.#run(node, null);
      else if (node.status === "continuing") node.status = "cut";
      else if (node.tab === TAB) this.#run(node, this.#request(node));
    }
    this.#changed();
  }

  /** Sends a message and has it answered: by an answer for each of `columns`, which are settings of their own. */
  async say(content, columns = [{}]) {
    const parts = typeof content === "string" ? [{ type: "input_text", text: content }] : content;
    await this.#begin(titleOf(parts));
    const message = this.#add(this.record.tip, "message", [{ type: "message", role: "user", content: parts }]);
    await this.#answer(message, columns, [message]);
  }

  /** Has the message before an answer answered once more, in a branch of its own. */
  async again(node) {
    await this.#answer(this.#nodes.get(node.parent) ?? null, [node.column ?? {}]);
  }

  /** Asks for an answer once more that has failed. One with a text stays, beside the new one. */
  async retry(node) {
    if (node.items.length) return this.again(node);
    // One of which no event has come may have begun nevertheless, and is found by its key.
    const asked = node.response ? node.version + 1 : node.asked;
    const fresh = { status: "sending", response: null, sequence: -1, error: null, code: "", tab: TAB, asked };
    Object.assign(node, fresh, { version: node.version + 1 });
    this.#edits += 1;
    await archive.saveNode(node);
    return this.#run(node, this.#request(node));
  }

  /** Gives the output of a tool that the model called. */
  async giveOutput(call, output) {
    const given = this.#add(this.record.tip, "output", [
      { type: `${call.type}_output`, call_id: call.call_id, output },
    ]);
    await this.#keep([given], given.id);
    if (!openCalls(this.items).length) await this.#answer(given);
  }

  /** Ends all answers with what they have. */
  stop() {
    for (const live of this.#lives.values()) live.abort.abort();
  }

  /** Has a node answered that is the last one. */
  async answer(node) {
    await this.#answer(node);
  }

  /** Lets an answer go on where it was cut. */
  async goOn(node) {
    const items = itemsOf(this.#pathTo(node.id));
    const before = node.usage?.output ?? 0;
    // The server does not have the answer that comes of it.
    Object.assign(node, { response: null, error: null, status: "continuing", version: node.version + 1 });
    node.items = node.items.with(-1, { ...node.items.at(-1), status: "in_progress" });
    await this.#following(new LiveAnswer(node), async (live) => {
      for await (const event of continued(live, items, { ...this.fields(), ...node.column })) live.take(event);
      if (!live.running && node.status !== "failed") node.usage.output += before;
    });
  }

  /** Changes the text of a node: here, or in a fork that leaves this branch as it is. */
  async change(node, text, { inFork }) {
    const items = withText(node.items, text);
    if (!inFork) {
      const changed = this.#below(node);
      for (const one of changed) Object.assign(one, { response: null, version: one.version + 1 });
      node.items = items;
      return this.#keep(changed, this.record.tip);
    }
    const path = this.path;
    const copies = [];
    for (const one of path.slice(path.indexOf(node))) {
      const parent = copies.length ? copies.at(-1).id : one.parent;
      const { kind, usage, model, column, status } = one;
      copies.push(this.#add(parent, kind, one === node ? items : one.items, { usage, model, column, status }));
    }
    return this.#keep(copies, copies.at(-1).id);
  }

  /** Asks anew with another text in place of a message, in a fork. */
  async askAnew(node, text) {
    const message = this.#add(node.parent, "message", withText(node.items, text));
    await this.#answer(message, [{}], [message]);
  }

  /** Goes back to a node: what is said next begins a branch there. */
  fork(node) {
    return this.#keep([], node.id);
  }

  /** Removes what follows a node in this branch and in no other. */
  async rewind(node) {
    const { children } = this;
    const path = this.path;
    const gone = [];
    for (const one of path.slice(path.indexOf(node) + 1).reverse()) {
      if ((children.get(one.id) ?? []).some((child) => !gone.includes(child))) break;
      gone.push(one);
    }
    for (const one of gone) this.#nodes.delete(one.id);
    this.#edits += 1;
    await archive.dropNodes(gone);
    await this.#keep([], node.id);
  }

  /** Shows the branch of a node, up to its end that was made last. */
  async goTo(node) {
    if (this.path.includes(node)) return;
    const ends = this.#below(node).filter((one) => !this.children.has(one.id));
    await this.#keep([], ends.reduce((last, one) => (one.made > last.made ? one : last)).id);
  }

  /** Goes on with one of several answers. */
  async use(node) {
    await this.#keep([], node.id);
  }

  async rename(title) {
    this.record.title = title;
    await archive.changeConversation(this.id, { title });
    this.#changed();
  }

  /** Returns the ids of the tokens up to the end of a node. */
  async tokensUpTo(node) {
    const { model, instructions, tools } = this.fields();
    const body = (whole) => ({ model, instructions, tools, ...this.#requestAfter(node, { whole }) });
    try {
      return await calls.promptOf(body(false));
    } catch (error) {
      if (!isUnknown(error)) throw error;
      return calls.promptOf(body(true));
    }
  }

  /** Returns the fields that let an answer follow a node. `whole`: the server is told everything anew. */
  #requestAfter(node, { whole = false } = {}) {
    const path = this.#pathTo(node?.id ?? null);
    const from = whole ? -1 : path.findLastIndex((one) => one.response && !archive.isRunning(one));
    const input = sentItems(itemsOf(path.slice(from + 1)));
    return from < 0 ? { input } : { input, previous_response_id: path[from].response };
  }

  async #begin(title) {
    if (this.#stored) return;
    this.#stored = true;
    this.record.title = title;
    this.record.used = Date.now();
    await stored(() => archive.saveConversation(this.record));
    this.dispatchEvent(new Event("begun"));
  }

  /** Has a node answered. `fresh`: nodes that are not stored yet; with the answers they are stored, or not at all. */
  async #answer(parent, columns = [{}], fresh = []) {
    const answers = columns.map((column) =>
      this.#add(parent?.id ?? null, "answer", [], { status: "sending", tab: TAB, column }),
    );
    for (const node of answers) this.#lives.set(node.id, new LiveAnswer(node));
    const several = answers.length > 1;
    const nodes = [...fresh, ...answers];
    await this.#keep(nodes, several ? parent.id : answers[0].id, several ? answers.map((one) => one.id) : null);
    this.dispatchEvent(new Event("kept"));
    await Promise.all(answers.map((node) => this.#run(node, this.#request(node))));
  }

  /** Returns a function that returns the body of the request for an answer. It may throw. */
  #request(node) {
    return (whole) => ({ ...this.fields(), ...node.column, ...this.#requestAfter(this.#nodes.get(node.parent), { whole }) });
  }

  /** Follows an answer to its end. `request`: see above; null if it was sent before. */
  #run(node, request) {
    return this.#following(this.#lives.get(node.id) ?? new LiveAnswer(node), async (live) => {
      try {
        await follow(live, request?.(false));
      } catch (error) {
        // The server no longer has the turn before: it gets the browser's copy.
        if (node.response || !isUnknown(error)) throw error;
        const stale = this.#pathTo(node.parent).filter((one) => one.response);
        if (!stale.length) throw error;
        for (const one of stale) one.response = null;
        await archive.saveNodes(stale);
        await follow(live, request(true));
      }
    });
  }

  /** Shows and stores an answer while `action` takes its events. An error becomes a part of the answer. */
  async #following(live, action) {
    const { node } = live;
    let saving = null;
    const save = () => {
      saving = null;
      return stored(() => archive.saveNode(node, { quiet: true }));
    };
    live.addEventListener("change", () => (saving ??= setTimeout(save, SAVE_MS)));
    live.addEventListener("begun", () => stored(() => archive.saveNode(node)));
    this.#lives.set(node.id, live);
    this.#changed();
    try {
      await action(live);
      if (live.running) live.fail("The answer broke off.");
    } catch (error) {
      this.#broken(live, error);
    } finally {
      clearTimeout(saving);
      this.#lives.delete(node.id);
      await stored(() => archive.saveNode(node));
      this.#changed();
    }
  }

  #broken(live, error) {
    if (error.name === "AbortError") live.cut();
    // The answer goes on once there is a key again.
    else if (error.status === 401 && live.node.response) live.say("An API key is needed.");
    else if (isUnknown(error) && live.node.response) live.fail("The server no longer has this answer.", "", "interrupted");
    else live.fail(error.message, error.code);
    if (!(error instanceof ApiError) && error.name !== "AbortError") console.error(error);
  }

  #add(parent, kind, items, more = {}) {
    const node = archive.newNode(this.id, parent, kind, structuredClone(items), more);
    this.#nodes.set(node.id, node);
    return node;
  }

  /** Stores nodes, and which one is the last that is shown. */
  async #keep(nodes, tip, choosing = null) {
    Object.assign(this.record, { tip, choosing, used: Date.now() });
    this.#edits += 1;
    this.#changed();
    await stored(async () => {
      await archive.saveNodes(nodes);
      // What was deleted in another tab meanwhile is in use.
      await archive.changeConversation(this.id, { tip, choosing, used: this.record.used, deleted: 0 });
    });
  }

  #pathTo(id) {
    const path = [];
    for (let node = this.#nodes.get(id); node; node = this.#nodes.get(node.parent)) path.unshift(node);
    return path;
  }

  /** Returns a node and all that follow it, in all branches. */
  #below(node) {
    const { children } = this;
    const found = [node];
    for (const one of found) found.push(...(children.get(one.id) ?? []));
    return found;
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

/** Returns a name of the tab, which it still has when it is loaded anew. */
function thisTab() {
  const name = read("tab", newId(), { lasting: false });
  write("tab", name, { lasting: false });
  return name;
}

/** Stores something. Where that fails, such as on a full disk, the page goes on with what it shows, and says so. */
async function stored(action) {
  try {
    await action();
  } catch (error) {
    notice(`This browser does not keep the conversation: ${error.message}`, "error");
  }
}

/** Returns a title for a conversation that begins with these parts: from what was typed, else the name of a file. */
function titleOf(parts) {
  const [piece] = fileTexts(parts.findLast((part) => part.text)?.text ?? "");
  return beginning(piece?.name ?? piece?.text ?? "", 48) || "Conversation";
}

const itemsOf = (path) => path.flatMap((node) => node.items);

const isUnknown = (error) => error instanceof ApiError && error.status === 404 && error.code === "not_found";

/** Returns items with another text in the last message, which keeps its images and files. */
function withText(items, text) {
  const at = items.findLastIndex((item) => item.type === "message");
  const item = items[at];
  const others = item.content.filter((part) => part.text === undefined);
  const content = [...others, ...calls.message(item.role, text).content];
  return items.with(at, { ...item, content });
}
