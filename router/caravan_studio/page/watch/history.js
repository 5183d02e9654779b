/** What the scheduler told, in the order of time: steps by shard, what happened to requests, and states. */

const MOST_S = 600;
const MOST_BLOCKS = 200_000;

export class History {
  #blocks = 0;

  /** `bounded`: the oldest is forgotten, as a live view needs it. */
  constructor({ bounded }) {
    this.bounded = bounded;
    this.lanes = new Map();
    this.states = new Map();
    this.marks = [];
    this.begins = null;
    this.ends = null;
    this.dropped = 0;
    this.unixOffset = null;
  }

  /** Takes a message of the stream or of a recording. */
  take(message) {
    if (message.at !== undefined) {
      this.begins ??= message.at;
      this.ends = Math.max(this.ends ?? message.at, message.at);
    }
    if (message.type === "dropped") this.dropped += message.count;
    else if (message.type === "hello") this.unixOffset = message.unix - message.at;
    else if (message.type === "frame") this.#takeFrame(message);
    else if (message.type === "state") this.#takeState(message);
    else if (message.type === "gone") this.states.delete(message.model);
    if (this.bounded) this.#forget();
  }

  #takeFrame({ model, blocks, marks }) {
    for (const block of blocks) {
      const lane = this.#lane(model, block.shard);
      lane.push({ ...block, model, requests: requestsOf(block) });
      this.#blocks += 1;
    }
    this.marks.push(...marks.map((mark) => [...mark, model]));
  }

  #takeState(state) {
    for (const { shard } of state.shards) this.#lane(state.model, shard);
    if (!this.states.has(state.model)) this.states.set(state.model, []);
    this.states.get(state.model).push(state);
  }

  #lane(model, shard) {
    const name = `${model}\n${shard}`;
    if (!this.lanes.has(name)) this.lanes.set(name, []);
    return this.lanes.get(name);
  }

  #forget() {
    const before = this.ends - MOST_S;
    if (this.#blocks <= MOST_BLOCKS && this.begins >= before) return;
    const cut = this.#blocks > MOST_BLOCKS ? (this.begins + this.ends) / 2 : before + 30;
    for (const lane of this.lanes.values()) this.#blocks -= lane.splice(0, firstAfter(lane, cut)).length;
    for (const states of this.states.values())
      states.splice(
        0,
        firstAfter(states, cut, (state) => state.at),
      );
    this.marks = this.marks.filter(([at]) => at >= cut);
    this.begins = cut;
  }

  /** Returns the blocks of a lane between two times. */
  blocks(name, from, to) {
    const lane = this.lanes.get(name) ?? [];
    const found = [];
    for (let at = firstAfter(lane, from); at < lane.length && lane[at].start < to; at += 1) found.push(lane[at]);
    return found;
  }

  /** Returns the last state of each model at a time. */
  statesAt(time) {
    return [...this.states.values()].flatMap((states) => {
      const after = firstAfter(states, time, (state) => state.at - 1e-9);
      const state = states[after - 1] ?? states[0];
      return state ? [state] : [];
    });
  }
}

/** Returns `[request, weight]` of those in a block, prompts first. */
function requestsOf(block) {
  const prompts = (block.chunks ?? []).map(([request, , tokens]) => [request, tokens, true]);
  const riders = (block.riders ?? []).map((request) => [request, 1, false]);
  const moved = (block.moved ?? []).map(([request, cells]) => [request, cells, false]);
  return [...prompts, ...riders, ...moved];
}

/** Returns the place of the first entry that ends after a time. Entries are in the order of their ends. */
function firstAfter(entries, time, endOf = (entry) => entry.end) {
  let [low, high] = [0, entries.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (endOf(entries[middle]) > time) high = middle;
    else low = middle + 1;
  }
  return low;
}
