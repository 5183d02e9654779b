/** The timeline: a lane for each shard, a block for each step, in the colours of the requests in it. */

import { count, seconds } from "../base/format.js";
import { shardName } from "../base/shards.js";
import { canvas } from "./canvas.js";

const LANE = 46;
const LABEL = 18;
const BAR = 22;
const AXIS = 20;
// A stripe is at least this high, so fewer requests than a block has may be told apart.
const LEAST_STRIPE = 2;
// Drawing takes at most this long, else blocks get fewer stripes.
const MOST_MS = 12;
const MOVES = { save: "↓", load: "↑", fetch: "⇄", layout: "▦", release: "·" };

export class Timeline {
  #detail = BAR / LEAST_STRIPE;
  #drawn = [];
  #pattern = null;

  /** `point` is called with the block under the pointer, or null. */
  constructor(point) {
    this.canvas = canvas({ class: "timeline", tabIndex: 0, role: "img", "aria-label": "Steps" });
    const { node } = this.canvas;
    node.addEventListener("pointermove", (event) => point(this.#blockAt(event.offsetX, event.offsetY)));
    node.addEventListener("pointerleave", () => point(null));
  }

  /**
   * Draws what was between two times. Returns what it drew together: `narrow` blocks that share a pixel with another,
   * and the number of `stripes` of a block at most.
   */
  draw(history, from, to, colours) {
    const begun = performance.now();
    const names = [...history.lanes.keys()].sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
    const { context, width } = this.canvas.begin(AXIS + Math.max(1, names.length) * LANE, colours.surface);
    const scale = width / (to - from);
    this.#drawn = [];
    this.#pattern ??= hatching(context);
    axis(context, { from, to, scale, width, height: AXIS + names.length * LANE, colours });
    let narrow = 0;
    names.forEach((name, lane) => {
      const top = AXIS + lane * LANE + LABEL;
      context.fillStyle = colours.sunken;
      context.fillRect(0, top, width, BAR);
      context.fillStyle = colours.quiet;
      context.fillText(laneName(name), 2, top - 5);
      let last = -1;
      for (const block of history.blocks(name, from, to)) {
        const left = Math.max(0, (block.start - from) * scale);
        const right = Math.min(width, (block.end - from) * scale);
        if (right - left < 1 && Math.floor(left) === last) {
          narrow += 1;
          continue;
        }
        last = Math.floor(left);
        this.#block(context, block, { left, top, width: Math.max(1, right - left - 0.5) }, colours);
      }
    });
    this.#adapt(performance.now() - begun);
    return { narrow, stripes: Math.floor(this.#detail) };
  }

  #block(context, block, box, colours) {
    this.#drawn.push({ block, ...box });
    if (block.kind in MOVES) this.#move(context, block, box, colours);
    else this.#stripes(context, block, box, colours);
    const drafted = block.drafted ?? 0;
    if (drafted) {
      const kept = (box.width * block.accepted) / drafted;
      context.fillStyle = colours.accent;
      context.fillRect(box.left, box.top + BAR + 1, kept, 3);
      context.fillStyle = colours.danger;
      context.fillRect(box.left + kept, box.top + BAR + 1, box.width - kept, 3);
    }
    if (block.failed) {
      context.strokeStyle = colours.danger;
      context.lineWidth = 2;
      context.strokeRect(box.left + 1, box.top + 1, Math.max(1, box.width - 2), BAR - 2);
    }
  }

  /** Prompts are solid and as high as their part of the step's tokens; decodes are paler. */
  #stripes(context, { requests }, { left, top, width }, colours) {
    // The ends of blocks overlap a little.
    context.fillStyle = colours.sunken;
    context.fillRect(left, top, width, BAR);
    const shown = requests.slice(0, this.#detail);
    const whole = shown.reduce((sum, [, weight]) => sum + Math.sqrt(weight), 0) || 1;
    let at = top;
    for (const [request, weight, isPrompt] of shown) {
      const height = (BAR * Math.sqrt(weight)) / whole;
      context.globalAlpha = isPrompt ? 1 : 0.55;
      context.fillStyle = colours.ofRequest(request);
      context.fillRect(left, at, width, height);
      at += height;
    }
    context.globalAlpha = 1;
  }

  #move(context, { kind, requests }, { left, top, width }, colours) {
    context.fillStyle = requests.length ? colours.ofRequest(requests[0][0]) : colours.quiet;
    context.globalAlpha = 0.35;
    context.fillRect(left, top, width, BAR);
    context.globalAlpha = 1;
    context.fillStyle = this.#pattern;
    context.fillRect(left, top, width, BAR);
    if (width < 12) return;
    context.fillStyle = colours.text;
    context.fillText(MOVES[kind], left + width / 2 - 4, top + BAR / 2 + 4);
  }

  #adapt(ms) {
    const most = BAR / LEAST_STRIPE;
    if (ms > MOST_MS) this.#detail = Math.max(1, this.#detail * 0.7);
    else if (ms < MOST_MS / 4) this.#detail = Math.min(most, this.#detail * 1.1 + 0.1);
  }

  #blockAt(x, y) {
    const hit = (one) => x >= one.left && x <= one.left + one.width + 1 && y >= one.top && y <= one.top + BAR;
    return this.#drawn.findLast(hit)?.block ?? null;
  }
}

/** Returns what a block was, in words. */
export function describe(block) {
  const took = seconds(block.end - block.start);
  const parts = [
    `${shardName(block.shard)}: ${block.kind}`,
    block.steps > 1 ? `${count(block.steps)} steps in ${took}` : took,
  ];
  const prompts = block.chunks ?? [];
  if (prompts.length) {
    const tokens = prompts.reduce((sum, [, , length]) => sum + length, 0);
    parts.push(`${count(tokens)} prompt tokens of ${list(prompts.map(([request]) => request))}`);
  }
  if (block.riders?.length) parts.push(`${count(block.tokens)} tokens for ${list(block.riders)}`);
  if (block.moved?.length) parts.push(`cells of ${list(block.moved.map(([request]) => request))}`);
  if (block.source) parts.push(`from ${shardName(block.source)}`);
  if (block.drafted) parts.push(`${count(block.accepted)} of ${count(block.drafted)} draft tokens taken`);
  if (block.failed) parts.push(`${count(block.failed)} steps that changed nothing`);
  return parts.join(" · ");
}

function list(requests) {
  const shown = requests
    .slice(0, 6)
    .map((request) => `#${request}`)
    .join(", ");
  return requests.length > 6 ? `${shown} and ${count(requests.length - 6)} more` : shown;
}

/** Returns how a lane is called: by its shard and its model. */
export function laneName(name) {
  const [model, address] = name.split("\n");
  return `${shardName(address)} · ${model}`;
}

function axis(context, { from, to, scale, height, colours }) {
  const step = [0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120].find((one) => one * scale > 70) ?? 300;
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colours.quiet;
  for (let time = Math.ceil(from / step) * step; time < to; time += step) {
    const x = (time - from) * scale;
    context.fillStyle = colours.line;
    context.fillRect(x, AXIS - 4, 1, height);
    context.fillStyle = colours.quiet;
    if (x < scale * (to - from) - 30) context.fillText(`${(time - to).toFixed(step < 1 ? 1 : 0)} s`, x + 3, 12);
  }
}

function hatching(context) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ink = tile.getContext("2d");
  ink.strokeStyle = "rgb(128 128 128 / 70%)";
  ink.beginPath();
  ink.moveTo(0, 6);
  ink.lineTo(6, 0);
  ink.stroke();
  return context.createPattern(tile, "repeat");
}
