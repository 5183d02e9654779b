/** Server-sent events, read from a body. The browser's own reader of them cannot send an API key. */

/** Yields `{event, data}` for each message; comments are passed over, and data is decoded JSON. */
export async function* messages(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const whole = (rest + value).split("\n\n");
      rest = whole.pop();
      for (const text of whole) {
        const message = parse(text);
        if (message) yield message;
      }
    }
  } finally {
    // Whoever stops to read no longer wants it.
    reader.cancel().catch(() => {});
  }
}

function parse(text) {
  const fields = { event: "message", data: "" };
  for (const line of text.split("\n")) {
    const [name, value] = [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).trimStart()];
    if (name === "data") fields.data += value;
    else if (name === "event") fields.event = value;
  }
  if (!fields.data || fields.data === "[DONE]") return null;
  return { event: fields.event, data: JSON.parse(fields.data) };
}
