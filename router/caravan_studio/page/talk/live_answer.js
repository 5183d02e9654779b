/** An answer that is being generated: writes what the events of a response say into its node. Tells listeners by "change". */

import { isRunning } from "./archive.js";

export class LiveAnswer extends EventTarget {
  constructor(node) {
    super();
    this.node = node;
    // What the reader is told while the answer grows.
    this.state = node.items.length ? "Answering…" : "Waiting…";
    this.abort = new AbortController();
    // How long an answer took is known to the page that asked for it.
    this.begun = node.status === "sending" ? performance.now() : null;
    this.firstMs = null;
  }

  get running() {
    return isRunning(this.node);
  }

  /** Takes an event of the stream. */
  take({ event, data }) {
    const { node } = this;
    const item = node.items[data.output_index];
    node.sequence = data.sequence_number ?? node.sequence;
    if (event === "response.created") this.#begin(data.response);
    else if (event === "response.output_item.added") node.items[data.output_index] = structuredClone(data.item);
    else if (event === "response.content_part.added") item.content = [structuredClone(data.part)];
    else if (event === "response.output_text.delta") item.content[data.content_index].text += data.delta;
    else if (event === "response.reasoning_text.delta") addThought(item, data.delta);
    else if (event === "response.function_call_arguments.delta") item.arguments += data.delta;
    else if (event === "response.output_item.done") node.items[data.output_index] = data.item;
    else if (data.response && !["queued", "in_progress"].includes(data.response.status)) this.#end(data.response);
    else if (data.error) this.fail(data.error.message ?? data.error, data.error.code);
    if (data.output_index !== undefined) this.#grow();
    this.changed();
  }

  /** Ends the answer with an error. What it has stays. */
  fail(message, code = "", status = "failed") {
    Object.assign(this.node, { status, error: message, code });
    this.changed();
  }

  /** Ends the answer as a person wants it. What it has stays. */
  cut() {
    this.node.status = "cut";
    this.changed();
  }

  say(state) {
    this.state = state;
    this.changed();
  }

  changed() {
    this.dispatchEvent(new Event("change"));
  }

  #begin({ id, model }) {
    Object.assign(this.node, { response: id, model, status: "running" });
    this.dispatchEvent(new Event("begun"));
  }

  #grow() {
    this.state = "Answering…";
    if (this.begun !== null) this.firstMs ??= performance.now() - this.begun;
  }

  #end(response) {
    const { error, usage } = response;
    if (response.status === "failed") return this.fail(error.message, error.code);
    const { node } = this;
    node.status = response.status === "completed" ? "done" : "cut";
    // What continues an answer has no output of its own.
    node.items = response.output ?? node.items.map((item) => ({ ...item, status: response.status }));
    if (!usage) return undefined;
    node.usage = {
      input: usage.input_tokens,
      cached: usage.input_tokens_details.cached_tokens,
      output: usage.output_tokens,
      thought: usage.output_tokens_details.reasoning_tokens,
      firstMs: this.begun === null ? 0 : Math.round(this.firstMs ?? 0),
      lastMs: this.begun === null ? 0 : Math.round(performance.now() - this.begun),
    };
    return undefined;
  }
}

function addThought(item, text) {
  item.content ??= [];
  if (!item.content.length) item.content.push({ type: "reasoning_text", text: "" });
  item.content[0].text += text;
}
