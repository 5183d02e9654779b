/** An answer in the transcript, stored or as it is generated. */

import { element } from "../base/dom.js";
import { count, few, plural, seconds } from "../base/format.js";
import { partOf } from "./parts.js";

const LEAST_PAUSE_MS = 40;

/** Shows the items of an answer. Growing ones are drawn at most as often as drawing leaves most of the time free. */
export class AnswerView {
  #parts = [];
  #drawing = null;

  constructor() {
    this.body = element("div", { class: "answer-body" });
  }

  /** Shows stored items, or the last state of growing ones. */
  show(items) {
    clearTimeout(this.#drawing);
    this.#drawing = null;
    this.#draw(items, false);
  }

  /** Shows items that grow, soon. */
  grow(items, drawn) {
    this.#drawing ??= setTimeout(() => {
      const begun = performance.now();
      this.#draw(items, true);
      drawn();
      this.#drawing = null;
      this.#pause = Math.max(LEAST_PAUSE_MS, 4 * (performance.now() - begun));
    }, this.#pause);
  }

  #pause = 0;

  #draw(items, growing) {
    items.forEach((item, at) => {
      if (!this.#parts[at]) {
        this.#parts[at] = { ...partOf(item), shown: null };
        this.body.append(this.#parts[at].node);
      }
      const part = this.#parts[at];
      const open = growing && item.status === "in_progress";
      // A part that has ended is drawn once more, and then stays.
      if (part.shown === item && !open) return;
      part.update(item, open);
      part.shown = open ? null : item;
    });
  }
}

/** Returns the line that tells what an answer cost; "" if that is not known. */
export function costOf(usage) {
  if (!usage) return "";
  const parts = [plural(usage.output, "token")];
  const took = (usage.lastMs - usage.firstMs) / 1000;
  if (usage.output > 1 && took > 0) parts.push(`${few((usage.output - 1) / took)} tokens/s`);
  if (usage.firstMs) parts.push(`first after ${seconds(usage.firstMs / 1000)}`);
  parts.push(`${count(usage.cached)} of ${count(usage.input)} prompt tokens cached`);
  return parts.join(" · ");
}
