/** The view that shows what the scheduler does, live or from a recording. */

import { ApiError } from "../base/api.js";
import { button, byId, element } from "../base/dom.js";
import { count, plural, seconds } from "../base/format.js";
import { attempt } from "../base/notices.js";
import { readNames } from "../base/shards.js";
import { addView } from "../base/views.js";
import { CellMaps } from "./cells.js";
import { colours } from "./colours.js";
import { Figures } from "./figures.js";
import { History } from "./history.js";
import { Queue } from "./queue.js";
import { follow, readRecording } from "./sources.js";
import { describe, Timeline } from "./timeline.js";

// Steps are told some time after they ended.
const DELAY_S = 0.6;
const AGAIN_MS = 3000;
const SPANS_S = [2, 5, 10, 30, 60];

class Watch {
  #frame = null;
  #following = null;
  #shownState = "";
  #shownSteps = "";
  #drawn = { narrow: 0, stripes: 0 };

  constructor(box) {
    this.history = new History({ bounded: true });
    this.live = true;
    this.paused = false;
    this.time = null;
    this.received = null;
    this.told = element("p", { class: "quiet told" });
    this.under = element("p", { class: "quiet under" });
    this.figures = new Figures();
    this.queue = new Queue();
    this.maps = new CellMaps();
    this.timeline = new Timeline((block) => (this.under.textContent = block ? describe(block) : HINT));
    this.under.textContent = HINT;
    box.append(
      element("div", { class: "watch" }, this.#bar(), this.figures.node, this.queue.node, this.#lanes(), this.#cells()),
    );
    this.timeline.canvas.node.addEventListener("keydown", (event) => this.#key(event));
  }

  #bar() {
    this.pause = button("Pause", () => this.setPaused(!this.paused), { class: "primary" });
    this.scrub = element("input", {
      type: "range",
      min: "0",
      max: "1",
      step: "any",
      "aria-label": "Time",
      class: "scrub",
    });
    this.scrub.addEventListener("input", () => {
      this.setPaused(true);
      this.time = Number(this.scrub.value);
    });
    this.span = element(
      "select",
      { "aria-label": "Seconds in sight" },
      SPANS_S.map((span) => element("option", { value: span, selected: span === 10 }, `${span} s`)),
    );
    const file = element("input", {
      type: "file",
      accept: ".gz,.caravan,application/gzip",
      hidden: true,
      "aria-label": "Recording",
    });
    file.addEventListener("change", () => attempt(() => this.open(file.files[0])));
    this.back = button("Back to live", () => this.goLive(), { hidden: true });
    const open = button("Open a recording", () => file.click());
    return element("div", { class: "row bar" }, this.pause, this.scrub, this.span, open, file, this.back, this.told);
  }

  #lanes() {
    return element(
      "section",
      { class: "card", "aria-label": "Steps" },
      element("h2", {}, "Steps"),
      this.timeline.canvas.node,
      this.under,
    );
  }

  #cells() {
    const legend =
      "Each cell once: a beginning that several requests share lies before what hangs on it. Pale cells are kept for later prompts.";
    return element(
      "section",
      { class: "card", "aria-label": "Cells" },
      element("h2", {}, "Cells"),
      element("p", { class: "quiet" }, legend),
      this.maps.node,
    );
  }

  start() {
    // It may be shown already, at another address.
    this.stop();
    if (this.live) this.#follow();
    const draw = () => {
      this.#draw();
      this.#frame = requestAnimationFrame(draw);
    };
    this.#frame = requestAnimationFrame(draw);
  }

  stop() {
    cancelAnimationFrame(this.#frame);
    this.#following?.abort();
    this.#following = null;
  }

  /** Follows the server as long as the view is shown. Nothing is asked of it when nobody looks. */
  async #follow() {
    const following = (this.#following = new AbortController());
    while (!following.signal.aborted) {
      try {
        await readNames();
        await follow((message) => this.#take(message), following.signal);
        this.refusal = "The server ended the stream.";
      } catch (error) {
        if (error.name === "AbortError") return;
        if (!(error instanceof ApiError)) console.error(error);
        this.refusal =
          error.status === 403
            ? "The steps are shown to operators: with a key of one, or without keys on the server's own host."
            : error.message;
        if (error.status === 403 || error.status === 404) return;
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  #take(message) {
    this.refusal = null;
    // Times of a server that has started again are on another clock.
    if (message.type === "hello") this.history = new History({ bounded: true });
    this.history.take(message);
    if (message.at === this.history.ends) this.received = performance.now();
  }

  async open(file) {
    const history = new History({ bounded: false });
    const ended = await readRecording(file, (message) => history.take(message));
    this.#following?.abort();
    this.live = false;
    this.history = history;
    this.ended = ended && `ended before the router: ${ended}`;
    this.time = history.begins;
    this.back.hidden = false;
    this.setPaused(true);
  }

  goLive() {
    this.live = true;
    this.back.hidden = true;
    this.history = new History({ bounded: true });
    this.setPaused(false);
    this.#follow();
  }

  setPaused(paused) {
    this.paused = paused;
    // A recording that has ended begins anew.
    if (!paused && !this.live && this.time >= this.history.ends) this.time = this.history.begins;
    this.pause.textContent = paused ? (this.live ? "Go on" : "Play") : "Pause";
    this.playedFrom = { time: this.time, at: performance.now() };
  }

  #key(event) {
    const span = Number(this.span.value);
    const step = { ArrowLeft: -span / 10, ArrowRight: span / 10 }[event.key];
    if (event.key === " ") this.setPaused(!this.paused);
    else if (step) {
      this.setPaused(true);
      this.time = Math.min(this.history.ends, Math.max(this.history.begins, this.time + step));
    } else return;
    event.preventDefault();
  }

  /** Returns the time that is shown. */
  #now() {
    const { begins, ends } = this.history;
    if (this.paused) return this.time ?? ends;
    if (this.live) return ends + (performance.now() - this.received) / 1000 - DELAY_S;
    const time = this.playedFrom.time + (performance.now() - this.playedFrom.at) / 1000;
    if (time >= ends) this.setPaused(true);
    return Math.max(begins, Math.min(ends, time));
  }

  #draw() {
    if (this.history.ends === null) {
      this.told.textContent = this.refusal ?? "Waiting for the first step…";
      return;
    }
    const theme = colours();
    this.time = this.#now();
    this.#drawSteps(theme);
    this.scrub.min = this.history.begins;
    this.scrub.max = this.history.ends;
    this.scrub.value = this.time;
    const states = this.history.statesAt(this.time);
    const version = [theme.ground, this.paused && this.time, ...states.map(({ at }) => at)].join();
    if (version === this.#shownState) return;
    this.#shownState = version;
    this.queue.show(states, this.time, theme);
    this.maps.show(states, theme);
    this.figures.show(states[0]?.figures);
    this.#tell(states);
  }

  /** Draws the steps, unless they look the same as before. */
  #drawSteps(theme) {
    const span = Number(this.span.value);
    const version = [this.time, span, this.timeline.canvas.node.clientWidth, theme.ground].join();
    if (version === this.#shownSteps) return;
    this.#shownSteps = version;
    this.#drawn = this.timeline.draw(this.history, this.time - span, this.time, theme);
  }

  #tell(states) {
    const { narrow, stripes } = this.#drawn;
    const running = states.flatMap(({ shards }) => shards).reduce((sum, { sequences }) => sum + sequences, 0);
    const facts = [this.live ? (this.paused ? "paused" : "live") : "recording", plural(running, "sequence")];
    if (!this.live)
      facts.push(`${seconds(this.time - this.history.begins)} of ${seconds(this.history.ends - this.history.begins)}`);
    if (narrow) facts.push(`${count(narrow)} steps share a pixel with another`);
    const most = Math.max(0, ...states.flatMap(({ shards }) => shards.map(({ running: all }) => all.length)));
    if (most > stripes) facts.push(`a step shows ${stripes} of its requests at most`);
    if (this.history.dropped) facts.push(`${plural(this.history.dropped, "message")} lost on the way`);
    if (this.refusal) facts.push(this.refusal);
    if (!this.live && this.ended) facts.push(this.ended);
    this.told.textContent = facts.join(" · ");
    this.timeline.canvas.node.setAttribute(
      "aria-label",
      `Steps of ${plural(this.history.lanes.size, "shard")}: ${this.told.textContent}`,
    );
  }
}

const HINT =
  "Solid: prompts. Pale: a token for each request. Hatched: cells that move. Below a step: draft tokens, taken and lost.";

export function startWatch() {
  let watch = null;
  addView("watch", {
    show: () => {
      watch ??= new Watch(byId("watch"));
      watch.start();
    },
    hide: () => watch.stop(),
  });
}
