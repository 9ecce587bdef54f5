/* The chat: sends messages, shows answers as they stream, and keeps the conversation in this tab. */

import { ask, events, ServerError, store } from "./api.js";
import { $, count, make } from "./dom.js";
import { Answer, asked } from "./message.js";
import { readSettings, setUpSettings } from "./settings.js";

const STARTERS = [
  "Explain how a watermill works.",
  "Write a Python function that reverses a list, with a comment.",
  "Name three rivers in France as a list.",
];

// {role, content, facts?, tokens?}; what is sent is role and content.
let messages = store.get("messages") ?? [];
let running = null; // AbortController of the answer that streams
let scored = store.get("scored") ?? false; // whether to ask for probabilities
let model = "";

export function setUpChat() {
  setUpSettings();
  $("starters").append(
    ...STARTERS.map((text) => make("li", {}, make("button", { type: "button", onclick: () => send(text) }, text))),
  );
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send($("prompt").value);
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send($("prompt").value);
  });
  $("prompt").addEventListener("input", fit);
  $("stop").addEventListener("click", stop);
  $("new").addEventListener("click", startAnew);
  $("probabilities").addEventListener("click", () => showProbabilities(!scored));
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) stop();
  });
  showProbabilities(scored);
  for (const message of messages) restore(message);
  offerLast();
  showWelcome();
}

/** Learn what is served. Throws what `ask` throws. */
export async function meetModel() {
  const { data } = await (await ask("/v1/models")).json();
  model = data[0].id;
  $("model").textContent = model;
  if (data[0].max_model_len) $("serving").textContent = `Holds ${count(data[0].max_model_len)} tokens of conversation`;
}

function send(text) {
  if (running || !text.trim()) return;
  $("prompt").value = "";
  fit();
  messages.push({ role: "user", content: text });
  $("log").append(asked(text));
  remember();
  answer();
}

function stop() {
  running?.abort();
}

function startAnew() {
  stop();
  messages = [];
  $("log").replaceChildren();
  remember();
  showWelcome();
  $("prompt").focus();
}

/** Ask for an answer to the conversation as it stands. */
async function answer() {
  const conversation = messages;
  const shown = new Answer();
  const voice = new Voice();
  $("log").append(shown.element);
  for (const old of $("log").querySelectorAll(".again")) old.remove();
  showWelcome();
  running = new AbortController();
  showRunning();
  follow(true);
  const began = performance.now();
  const facts = { tokens: 0, finish: "broken" };
  let first = 0;
  let last = 0;
  try {
    const response = await ask("/v1/chat/completions", { body: body(), signal: running.signal });
    facts.degraded = response.headers.get("x-tokenmill-degraded") ?? "";
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const near = atBottom();
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message);
      if (chunk.usage) note(facts, chunk.usage);
      for (const choice of chunk.choices ?? []) {
        const text = choice.delta.content ?? "";
        if (choice.token_ids?.length) {
          facts.tokens += choice.token_ids.length;
          last = performance.now();
          first = first || last;
        }
        if (choice.logprobs?.content) shown.score(choice.logprobs.content);
        if (text) shown.say(text);
        voice.say(text);
        if (choice.finish_reason) facts.finish = choice.finish_reason;
      }
      if (near) follow();
    }
    if (facts.finish === "broken") throw new ServerError("The connection to the server broke off.");
  } catch (problem) {
    if (problem.name === "AbortError") facts.finish = "stopped";
    else facts.error = problem instanceof ServerError ? problem.message : `Something went wrong: ${problem.message}`;
  }
  running = null;
  facts.ttft = first ? first - began : 0;
  facts.seconds = (last - first) / 1000;
  shown.end(facts);
  voice.end(facts);
  if (conversation === messages) {
    messages.push({ role: "assistant", content: shown.content, facts, tokens: shown.tokens });
    remember();
    offer(shown, messages.at(-1));
    offerLast();
  } else {
    shown.element.remove(); // a new chat was begun meanwhile
  }
  showRunning();
  follow();
}

function note(facts, usage) {
  facts.tokens = usage.completion_tokens;
  facts.prompt = usage.prompt_tokens;
  facts.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
}

function body() {
  const { system, ...sampling } = readSettings();
  // An answer that failed before it began is no part of the conversation.
  const said = messages.filter((message) => message.role === "user" || message.content);
  const spoken = said.map(({ role, content }) => ({ role, content }));
  return {
    messages: system ? [{ role: "system", content: system }, ...spoken] : spoken,
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    ...(scored ? { logprobs: true, top_logprobs: 5 } : {}),
    ...sampling,
  };
}

function again() {
  if (running || messages.at(-1)?.role !== "assistant") return;
  messages.pop();
  $("log").lastElementChild.remove();
  answer();
}

function offer(shown, message) {
  if (!message.content) return;
  shown.offer("Copy", async (event) => {
    await copy(message.content);
    const button = event.target;
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Not allowed, or there is none: browsers have it on localhost and with TLS only.
    const beside = make("textarea", { value: text, className: "unseen" });
    document.body.append(beside);
    beside.select();
    document.execCommand("copy");
    beside.remove();
  }
}

/** The last answer can be asked for again. */
function offerLast() {
  const actions = $("log").lastElementChild?.querySelector(".actions");
  if (!actions || messages.at(-1)?.role !== "assistant") return;
  const name = messages.at(-1).facts?.error ? "Try again" : "Regenerate";
  actions.append(make("button", { type: "button", className: "quiet again", onclick: again }, name));
}

function restore(message) {
  if (message.role === "user") {
    $("log").append(asked(message.content));
    return;
  }
  const shown = new Answer();
  shown.say(message.content);
  for (const token of message.tokens ?? []) shown.addToken(token);
  shown.end(message.facts ?? {});
  offer(shown, message);
  $("log").append(shown.element);
}

function remember() {
  if (store.set("messages", messages)) return;
  store.set("messages", messages.map(({ tokens, ...rest }) => rest)); // without what takes most room
}

function showProbabilities(on) {
  scored = on;
  store.set("scored", on);
  $("probabilities").setAttribute("aria-pressed", String(on));
  document.body.classList.toggle("tinted", on);
}

function showRunning() {
  const focused = document.activeElement;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  // Whoever pressed a button that is gone goes on at the prompt.
  if (focused === $("send") || focused === $("stop")) $("prompt").focus({ preventScroll: true });
}

function showWelcome() {
  $("welcome").hidden = $("log").children.length > 0;
}

function fit() {
  const prompt = $("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, 240)}px`;
}

const page = document.documentElement;
const atBottom = () => page.scrollHeight - innerHeight - scrollY < 100;

function follow(always = false) {
  if (always || atBottom()) scrollTo({ top: page.scrollHeight, behavior: "instant" });
}

/** Reads an answer out to those who listen to the page: in whole sentences, as they are complete. */
class Voice {
  #kept = "";

  say(text) {
    this.#kept += text;
    const end = Math.max(this.#kept.lastIndexOf(". "), this.#kept.lastIndexOf("\n"));
    if (end < 0) return;
    $("announce").textContent = this.#kept.slice(0, end + 1);
    this.#kept = this.#kept.slice(end + 1);
  }

  end(facts) {
    $("announce").textContent = facts.error ? "" : this.#kept; // an error is read out where it is shown
  }
}
