/** Lets the model go on with its last message. A chat completion continues such a message; a response does not. */

import { postForEvents } from "../base/api.js";
import { textOf } from "./entries.js";

/** Yields the events that add to the last one of `items`, which are those of a whole conversation. */
export async function* continued(live, items, fields) {
  const { instructions, max_output_tokens: most, tools, tool_choice, reasoning, truncation, ...sampling } = fields;
  const messages = [...(instructions ? [{ role: "system", content: instructions }] : []), ...items.map(asMessage)];
  const body = {
    ...sampling,
    ...(most ? { max_tokens: most } : {}),
    messages: messages.filter((message) => message !== null),
    continue_final_message: true,
    stream: true,
    stream_options: { include_usage: true },
  };
  const place = { output_index: live.node.items.length - 1, content_index: 0 };
  let finish = null;
  for await (const { data } of postForEvents("v1/chat/completions", body, live.abort.signal)) {
    const delta = data.choices?.[0]?.delta?.content;
    if (delta) yield { event: "response.output_text.delta", data: { ...place, delta } };
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
  if (item.type === "message") return { role: item.role, content: contentOf(item) };
  if (item.type === "function_call") {
    const called = { id: item.call_id, type: "function", function: { name: item.name, arguments: item.arguments } };
    return { role: "assistant", content: "", tool_calls: [called] };
  }
  if (item.type === "function_call_output") return { role: "tool", tool_call_id: item.call_id, content: item.output };
  return null;
}

function contentOf(item) {
  if (item.content.every((part) => part.text !== undefined)) return textOf(item);
  return item.content.map((part) => {
    if (part.image_url) return { type: "image_url", image_url: { url: part.image_url } };
    return part.text === undefined ? part : { type: "text", text: part.text };
  });
}
