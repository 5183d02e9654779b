/** The figures of the last minute. */

import { element } from "../base/dom.js";
import { count, few, seconds } from "../base/format.js";

const FIGURES = [
  ["Tokens per second", (f) => few(f.tokens_s)],
  ["Prompt tokens per second", (f) => few(f.prompt_tokens_s)],
  ["First token", (f) => median(f.ttft_s), (f) => worst(f.ttft_s)],
  ["Between tokens", (f) => median(f.itl_s), (f) => worst(f.itl_s)],
  ["Found in the cache", (f) => (f.hit_rate === null ? "–" : `${Math.round(100 * f.hit_rate)} %`)],
  ["Steps per second", (f) => few(f.steps_s)],
  ["Requests", (f) => count(f.requests)],
];

export class Figures {
  constructor() {
    this.values = FIGURES.map(() => element("dd"));
    const pairs = FIGURES.map(([name], at) => element("div", {}, element("dt", {}, name), this.values[at]));
    this.node = element("dl", { class: "figures" }, pairs);
  }

  /** Shows the figures of one model. */
  show(figures) {
    FIGURES.forEach(([, told, more], at) => {
      const rest = figures && more ? [" ", element("small", { class: "quiet" }, more(figures))] : [];
      this.values[at].replaceChildren(figures ? told(figures) : "–", ...rest);
    });
  }
}

const median = (found) => (found ? seconds(found[0]) : "–");
const worst = (found) => (found ? `99 %: ${seconds(found[1])}` : "");
