/** Lets the model go on with its last message. A chat completion continues such a message; a response does not. */

import { postForEvents } from "../base/api.js";
import { textOf } from "./entries.js";

/** Yields the events of a response whose message begins with what is there. */
export async function* continued(live, items, fields) {
  const { instructions, max_output_tokens: most, conversation, tools, tool_choice, reasoning, ...sampling } = fields;
  const messages = [...(instructions ? [{ role: "system", content: instructions }] : []), ...items.map(asMessage)];
  const body = {
    ...sampling,
    ...(most ? { max_tokens: most } : {}),
    messages: messages.filter((message) => message !== null),
    continue_final_message: true,
    stream: true,
    stream_options: { include_usage: true },
  };
  const begun = textOf(items.at(-1));
  const part = { type: "output_text", text: begun };
  const item = { type: "message", role: "assistant", status: "in_progress", content: [part] };
  yield { event: "response.output_item.added", data: { output_index: 0, item } };
  let finish = null;
  for await (const { data } of postForEvents("v1/chat/completions", body, live.abort.signal)) {
    const delta = data.choices?.[0]?.delta?.content;
    if (delta) yield { event: "response.output_text.delta", data: { output_index: 0, content_index: 0, delta } };
    finish = data.choices?.[0]?.finish_reason ?? finish;
    if (data.usage) yield ended(data.usage, finish);
    if (data.error) yield { event: "error", data };
  }
}

function ended(usage, finish) {
  const told = {
    input_tokens: usage.prompt_tokens,
    input_tokens_details: { cached_tokens: usage.prompt_tokens_details.cached_tokens },
    output_tokens: usage.completion_tokens,
    output_tokens_details: { reasoning_tokens: 0 },
  };
  const response = { status: finish === "length" ? "incomplete" : "completed", usage: told };
  return { event: "response.completed", data: { response } };
}

function asMessage(item) {
  if (item.type === "message") return { role: item.role, content: textOf(item) };
  if (item.type === "function_call") {
    const called = { id: item.call_id, type: "function", function: { name: item.name, arguments: item.arguments } };
    return { role: "assistant", content: "", tool_calls: [called] };
  }
  if (item.type === "function_call_output") return { role: "tool", tool_call_id: item.call_id, content: item.output };
  return null;
}
