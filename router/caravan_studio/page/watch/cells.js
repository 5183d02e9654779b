/** The map of a shard's cells: each cell once, from the shared beginnings on the left to what hangs on them. */

import { element } from "../base/dom.js";
import { bytes, count } from "../base/format.js";
import { canvas } from "./canvas.js";
import { laneName } from "./timeline.js";

const ROW = 12;
const MOST_ROWS = 6;
const TIER = 14;

/** Shows the cells and tiers of all shards of some states. */
export class CellMaps {
  #maps = new Map();

  constructor() {
    this.node = element("div", { class: "maps" });
  }

  show(states, colours) {
    const shards = states.flatMap(({ model, shards: all }) =>
      all.map((shard) => ({ ...shard, name: laneName(`${model}\n${shard.shard}`) })),
    );
    shards.sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
    const names = shards.map(({ name }) => name);
    for (const name of this.#maps.keys()) if (!names.includes(name)) this.#maps.delete(name);
    for (const { name } of shards) if (!this.#maps.has(name)) this.#maps.set(name, new CellMap(name));
    const nodes = names.map((name) => this.#maps.get(name).node);
    if (nodes.length !== this.node.childElementCount || nodes.some((node, at) => node !== this.node.children[at])) {
      this.node.replaceChildren(...nodes);
    }
    for (const shard of shards) this.#maps.get(shard.name).show(shard, colours);
  }
}

class CellMap {
  // As many as there were at most, so that the page stays still.
  #rows = 2;

  constructor(name) {
    this.canvas = canvas({ class: "cells", role: "img" });
    this.told = element("p", { class: "quiet" });
    this.node = element(
      "section",
      { class: "map", "aria-label": name },
      element("h3", {}, name),
      this.canvas.node,
      this.told,
    );
  }

  show(shard, colours) {
    const tiers = [
      ["memory", shard.memory],
      ["disk", shard.disk],
    ].filter(([, [, capacity]]) => capacity);
    const parts = placed(shard.map);
    this.#rows = Math.min(MOST_ROWS, Math.max(this.#rows, ...parts.map(({ depth }) => depth + 1)));
    const height = ROW * this.#rows + 8;
    const { context, width } = this.canvas.begin(height + tiers.length * TIER, colours.surface);
    context.fillStyle = colours.sunken;
    context.fillRect(0, 0, width, ROW * this.#rows);
    const scale = width / Math.max(1, shard.cells);
    for (const part of parts) {
      context.fillStyle = colourOf(part, colours);
      context.globalAlpha = part.holders.length ? 1 : 0.45;
      const row = Math.min(part.depth, this.#rows - 1);
      context.fillRect(part.at * scale, row * ROW, Math.max(0.6, part.cells * scale - 0.4), ROW - 1);
    }
    context.globalAlpha = 1;
    tiers.forEach(([tier, [used, capacity]], at) =>
      this.#tier(context, { tier, used, capacity, runs: shard.runs }, height + at * TIER, width, colours),
    );
    const shared = `${count(shard.used)} of ${count(shard.cells)} cells used, ${count(shard.cached)} kept for later prompts`;
    const saved = tiers.map(([tier, [used, capacity]]) =>
      `${bytes(used)} of ${bytes(capacity)} on ${tier}`.replace("on memory", "in memory"),
    );
    const hidden = shard.more_cells ? [`${count(shard.more_cells)} cells not shown`] : [];
    const running = `${count(shard.sequences)} of ${count(shard.max_sequences)} sequences`;
    this.told.textContent = [running, shared, ...saved, ...hidden, shard.layout].join(" · ");
    this.canvas.node.setAttribute("aria-label", this.told.textContent);
  }

  #tier(context, { tier, used, capacity, runs }, top, width, colours) {
    context.fillStyle = colours.sunken;
    context.fillRect(0, top, width, TIER - 5);
    context.fillStyle = colours.accent;
    context.globalAlpha = 0.5;
    const scale = width / capacity;
    let at = 0;
    for (const [, , size, where] of runs) {
      if (where !== tier) continue;
      context.fillRect(at, top, Math.max(0.6, size * scale - 0.4), TIER - 5);
      at += size * scale;
    }
    if (at < used * scale) context.fillRect(at, top, used * scale - at, TIER - 5);
    context.globalAlpha = 1;
  }
}

/** Returns the nodes of a map with their places: a node lies before what hangs on it, one row above. */
function placed(map) {
  const nodes = map.map(([parent, cells, running, kept]) => ({
    parent,
    cells,
    holders: [...running],
    kept: kept.length,
    children: [],
  }));
  const roots = [];
  nodes.forEach((node) => (node.parent < 0 ? roots : nodes[node.parent].children).push(node));
  // Parents come before children, so that those who hold a node are known when its parent is reached from the end.
  for (const node of nodes.toReversed()) if (node.parent >= 0) nodes[node.parent].holders.push(...node.holders);
  let at = 0;
  const found = [];
  const waiting = roots.toReversed().map((node) => [node, 0]);
  while (waiting.length) {
    const [node, depth] = waiting.pop();
    found.push({ ...node, depth, at });
    at += node.cells;
    waiting.push(...node.children.toReversed().map((child) => [child, depth + 1]));
  }
  return found;
}

function colourOf({ holders }, colours) {
  if (holders.length === 1) return colours.ofRequest(holders[0]);
  return holders.length ? colours.text : colours.quiet;
}
