/** An answer that is being generated: the items that the events of a response make. */

export class LiveAnswer extends EventTarget {
  constructor(branch) {
    super();
    this.branch = branch;
    this.id = null;
    this.items = [];
    this.status = "waiting";
    this.error = null;
    // The id of the stored item that it takes the place of, if it goes on with one.
    this.replaces = null;
    this.usage = null;
    this.abort = new AbortController();
    this.begun = performance.now();
    this.firstMs = null;
    this.lastMs = null;
  }

  get running() {
    return this.status === "waiting" || this.status === "running";
  }

  /** Takes an event of the stream and tells listeners which item has grown. */
  take({ event, data }) {
    const item = this.items[data.output_index];
    if (event === "response.created") this.id = data.response.id;
    else if (event === "response.output_item.added") this.items.push(structuredClone(data.item));
    else if (event === "response.content_part.added") item.content = [structuredClone(data.part)];
    else if (event === "response.output_text.delta") item.content[data.content_index].text += data.delta;
    else if (event === "response.reasoning_text.delta") addThought(item, data.delta);
    else if (event === "response.function_call_arguments.delta") item.arguments += data.delta;
    else if (event === "response.output_item.done") this.items[data.output_index] = data.item;
    else if (data.response?.status && data.response.status !== "in_progress") return this.#end(data.response);
    else if (data.error) return this.fail(data.error.message ?? data.error);
    if (data.output_index === undefined) return undefined;
    this.#time();
    return this.#changed();
  }

  fail(message) {
    this.status = "failed";
    this.error = message;
    this.#changed();
  }

  #time() {
    this.lastMs = performance.now() - this.begun;
    this.firstMs ??= this.lastMs;
    this.status = "running";
  }

  #end(response) {
    if (response.status === "failed") return this.fail(response.error.message);
    this.status = response.status;
    const { usage } = response;
    this.usage = {
      input: usage.input_tokens,
      cached: usage.input_tokens_details.cached_tokens,
      output: usage.output_tokens,
      thought: usage.output_tokens_details.reasoning_tokens,
      cut: response.status !== "completed",
      firstMs: Math.round(this.firstMs ?? 0),
      lastMs: Math.round(this.lastMs ?? 0),
    };
    return this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

function addThought(item, text) {
  item.content ??= [];
  if (!item.content.length) item.content.push({ type: "reasoning_text", text: "" });
  item.content[0].text += text;
}
