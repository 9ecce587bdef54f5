/* A little Markdown, built as nodes: paragraphs, headings, lists, quotes, code, emphasis and links. No HTML is parsed. */

import { make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]{0,30})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
// code, bold, italics, struck out, link
const SPAN =
  /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([^*]+?)\*\*|\*(?=\S)([^*\n]+?)\*|(?<![\w_])_(?=\S)([^_\n]+?)_(?![\w_])|~~(?=\S)([^~]+?)~~|(?<!!)\[([^\][\n]{1,300})\]\((https?:\/\/[^\s()<>]{1,2000})\)/g;
const DEEPEST = 8;

/** The nodes of a text. */
export function markdown(text) {
  const made = document.createDocumentFragment();
  blocks(text.replace(/\r\n?/g, "\n").split("\n"), made, 0);
  return made;
}

function blocks(lines, into, depth) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let found;
    if (!line.trim()) {
      at += 1;
    } else if ((found = FENCE.exec(line))) {
      at = code(lines, at, found, into);
    } else if ((found = HEADING.exec(line))) {
      into.append(inline(make(`h${Math.min(found[1].length + 2, 6)}`), found[2], depth));
      at += 1;
    } else if (RULE.test(line)) {
      into.append(make("hr"));
      at += 1;
    } else if (depth < DEEPEST && QUOTE.test(line)) {
      const inner = [];
      while (at < lines.length && (found = QUOTE.exec(lines[at]))) inner.push(found[1]), (at += 1);
      const quote = make("blockquote");
      blocks(inner, quote, depth + 1);
      into.append(quote);
    } else if (depth < DEEPEST && ITEM.test(line)) {
      at = list(lines, at, into, depth);
    } else {
      const start = at;
      do at += 1;
      while (at < lines.length && lines[at].trim() && !begins(lines[at]));
      into.append(inline(make("p"), lines.slice(start, at).join("\n"), depth));
    }
  }
}

const begins = (line) => [FENCE, HEADING, ITEM, RULE, QUOTE].some((kind) => kind.test(line));

function code(lines, at, found, into) {
  const [, fence, language] = found;
  const inner = [];
  for (at += 1; at < lines.length; at += 1) {
    const line = lines[at].trim();
    if (line.startsWith(fence) && line.replaceAll(fence[0], "") === "") {
      at += 1;
      break;
    }
    inner.push(lines[at]);
  }
  const text = make("code", {}, inner.join("\n"));
  into.append(make("pre", language ? { "data-language": language } : {}, text));
  return at;
}

function list(lines, at, into, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const numbered = /\d/.test(mark);
  const made = make(numbered ? "ol" : "ul");
  if (numbered && parseInt(mark, 10) !== 1) made.start = parseInt(mark, 10);
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || found[1].length > indent.length + 1 || found[1].length < indent.length) break;
    if (/\d/.test(found[2]) !== numbered) break;
    const inner = [found[3]];
    // What is indented further belongs to the item; a blank line does so only in between.
    for (at += 1; at < lines.length; at += 1) {
      const inside = lines[at].startsWith(`${indent}  `) && lines[at].trim();
      const blank = !lines[at].trim() && lines[at + 1]?.startsWith(`${indent}  `) && lines[at + 1].trim();
      if (!inside && !blank) break;
      inner.push(lines[at].slice(Math.min(lines[at].search(/\S|$/), indent.length + 3)));
    }
    const item = make("li");
    blocks(inner, item, depth + 1);
    // A lone paragraph needs no element of its own.
    if (item.firstChild?.nodeName === "P") item.firstChild.replaceWith(...item.firstChild.childNodes);
    made.append(item);
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  into.append(made);
  return at;
}

function inline(element, text, depth) {
  let last = 0;
  for (const found of text.matchAll(SPAN)) {
    const [whole, , snippet, bold, italic, slanted, struck, label, address] = found;
    element.append(text.slice(last, found.index));
    last = found.index + whole.length;
    if (snippet !== undefined) element.append(make("code", {}, snippet));
    else if (depth >= DEEPEST) element.append(whole);
    else if (bold !== undefined) element.append(inline(make("strong"), bold, depth + 1));
    else if (italic !== undefined) element.append(inline(make("em"), italic, depth + 1));
    else if (slanted !== undefined) element.append(inline(make("em"), slanted, depth + 1));
    else if (struck !== undefined) element.append(inline(make("s"), struck, depth + 1));
    else element.append(make("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, label));
  }
  element.append(text.slice(last));
  return element;
}
