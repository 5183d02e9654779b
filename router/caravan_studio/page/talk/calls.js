/** The calls that a conversation makes. */

import { getForEvents, getJson, postForEvents, postJson } from "../base/api.js";

const path = (id, rest = "") => `v1/responses/${encodeURIComponent(id)}${rest}`;

/**
 * Yields the events of a response, which goes on without its reader and is kept. It is a new one, unless the server has
 * begun one with this key already.
 */
export const begin = (body, key, signal) =>
  postForEvents("v1/responses", { ...body, background: true, store: true, stream: true }, signal, {
    "Idempotency-Key": key,
  });
/** Yields the events of a response behind the one with a sequence number. */
export const resume = (id, sequence, signal) =>
  getForEvents(path(id, `?stream=true&starting_after=${sequence}`), signal);
export const whole = (id) => getJson(path(id));
export const cancel = (id) => postJson(path(id, "/cancel"), undefined);
/** Returns the ids of the tokens that a request's prompt has. */
export const promptOf = async (body) => (await postJson("v1/responses/render", body)).token_ids;

export const message = (role, text) => ({
  type: "message",
  role,
  content: [{ type: role === "assistant" ? "output_text" : "input_text", text }],
});
