/** Calls of the server's API. Paths have no slash at their start, so that the page works under any path of a proxy. */

import { key } from "./key.js";
import { messages } from "./events.js";

/** An answer that is no success. `status` is 0 if there was none. */
export class ApiError extends Error {
  constructor(status, message, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Returns the response of a request, whose status says that it succeeded. Throws ApiError. */
export async function send(method, path, { body, headers = {}, signal } = {}) {
  // The log of the server leaves out what the page asks for by itself.
  const all = { "X-Caravan-Page": "1", ...headers };
  if (key()) all.Authorization = `Bearer ${key()}`;
  if (body !== undefined) all["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers: all, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (response.ok) return response;
  throw await failure(response);
}

export const getJson = async (path, options) => (await send("GET", path, options)).json();
export const postJson = async (path, body, options) => (await send("POST", path, { body, ...options })).json();
export const deleteJson = async (path, options) => (await send("DELETE", path, options)).json();

/** Yields the events of a streamed response: `{event, data}`, whose data is decoded. Throws ApiError. */
export const postForEvents = (path, body, signal, headers) => eventsOf(send("POST", path, { body, signal, headers }));
export const getForEvents = (path, signal) => eventsOf(send("GET", path, { signal }));

async function* eventsOf(sent) {
  const { body } = await sent;
  try {
    yield* messages(body);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection to the server broke off.");
  }
}

async function failure(response) {
  const text = await response.text().catch(() => "");
  if (response.status === 401) dispatchEvent(new CustomEvent("caravan:key-needed"));
  try {
    const { error, error_type: type } = JSON.parse(text);
    if (typeof error === "string") return new ApiError(response.status, error, type);
    return new ApiError(response.status, error.message, error.code ?? error.type);
  } catch {
    return new ApiError(response.status, `The server answered with status ${response.status}.`);
  }
}
