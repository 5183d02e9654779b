/** Where messages of the scheduler come from: the server, or a recording in a file. */

import { send } from "../base/api.js";
import { messages } from "../base/events.js";

/** Passes each message of the stream on until it is aborted. Throws ApiError. */
export async function follow(take, signal) {
  const response = await send("GET", "admin/timeline", { signal });
  for await (const { data } of messages(response.body)) take(data);
}

const MARK = '{"page":';
const END_MARK = '{"ended":';

/**
 * Passes each message of a recording on. A recording that was cut off counts as far as it goes.
 * Returns why it ended before the router, "" if it did not.
 */
export async function readRecording(file, take) {
  const text = file.stream().pipeThrough(new DecompressionStream("gzip")).pipeThrough(new TextDecoderStream());
  const reader = text.getReader();
  let rest = "";
  let found = 0;
  let ended = "";
  const takeLine = (line) => {
    if (line.startsWith(END_MARK)) ended = JSON.parse(line).ended;
    if (!line.startsWith(MARK)) return;
    take(JSON.parse(line).page);
    found += 1;
  };
  try {
    for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      lines.forEach(takeLine);
    }
  } catch (error) {
    if (!found) throw new Error("This file is no recording.", { cause: error });
  }
  if (!found) throw new Error("This file has nothing to show.");
  return ended;
}
