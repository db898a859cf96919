// The playground: a conversation through /v1/chat/completions, or a completion, token by token.

import { byId, count, duration, h, legendItem } from "./dom.js";
import { arrivals, headers, problemOf } from "./feed.js";

const NUM_ALTERNATIVES = 5;
const TINTS = [["t0", "up to 1.5 × the median"], ["t1", "2.5 ×"], ["t2", "5 ×"], ["t3", "10 ×"], ["t4", "longer"]];
const LIMITS = [1.5, 2.5, 5, 10];
let conversation = [];
let running = null;

export function showModels(models) {
  const select = byId("ask").elements.model;
  if ([...select.options].map((option) => option.value).join("\n") !== models.join("\n")) {
    select.replaceChildren(...models.map((model) => h("option", { value: model }, model)));
  }
}

export function startPlayground() {
  const form = byId("ask");
  byId("tints").replaceChildren(...TINTS.map(([tint, label]) => legendItem(tint, label)));
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(form); });
  form.elements.prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => { running?.abort(); conversation = []; byId("answer").replaceChildren(h("p", { class: "empty" }, "The next message begins a new conversation.")); });
}

function bodyOf(fields, prompt) {
  const number = (name) => (fields[name].value === "" ? undefined : Number(fields[name].value));
  const body = { stream: true, stream_options: { include_usage: true }, model: fields.model.value || undefined };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens", "seed"]) body[name] = number(name);
  if (fields.mode.value === "text") return ["/v1/completions", { ...body, prompt, logprobs: NUM_ALTERNATIVES }];
  return ["/v1/chat/completions", { ...body, messages: [...conversation, { role: "user", content: prompt }], logprobs: true, top_logprobs: NUM_ALTERNATIVES }];
}

async function ask(form) {
  if (running) return;
  const prompt = form.elements.prompt.value;
  const [path, body] = bodyOf(form.elements, prompt);
  const answer = { text: h("div", { class: "text" }), sum: h("p", { class: "muted" }, "waiting …"), tokens: [], content: "" };
  const turns = [h("section", { class: "turn" }, h("h3", null, "You"), h("pre", null, prompt)), h("section", { class: "turn" }, h("h3", null, "Model"), answer.text, answer.sum)];
  const box = byId("answer");
  if (box.querySelector(".empty")) box.replaceChildren();
  box.append(...turns);
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  try {
    await stream(path, body, answer);
    conversation.push({ role: "user", content: prompt }, { role: "assistant", content: answer.content });
    form.elements.prompt.value = "";
  } catch (error) {
    answer.sum.className = "bad";
    answer.sum.textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
  turns[1].scrollIntoView({ block: "nearest" });
}

async function stream(path, body, answer) {
  const began = performance.now();
  const response = await fetch(path, { method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(body), signal: running.signal });
  if (!response.ok) throw new Error(await problemOf(response));
  let before = began;
  let finish = "";
  let usage = null;
  for await (const arrived of arrivals(response)) {
    const now = performance.now();
    const tokens = [];
    for (const { data } of arrived) {
      if (data === "[DONE]") continue;
      const part = JSON.parse(data);
      if (part.error) throw new Error(part.error.message);
      usage = part.usage ?? usage;
      const choice = part.choices?.[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      answer.content += choice.delta?.content ?? choice.text ?? "";
      tokens.push(...tokensOf(choice));
    }
    addAll(answer, tokens, now - before);
    if (tokens.length) before = now;
    answer.sum.textContent = summary(answer.tokens, began, before, finish, usage);
  }
}

/** Adds tokens that arrived together, `ms` after the one before: each took its share. The first one of all took the prompt's time, too, which is not shared. */
function addAll(answer, tokens, ms) {
  const isFirst = answer.tokens.length === 0;
  const together = tokens.length > 1 ? `, ${tokens.length} tokens arrived together` : "";
  tokens.forEach((token, i) => {
    const own = isFirst ? (i ? 0 : ms) : ms / tokens.length;
    add(answer, token, own, `${isFirst && !i ? " (time to first token)" : ""}${together}`);
  });
  tint(answer.tokens);
}

/** [{token, logprob, top: [[token, logprob]]}] of a chunk in either format. */
function tokensOf({ logprobs }) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({ token, logprob, top: top.map((each) => [each.token, each.logprob]) }));
  return (logprobs.tokens ?? []).map((token, i) => ({ token, logprob: logprobs.token_logprobs[i], top: Object.entries(logprobs.top_logprobs?.[i] ?? {}) }));
}

function add(answer, { token, logprob, top }, ms, note) {
  const chance = (value) => `${(100 * Math.exp(value)).toFixed(1).padStart(5)} %`;
  const shown = (text) => JSON.stringify(text);
  const lines = [`${shown(token)}  ${duration(ms / 1000)}${note}`, `probability ${chance(logprob).trim()}, logprob ${logprob.toFixed(3).replace(/^-(0\.0*)$/, "$1")}`];
  lines.push(...[...top].sort((a, b) => b[1] - a[1]).map(([text, value]) => `${chance(value)}  ${shown(text)}`));
  const span = h("span", { class: "token", tabindex: 0, "data-tip": lines.join("\n"), "aria-label": `${token}: ${lines.slice(0, 2).join(", ")}` }, token);
  answer.tokens.push({ span, ms });
  answer.text.append(span);
}

/** Tints each token by its time relative to the median; the first one took the prompt's time, too. */
function tint(tokens) {
  const later = tokens.slice(1).map(({ ms }) => ms).sort((a, b) => a - b);
  const median = later[Math.floor(later.length / 2)];
  tokens.slice(1).forEach(({ span, ms }) => {
    const level = LIMITS.findIndex((limit) => ms <= limit * median);
    span.className = `token t${level < 0 ? LIMITS.length : level}`;
  });
}

function summary(tokens, began, last, finish, usage) {
  if (!tokens.length) return "waiting …";
  const ttft = tokens[0].ms / 1000;
  const rest = (last - began) / 1000 - ttft;
  const parts = [`first token ${duration(ttft)}`, `${count(tokens.length)} tokens`, rest > 0 ? `${((tokens.length - 1) / rest).toFixed(1)} tokens/s` : ""];
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) parts.push(`${count(usage.prompt_tokens)} prompt tokens${cached ? `, ${count(cached)} cached` : ""}`);
  if (finish) parts.push(`finish: ${finish}`);
  return parts.filter(Boolean).join("  ·  ");
}
