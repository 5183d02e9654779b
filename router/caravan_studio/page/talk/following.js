/** Follows an answer on the server to its end, whatever happens to the connection and to the server. */

import { ApiError } from "../base/api.js";
import { begin, cancel, resume, whole } from "./calls.js";

const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 4000;
// The server, or a proxy before it, may answer again.
const PASSING = [0, 429, 500, 502, 503, 504];

/**
 * Lets `live` take the events of its response, which `body` begins unless it has begun. Throws ApiError if the response
 * did not begin or is unknown to the server by now; what the answer has stays in it.
 */
export async function follow(live, body) {
  const { signal } = live.abort;
  try {
    for (let pause = FIRST_PAUSE_MS; live.running; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
      if (await take(live, body)) pause = FIRST_PAUSE_MS;
      if (!live.running) return;
      live.say("The connection is lost. Trying again…");
      await untilOnline(pause, signal);
    }
  } catch (error) {
    if (error.name !== "AbortError" || !live.node.response) throw error;
    await end(live, error);
  }
}

/** Takes events until there are no more for now. Returns whether there were any. */
async function take(live, body) {
  const { signal } = live.abort;
  const { id, response, sequence, asked = 0 } = live.node;
  try {
    for await (const event of response ? again(response, sequence, signal) : begin(body, `${id}-${asked}`, signal)) live.take(event);
  } catch (error) {
    const passes = error instanceof ApiError && PASSING.includes(error.status);
    if (!passes || !live.node.response) throw error;
  }
  if (!live.node.response) throw new ApiError(0, "The server did not begin an answer.");
  return live.node.sequence > sequence;
}

/** Yields the events behind one of a response; those of one that ended long ago are gone, and its end is all. */
async function* again(response, sequence, signal) {
  try {
    yield* resume(response, sequence, signal);
  } catch (error) {
    if (!(error instanceof ApiError) || error.status !== 400) throw error;
    yield { data: { response: await whole(response) } };
  }
}

/** Ends an answer that a person has stopped with what the server has of it by then. */
async function end(live, stopped) {
  try {
    live.take({ data: { response: await cancel(live.node.response) } });
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.code !== "response_ended") throw stopped;
    live.take({ data: { response: await whole(live.node.response) } });
  }
}

/** Waits some time, or until the browser says that there is a network again. */
async function untilOnline(most, signal) {
  const over = new AbortController();
  const once = { once: true, signal: over.signal };
  let timer;
  try {
    await new Promise((resolve, reject) => {
      signal.throwIfAborted();
      timer = setTimeout(resolve, most);
      addEventListener("online", resolve, once);
      signal.addEventListener("abort", () => reject(signal.reason), once);
    });
  } finally {
    clearTimeout(timer);
    over.abort();
  }
}
