/** A conversation with its forks, and what a person does with it. Tells listeners by "change" when it looks different. */

import { ApiError, postForEvents } from "../base/api.js";
import { beginning } from "../base/format.js";
import * as calls from "./calls.js";
import { continued } from "./continuing.js";
import { openCalls, textOf, treeOf } from "./entries.js";
import { dropFamily, saveFamily } from "./families.js";
import { LiveAnswer } from "./live_answer.js";

export class Conversation extends EventTarget {
  #underWay = 0;

  /** `family`: one that is stored, or null. `fields`: returns the fields of a request that the settings decide. */
  constructor(family, fields) {
    super();
    this.family = family ?? { root: null, title: "New conversation", branches: [], shown: null, usage: {} };
    this.fields = fields;
    this.branch = this.family.shown ?? null;
    this.itemsByBranch = new Map();
    // Messages that are sent and not yet stored.
    this.unsaved = [];
    // Answers that are being generated, and those among which a person has to choose.
    this.live = [];
    this.candidates = null;
  }

  get items() {
    const stored = this.itemsByBranch.get(this.branch) ?? [];
    const replaced = this.live.map((answer) => answer.replaces);
    return [...stored.filter((item) => !replaced.includes(item.id)), ...this.unsaved];
  }

  get tree() {
    return treeOf(this.itemsByBranch);
  }

  get busy() {
    return this.#underWay > 0;
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

  usageOf(entry) {
    return this.family.usage[entry.items.at(-1).id];
  }

  /** Reads all branches. Those that the server no longer has are dropped. */
  async load() {
    const found = await Promise.all(this.family.branches.map((id) => calls.itemsOf(id).catch(missing)));
    this.family.branches.forEach((id, at) => found[at] && this.itemsByBranch.set(id, found[at]));
    this.family.branches = this.family.branches.filter((_, at) => found[at]);
    if (!this.itemsByBranch.has(this.branch)) this.branch = this.family.branches.at(-1) ?? null;
    this.#save();
  }

  /** Sends a message and has it answered, by several answers in branches of their own if `answers` is above 1. */
  async say(content, answers = 1) {
    const message = { ...calls.message("user", content), id: "unsaved" };
    const text = typeof content === "string" ? content : textOf({ content });
    this.unsaved = [shownMessage(message)];
    this.#changed();
    try {
      await this.#begin(text);
      const input = [calls.message("user", content)];
      if (answers === 1) return await this.#answer(this.branch, input);
      await calls.add(this.branch, input);
      await this.#reload(this.branch, { settles: true });
      return await this.#compare(answers);
    } finally {
      this.unsaved = [];
      this.#changed();
    }
  }

  /** Has the message before an answer answered once more, in a branch of its own. */
  async again(entry) {
    const before = this.items[this.items.indexOf(entry.items[0]) - 1];
    await this.#goTo(before ? await calls.fork(this.branch, before.id) : await calls.create(this.family.title));
    await this.#answer(this.branch, []);
  }

  /** Gives the output of a tool that the model called. */
  async giveOutput(call, output) {
    const type = `${call.type}_output`;
    const given = { type, call_id: call.call_id, output };
    if (openCalls(this.items).length > 1) {
      await calls.add(this.branch, [given]);
      return this.#reload(this.branch);
    }
    return this.#answer(this.branch, [given]);
  }

  /** Ends all answers with what they have. */
  async stop() {
    await Promise.all(
      this.live.filter((one) => one.running).map((one) => (one.id ? calls.cancel(one.id) : one.abort.abort())),
    );
  }

  /** Lets the last answer go on where it was cut. */
  async goOn(entry) {
    const item = entry.items.at(-1);
    const live = new LiveAnswer(this.branch);
    const items = this.items;
    live.replaces = item.id;
    try {
      await this.#follow(live, () => continued(live, items, this.fields()));
      if (!live.items.length) return;
      const replacing = [calls.message("assistant", textOf(live.items[0]))];
      await calls.edit(this.branch, [{ op: "replace", item: item.id, items: replacing }]);
      await this.#reload(this.branch, { ended: live });
    } finally {
      this.#drop(live);
    }
    const before = this.family.usage[item.id]?.output ?? 0;
    const more = live.usage ?? { input: 0, cached: 0, output: 0, cut: true };
    this.family.usage[this.items.at(-1).id] = { ...more, output: more.output + before };
    this.#save();
  }

  /** Changes the text of an entry: here, or in a fork that leaves this branch as it is. */
  async change(entry, text, { inFork }) {
    const item = entry.items.findLast((one) => one.type === "message");
    if (inFork) await this.#goTo(await calls.fork(this.branch));
    await calls.edit(this.branch, [{ op: "replace", item: item.id, items: [calls.message(item.role, text)] }]);
    await this.#reload(this.branch);
  }

  /** Asks anew with another text in place of a message, in a fork. */
  async askAnew(entry, text) {
    const before = this.items[this.items.indexOf(entry.items[0]) - 1];
    await this.#goTo(before ? await calls.fork(this.branch, before.id) : await calls.create(this.family.title));
    await this.say(text);
  }

  async fork(entry) {
    await this.#goTo(await calls.fork(this.branch, entry.items.at(-1).id));
  }

  async rewind(entry) {
    await calls.rewind(this.branch, entry.items.at(-1).id);
    await this.#reload(this.branch);
  }

  switchTo(branch) {
    this.branch = branch;
    this.candidates = null;
    this.#save();
  }

  async remove() {
    await this.stop();
    dropFamily(this.family);
    await Promise.all(this.family.branches.map((id) => calls.remove(id).catch(missing)));
  }

  async #begin(text) {
    if (this.branch) return;
    this.family.title = beginning(text, 48) || "Conversation";
    this.family.root = await calls.create(this.family.title);
    await this.#goTo(this.family.root);
  }

  async #goTo(branch) {
    this.family.branches.push(branch);
    this.branch = branch;
    await this.#reload(branch);
  }

  async #compare(answers) {
    const branches = [this.branch];
    while (branches.length < answers) branches.push(await calls.fork(this.branch));
    for (const branch of branches.slice(1)) {
      this.family.branches.push(branch);
      this.itemsByBranch.set(branch, this.itemsByBranch.get(this.branch));
    }
    this.candidates = branches.map((branch) => new LiveAnswer(branch));
    const ends = await Promise.allSettled(this.candidates.map((live) => this.#run(live, [])));
    const failed = ends.find((end) => end.status === "rejected");
    if (failed) throw failed.reason;
  }

  async #answer(branch, input) {
    return this.#run(new LiveAnswer(branch), input);
  }

  async #run(live, input) {
    const body = { ...this.fields(), conversation: live.branch, input, stream: true };
    try {
      await this.#follow(live, () => postForEvents("v1/responses", body, live.abort.signal));
      if (live.error) throw new ApiError(0, live.id ? live.error : "It was stopped before it began.");
      if (live.usage && live.items.length) this.family.usage[live.items.at(-1).id] = live.usage;
      await this.#reload(live.branch, { ended: live, settles: true });
    } finally {
      this.#drop(live);
    }
  }

  /** Shows an answer while its events come. */
  async #follow(live, events) {
    this.live.push(live);
    this.#changed();
    try {
      for await (const event of events()) live.take(event);
      if (live.running) live.fail("The stream broke off.");
    } catch (error) {
      live.fail(error.message);
      // What an answer has when a person ends it stays.
      if (error.name !== "AbortError") throw error;
    }
  }

  #drop(live) {
    this.live = this.live.filter((one) => one !== live);
    this.#changed();
  }

  /** Reads a branch anew. `ended`: an answer that it has now. `settles`: it has the messages that were sent, too. */
  async #reload(branch, { ended = null, settles = false } = {}) {
    this.itemsByBranch.set(branch, await calls.itemsOf(branch));
    this.live = this.live.filter((one) => one !== ended);
    if (settles) this.unsaved = [];
    this.#save();
  }

  #save() {
    this.family.shown = this.branch;
    if (this.family.branches.length) saveFamily(this.family);
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

function missing(error) {
  if (error instanceof ApiError && error.status === 404) return null;
  throw error;
}

function shownMessage(message) {
  const content =
    typeof message.content === "string" ? [{ type: "input_text", text: message.content }] : message.content;
  return { ...message, content };
}
