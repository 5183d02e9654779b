/** The requests that wait, each with its reason. */

import { element } from "../base/dom.js";
import { count, plural, seconds } from "../base/format.js";
import { shardName } from "../base/shards.js";

const REASONS = {
  no_shard: () => "no shard is up",
  prefix: ({ of }) => `#${of} computes its beginning now`,
  holder: ({ shard }) =>
    `${shardName(shard)} has its beginning and is busy; computing it elsewhere would take longer`,
  fetch: () => "its saved cells are being copied to a shard",
  encoding: () => "its images and audio are being encoded",
  cells: () => "no shard has enough free cells",
  sequences: () => "no shard has a free place",
  step: () => "the shards are in a step, or the next one is full",
  turn: () => "others go first",
};
const MOST_SHOWN = 30;

export class Queue {
  constructor() {
    this.heading = element("h2", {}, "Queue");
    this.list = element("ol", { class: "queue", tabIndex: 0, "aria-label": "Waiting requests" });
    this.node = element("section", { class: "card", "aria-label": "Queue" }, this.heading, this.list);
  }

  show(states, time, colours) {
    const waiting = states.flatMap(({ queue }) => queue);
    const all = states.reduce((sum, { queued }) => sum + queued, 0);
    this.heading.textContent = all ? `${plural(all, "request")} waiting` : "Nothing waits";
    const lines = waiting.slice(0, MOST_SHOWN).map((request) => line(request, time, colours));
    if (all > lines.length) lines.push(element("li", { class: "quiet" }, `and ${count(all - lines.length)} more`));
    this.list.replaceChildren(...lines);
  }
}

function line(request, time, colours) {
  const chip = element("span", { class: "chip" }, `#${request.request}`);
  chip.style.setProperty("--of-request", colours.ofRequest(request.request));
  const facts = [`${count(request.tokens)} tokens`, `for ${seconds(Math.max(0, time - request.arrived))}`];
  if (request.priority) facts.push(`priority ${request.priority}`);
  if (request.key) facts.push(request.key);
  if (request.session) facts.push(`session ${request.session}`);
  if (request.started) facts.push("made room for others");
  if (request.saved_on) facts.push(`saved on ${shardName(request.saved_on)}`);
  const reason = (REASONS[request.reason] ?? (() => request.reason))(request);
  return element("li", {}, chip, element("span", {}, reason), element("span", { class: "quiet" }, facts.join(" · ")));
}
