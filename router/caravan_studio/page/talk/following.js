/** Follows an answer on the server to its end, whatever happens to the connection and to the server. */

import { ApiError } from "../base/api.js";
import { begin, resume } from "./calls.js";

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
  for (let pause = FIRST_PAUSE_MS; live.running; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
    const { response, sequence } = live.node;
    try {
      for await (const event of response ? resume(response, sequence, signal) : begin(body, signal)) {
        live.take(event);
        pause = FIRST_PAUSE_MS;
      }
    } catch (error) {
      if (!live.node.response || !(error instanceof ApiError) || !PASSING.includes(error.status)) throw error;
    }
    if (!live.running) return;
    if (!live.node.response) throw new ApiError(0, "The server did not begin an answer.");
    live.say("The connection is lost. Trying again…");
    await untilOnline(pause, signal);
  }
}

/** Waits some time, or until the browser says that there is a network again. */
function untilOnline(most, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, most);
    addEventListener("online", resolve, { once: true });
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
