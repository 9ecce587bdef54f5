/* One message of the conversation as it is shown: what a person wrote, or an answer while and after it comes. */

import { count, duration, make, many } from "./dom.js";
import { markdown } from "./markdown.js";
import { TokenReader, TokenStrip } from "./tokens.js";

export function asked(text) {
  return make("li", { className: "asked" }, make("h2", { className: "unseen" }, "You"), make("div", { className: "text" }, text));
}

const FINISH = { length: "cut at the token limit", stopped: "stopped", broken: "incomplete" };

/** An answer. `say` and `score` feed it, `end` tells how it went. */
export class Answer {
  #strip = null;
  #reader = new TokenReader();
  #due = 0;

  constructor() {
    this.content = "";
    this.body = make("div", { className: "text" });
    this.meta = make("p", { className: "meta" });
    this.problem = make("p", { className: "problem", role: "alert", hidden: true });
    this.actions = make("div", { className: "actions" });
    this.element = make(
      "li",
      { className: "answer busy" },
      make("h2", { className: "unseen" }, "Answer"),
      this.body,
      this.problem,
      make("div", { className: "foot" }, this.meta, this.actions),
    );
  }

  get tokens() {
    return this.#strip?.tokens ?? null;
  }

  say(text) {
    this.content += text;
    if (!this.#strip && !this.#due) this.#due = requestAnimationFrame(() => this.#render());
  }

  /** Entries of logprobs: the answer is shown as tokens instead of formatted text. */
  score(entries) {
    for (const entry of entries) this.addToken(this.#reader.read(entry));
  }

  addToken(token) {
    if (!this.#strip) {
      this.#strip = new TokenStrip();
      this.body.replaceChildren(this.#strip.element);
    }
    this.#strip.add(token);
  }

  end(facts) {
    this.element.classList.remove("busy");
    if (this.#strip) this.#strip.settle(this.content);
    else this.#render();
    this.meta.textContent = told(facts);
    if (facts.error) {
      this.problem.hidden = false;
      this.problem.textContent = facts.error;
    }
  }

  offer(name, act) {
    this.actions.append(make("button", { type: "button", className: "quiet", onclick: act }, name));
  }

  #render() {
    cancelAnimationFrame(this.#due);
    this.#due = 0;
    this.body.replaceChildren(markdown(this.content));
  }
}

function told({ tokens, prompt, cached, ttft, seconds, finish, degraded }) {
  const parts = [];
  if (tokens) parts.push(many(tokens, "token"));
  if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (ttft) parts.push(`first token ${duration(ttft)}`);
  if (prompt) parts.push(`prompt ${count(prompt)}${cached ? ` (${count(cached)} cached)` : ""}`);
  if (FINISH[finish]) parts.push(FINISH[finish]);
  if (degraded) parts.push(`answered by ${degraded}`);
  return parts.join(" · ");
}
