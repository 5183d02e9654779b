/** How likely each token was. The server tells it of any text, token by token. */

import { postJson } from "../base/api.js";
import { button, element } from "../base/dom.js";
import { attempt } from "../base/notices.js";
import { chosenModel } from "../base/models.js";
import { textOfEntry } from "./entries.js";

const ALTERNATIVES = 5;

/** Shows an answer token by token in place of `body`, until it is closed. */
export async function showProbabilities(conversation, entry, body) {
  const tokens = await attempt(() => tokensOf(conversation, entry));
  if (!tokens) return;
  const view = tokenView(tokens);
  const close = button("Close", () => shown.replaceWith(body), { class: "plain small" });
  const shown = element("div", { class: "probabilities" }, view, close);
  body.replaceWith(shown);
}

/** Returns `{text, logprob, others}` of each token of an answer. */
async function tokensOf(conversation, entry) {
  const answer = textOfEntry(entry);
  const body = {
    model: chosenModel(),
    prompt: await conversation.tokensUpTo(entry),
    max_tokens: 0,
    echo: true,
    logprobs: ALTERNATIVES,
  };
  const { logprobs } = (await postJson("v1/completions", body)).choices[0];
  const whole = logprobs.tokens.join("");
  const start = whole.lastIndexOf(answer.trim());
  if (start < 0) throw new Error("The model was shown this answer in another form.");
  const tokens = tokensFrom(logprobs);
  let at = 0;
  return tokens.filter((token) => {
    at += token.text.length;
    return at > start && at - token.text.length < start + answer.trim().length;
  });
}

export function tokensFrom(logprobs) {
  return logprobs.tokens.map((text, at) => ({
    text,
    logprob: logprobs.token_logprobs[at],
    others: logprobs.top_logprobs?.[at] ?? {},
  }));
}

/** Returns tokens coloured by how likely they were; hovering or the arrow keys tell the numbers. */
export function tokenView(tokens) {
  const told = element("div", { class: "token-told", role: "status" }, "Point at a token, or use the arrow keys.");
  const spans = tokens.map((token) => tokenSpan(token));
  const tell = (at) => {
    told.replaceChildren(...describe(tokens[at]));
    spans.forEach((span, one) => span.classList.toggle("told", one === at));
  };
  let place = -1;
  const text = element(
    "div",
    { class: "tokens", tabIndex: 0, role: "group", "aria-label": "Tokens", dir: "auto" },
    spans,
  );
  text.addEventListener("pointerover", (event) => {
    const at = spans.indexOf(event.target);
    if (at >= 0) tell((place = at));
  });
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !spans.length) return;
    event.preventDefault();
    place = Math.max(0, Math.min(spans.length - 1, place + step));
    tell(place);
  });
  const add = (token) => {
    tokens.push(token);
    spans.push(tokenSpan(token));
    text.append(spans.at(-1));
  };
  return Object.assign(element("div", {}, text, told), { add });
}

function tokenSpan({ text, logprob }) {
  const span = element("span", { class: "token" }, text);
  // The less likely, the stronger.
  if (logprob !== null) span.style.setProperty("--surprise", `${Math.round(100 * (1 - Math.exp(logprob)))}%`);
  return span;
}

function describe({ text, logprob, others }) {
  const line = (name, value) =>
    element("span", { class: "token-line" }, element("code", {}, JSON.stringify(name)), ` ${percent(value)}`);
  const chosen = logprob === null ? "the first token has none" : percent(logprob);
  const rest = Object.entries(others).filter(([name]) => name !== text);
  return [element("strong", {}, JSON.stringify(text), ` ${chosen}`), ...rest.map(([name, value]) => line(name, value))];
}

const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(logprob > -2.3 ? 0 : 2)} %`;
