/** Sends the examples to the server of this page, and shows the answers as they arrive. */
"use strict";

const MOST_SHOWN = 200_000;
const NARROW = matchMedia("(max-width: 50rem)");
// The same place in which the page for browsers keeps the key: this tab.
const KEY = "caravan.key";
const byId = (id) => document.getElementById(id);
const requestId = document.body.dataset.requestId;
let model = document.body.dataset.model;

function storedKey() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY)) ?? "";
  } catch {
    return "";
  }
}

function keepKey(key) {
  try {
    sessionStorage.setItem(KEY, JSON.stringify(key));
  } catch {
    // A browser may forbid it; the field still has the key.
  }
}

function headers(kind) {
  const key = byId("docs-key").value;
  return {
    ...(kind && { "Content-Type": kind }),
    ...(key && { Authorization: `Bearer ${key}` }),
    "X-Request-Id": requestId,
  };
}

const fields = (form, place) => [...form.querySelectorAll(`[data-in=${place}]`)];

/** The path from this page's folder, so that a proxy may put a prefix before it. */
function addressOf(form) {
  let path = form.dataset.path;
  for (const { name, value } of fields(form, "path")) {
    // Names of models and addresses of shards have slashes and colons, which the path takes as they are.
    path = path.replace(`{${name}}`, encodeURIComponent(value));
  }
  const url = new URL(`.${path}`, document.baseURI);
  for (const { name, value } of fields(form, "query")) {
    if (value) url.searchParams.set(name, value);
  }
  return url;
}

function requestOf(form, signal) {
  const { method } = form.dataset;
  const [body] = fields(form, "body");
  const parts = fields(form, "form");
  if (!parts.length) {
    return { method, signal, headers: headers(body && "application/json"), body: body?.value };
  }
  const sent = new FormData();
  for (const part of parts) {
    if (part.type === "file") sent.append(part.name, part.files[0] ?? tone(), part.files[0]?.name ?? "tone.wav");
    else if (part.value) sent.append(part.name, part.value);
  }
  return { method, signal, headers: headers(), body: sent };
}

/** A second of a sine in a WAV file of 16 kHz. */
function tone() {
  const rate = 16_000;
  const view = new DataView(new ArrayBuffer(44 + 2 * rate));
  const word = (at, text) => [...text].forEach((letter, place) => view.setUint8(at + place, letter.charCodeAt(0)));
  word(0, "RIFF");
  view.setUint32(4, 36 + 2 * rate, true);
  word(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  word(36, "data");
  view.setUint32(40, 2 * rate, true);
  for (let place = 0; place < rate; place += 1) {
    view.setInt16(44 + 2 * place, 8000 * Math.sin((place * 2 * Math.PI * 440) / rate), true);
  }
  return new Blob([view.buffer], { type: "audio/wav" });
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function curlOf(form) {
  const words = ["curl -N", ...(form.dataset.method === "HEAD" ? ["--head"] : ["-X", form.dataset.method])];
  words.push(quoted(addressOf(form).href));
  if (byId("docs-key").value) words.push('-H "Authorization: Bearer $CARAVAN_API_KEY"');
  for (const { value } of fields(form, "body")) words.push("-H 'Content-Type: application/json' -d", quoted(value));
  for (const part of fields(form, "form")) {
    const file = part.type === "file";
    if (file || part.value) words.push("-F", quoted(`${part.name}=${file ? "@sound.wav" : part.value}`));
  }
  return words.join(" ");
}

/** Fills the fields that are empty and whose values other operations return, by sending these. */
async function fillSources(form, signal) {
  for (const field of form.querySelectorAll("[data-source]")) {
    if (field.value) continue;
    const { source, pointer } = field.dataset;
    const other = document.querySelector(`#${source} form`);
    for (const known of form.querySelectorAll("[data-source]")) {
      const same = other.elements.namedItem(known.name);
      if (same && known.value) same.value = known.value;
    }
    await fillSources(other, signal);
    const request = requestOf(other, signal);
    const [body] = fields(other, "body");
    const [whole] = other.querySelectorAll(".example");
    if (body && whole) request.body = named(whole.dataset.body);
    const response = await fetch(addressOf(other), request);
    if (!response.ok) throw new Error(`${source} answered ${response.status}: ${await response.text()}`);
    const steps = pointer.split("/").slice(1);
    field.value = steps.reduce((found, step) => found?.[step], await response.json()) ?? "";
    if (!field.value) throw new Error(`The answer of ${source} has no ${pointer}`);
  }
}

const isDrastic = ({ method, path }) => method === "DELETE" || path.endsWith("/drain");

async function send(form) {
  if (isDrastic(form.dataset) && !confirm(`Send ${form.dataset.method} ${form.dataset.path} to this server?`)) return;
  const [answer, status, stop] = [".answer", ".status", ".stop"].map((name) => form.querySelector(name));
  const button = form.querySelector(".primary");
  const stopping = new AbortController();
  const begun = performance.now();
  const tell = (text, failed = false) => {
    status.textContent = text;
    status.classList.toggle("failed", failed);
  };
  stop.onclick = () => stopping.abort();
  button.disabled = true;
  stop.hidden = false;
  answer.hidden = false;
  answer.textContent = "";
  tell("Sending");
  try {
    await fillSources(form, stopping.signal);
    const response = await fetch(addressOf(form), requestOf(form, stopping.signal));
    tell(`${response.status}, answering`, !response.ok);
    await show(response, answer);
    tell(`${response.status} in ${Math.round(performance.now() - begun).toLocaleString("en")} ms`, !response.ok);
  } catch (error) {
    tell(error.name === "AbortError" ? "Stopped" : error.message, error.name !== "AbortError");
  } finally {
    button.disabled = false;
    stop.hidden = true;
  }
}

async function show(response, answer) {
  const kind = response.headers.get("Content-Type") ?? "";
  if (kind.startsWith("application/json")) {
    const text = await response.text();
    answer.textContent = JSON.stringify(JSON.parse(text), null, 2).slice(0, MOST_SHOWN);
  } else if (response.body) {
    let shown = 0;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let next = await reader.read(); !next.done; next = await reader.read()) {
      // A stream without an end must not fill the memory.
      if (shown < MOST_SHOWN) answer.append(next.value.slice(0, MOST_SHOWN - shown));
      shown += next.value.length;
      answer.scrollTop = answer.scrollHeight;
    }
  }
  if (!answer.textContent) answer.textContent = "(no body)";
}

/** A text of an example with the chosen model. */
const named = (text) => text.replaceAll(JSON.stringify(document.body.dataset.model), JSON.stringify(model));

function chooseModel(next) {
  for (const field of document.querySelectorAll(".try textarea")) {
    field.value = field.value.replaceAll(JSON.stringify(model), JSON.stringify(next));
  }
  for (const field of document.querySelectorAll(".try input:not([type=file])")) {
    if (field.value === model) field.value = next;
  }
  model = next;
}

async function listModels() {
  const notice = byId("docs-notice");
  try {
    const response = await fetch(new URL("./v1/models", document.baseURI), { headers: headers() });
    if (response.status === 401) {
      notice.textContent = byId("docs-key").value ? "This key is unknown" : "This server needs an API key";
      return;
    }
    notice.textContent = "";
    const names = (await response.json()).data.map(({ id }) => id);
    byId("docs-model").replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.length) chooseModel(names[0]);
  } catch {
    notice.textContent = "The server does not answer";
  }
}

function prepareForm(form) {
  form.hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(form);
  });
  form.querySelector(".curl").addEventListener("click", () => {
    const command = form.querySelector(".command");
    command.textContent = curlOf(form);
    command.hidden = false;
  });
  const buttons = [...form.querySelectorAll(".example")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      form.querySelector("textarea").value = named(button.dataset.body);
    });
  }
}

/** Opens the operation that the address names. */
function openNamed() {
  const target = byId(decodeURIComponent(location.hash.slice(1)));
  if (target?.matches("details")) target.open = true;
  if (target && NARROW.matches) byId("docs-contents").open = false;
  target?.scrollIntoView();
}

function filter() {
  const wanted = byId("docs-filter").value.toLowerCase();
  for (const item of document.querySelectorAll("#docs-contents li li")) {
    const operation = byId(item.querySelector("a").hash.slice(1));
    const found = operation.querySelector("summary").textContent.toLowerCase().includes(wanted);
    item.hidden = !found;
    operation.hidden = !found;
  }
}

for (const form of document.querySelectorAll(".try")) prepareForm(form);
byId("docs-settings").hidden = false;
byId("docs-filter-label").hidden = false;
byId("docs-contents").open = !NARROW.matches;
byId("docs-key").value = storedKey();
byId("docs-key").addEventListener("change", () => {
  keepKey(byId("docs-key").value);
  listModels();
});
byId("docs-model").addEventListener("change", () => chooseModel(byId("docs-model").value));
byId("docs-filter").addEventListener("input", filter);
addEventListener("hashchange", openNamed);
openNamed();
listModels();
