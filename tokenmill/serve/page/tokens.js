/* The tokens of an answer with their probabilities: tinted, and with the alternatives on hover or focus. */

import { make } from "./dom.js";

// Below each of these a token is tinted one shade stronger.
const SHADES = [0.9, 0.6, 0.3, 0.1];

export const shade = (p) => SHADES.filter((bound) => p < bound).length;

const percent = (p) => (p >= 0.9995 ? "100 %" : p < 0.0005 ? "<0.1 %" : `${(p * 100).toFixed(1)} %`);
const visible = (text) => text.replaceAll(" ", "·").replaceAll("\n", "↵").replaceAll("\t", "→") || "∅";

/** Turns the entries of a stream's logprobs into tokens; characters that several tokens share go to the last of them. */
export class TokenReader {
  #decoder = new TextDecoder();

  read(entry) {
    const text = entry.bytes ? this.#decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
    const top = (entry.top_logprobs || []).map((one) => [one.token, Math.exp(one.logprob)]);
    return { text, name: entry.token, p: Math.exp(entry.logprob), top };
  }
}

/** A strip of tokens. One stop for Tab; the arrow keys go from token to token. */
export class TokenStrip {
  constructor() {
    this.element = make("div", { className: "tokens", role: "group", tabIndex: 0 });
    this.element.setAttribute("aria-label", "Tokens with probabilities; use the arrow keys");
    this.tokens = [];
    this.element.addEventListener("pointerover", (event) => this.#show(event.target.closest(".token")));
    this.element.addEventListener("pointerleave", hide);
    this.element.addEventListener("focusin", (event) => this.#show(event.target.closest(".token")));
    this.element.addEventListener("focusout", hide);
    this.element.addEventListener("keydown", (event) => this.#move(event));
  }

  add(token) {
    this.tokens.push(token);
    // The space before a word is not tinted with it: at the end of a line it would be a sliver.
    const [, space, word] = token.text.trim() ? /^(\s*)([^]*)$/.exec(token.text) : ["", "", token.text];
    const span = make("span", { className: `token shade-${shade(token.p)}`, tabIndex: -1 }, word);
    span.classList.toggle("newline", word.includes("\n"));
    span.setAttribute("aria-label", `${token.text.trim() || visible(token.name)}, ${percent(token.p)}`);
    span.hidden = token.text === "";
    this.element.append(space, span);
  }

  /** Tokens beyond the answer's own text (an end token, say) are shown as such. */
  settle(content) {
    let length = 0;
    this.tokens.forEach((token, number) => {
      length += token.text.length;
      const span = this.element.children[number];
      if (length > content.length && token.text) span.classList.add("unsaid");
    });
  }

  #move(event) {
    const spans = [...this.element.children].filter((span) => !span.hidden);
    const at = spans.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (event.key === "Escape" && at >= 0) {
      event.stopPropagation();
      this.element.focus();
    } else if (to !== undefined && spans[to]) {
      event.preventDefault();
      spans[to].focus();
    }
  }

  #show(span) {
    if (!span) return hide();
    const token = this.tokens[[...this.element.children].indexOf(span)];
    const rows = token.top.some(([name]) => name === token.name) ? token.top : [...token.top, [token.name, token.p]];
    card.replaceChildren(
      ...rows.map(([name, p]) => {
        const bar = make("i");
        bar.style.setProperty("--p", p.toFixed(4));
        const row = make("div", {}, make("span", {}, visible(name)), bar, make("b", {}, percent(p)));
        row.classList.toggle("chosen", name === token.name);
        return row;
      }),
    );
    card.hidden = false;
    const box = span.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - card.offsetWidth - 8);
    const above = box.top - card.offsetHeight - 6;
    card.style.left = `${Math.max(8, left)}px`;
    card.style.top = `${above > 60 ? above : box.bottom + 6}px`;
  }
}

const card = make("div", { className: "card", role: "tooltip", hidden: true });
document.body.append(card);
const hide = () => {
  card.hidden = true;
};
addEventListener("scroll", hide, { passive: true });
